"""Many contents by number in few files, which several processes, of several machines too, write at the same time.

    NAME.data     contents, one after the other        each process appends to a pair of files of its own,
    NAME.index    (number, begin, length) of each      and reads those of all processes

A row is written to an index after the data of its content are on the disk: what a process that was killed has left
behind, or a machine that lost power, is whole or not found. No file is ever changed elsewhere than at its end.

Synopsis:

    >>> files = PackedFiles(folder, count=1000)
    >>> files.read(7)
    b''
    >>> files.write(7, b"content")
    >>> files.read(7)
    b'content'
"""

from __future__ import annotations

import os
import threading
import time
import uuid
import weakref
from pathlib import Path

import numpy as np

# The others, and later runs, find a content after so much was written, or so much time has passed, or at the end.
BYTES_UNTIL_FOUND, SECONDS_UNTIL_FOUND = 64 << 20, 5.0
SECONDS_BETWEEN_LOOKS = 1.0

_ROW = np.dtype([("number", "<i8"), ("begin", "<i8"), ("length", "<i8")])
_NOWHERE = -1


class PackedFiles:
    """The contents of the numbers 0 to `count - 1`, as far as they were written.

    Args:
        folder: the folder of the files; it is made by the first `write`.
        count: the number of contents.
    """

    def __init__(self, folder: Path, count: int):
        self._folder = folder
        self._places = np.zeros(count, [("file", "<i4"), ("begin", "<i8"), ("length", "<i8")])
        self._places["file"] = _NOWHERE
        self._data: list[int] = []  # a descriptor of each file of contents
        self._indexes: dict[str, tuple[int, int]] = {}  # which of them an index is of, and how much of it was read
        self._lock = threading.Lock()
        self._looked = float("-inf")
        self._own: _OwnFiles | None = None

    def read(self, number: int) -> bytes:
        """The content of a number, empty if it was not written, or not long enough ago by another process."""
        if self._places["file"][number] == _NOWHERE:
            self._look()
        file, begin, length = self._places[number].tolist()
        return b"" if file == _NOWHERE else os.pread(self._data[file], length, begin)

    def write(self, number: int, content: bytes) -> None:
        """Keeps the content of a number.

        Raises:
            OSError: the disk is full, or the folder is read-only; what was written before stays.
        """
        with self._lock:
            if self._own is None:
                self._own = _OwnFiles(self._folder)
                weakref.finalize(self, self._own.close)
                self._indexes[self._own.name] = len(self._data), 0
                self._data.append(self._own.data)
            begin = self._own.append(number, content)
            self._places[number] = self._indexes[self._own.name][0], begin, len(content)

    def _look(self) -> None:
        """Reads what other processes have added to their indexes."""
        with self._lock:
            if time.monotonic() - self._looked < SECONDS_BETWEEN_LOOKS:
                return
            self._looked = time.monotonic()
            for path in sorted(self._folder.glob("*.index")):
                if self._own is None or path.stem != self._own.name:
                    self._read_index(path)

    def _read_index(self, path: Path) -> None:
        if path.stem not in self._indexes:
            self._indexes[path.stem] = len(self._data), 0
            self._data.append(os.open(path.with_suffix(".data"), os.O_RDONLY))
        file, done = self._indexes[path.stem]
        rows = np.fromfile(path, _ROW, offset=done)  # without a row that is being written
        self._indexes[path.stem] = file, done + rows.nbytes
        whole = rows[rows["begin"] + rows["length"] <= os.fstat(self._data[file]).st_size]
        places = np.empty(len(whole), self._places.dtype)
        places["file"], places["begin"], places["length"] = file, whole["begin"], whole["length"]
        self._places[whole["number"]] = places


class _OwnFiles:
    """The pair of files that this process writes.

    Attributes:
        name: of both, without their suffixes.
        data: the descriptor of the contents, to read them too.
    """

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.name = uuid.uuid4().hex
        self.data = os.open(folder / f"{self.name}.data", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        self._index = os.open(folder / f"{self.name}.index", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._end = self._found = 0  # bytes of contents, and of those whose rows are written
        self._rows: list[tuple[int, int, int]] = []
        self._since = time.monotonic()

    def append(self, number: int, content: bytes) -> int:
        """Writes the content of a number; returns where it begins."""
        begin = self._end
        if os.pwrite(self.data, content, begin) < len(content):
            raise OSError("the disk is full")  # the next content overwrites this part
        self._end += len(content)
        self._rows.append((number, begin, len(content)))
        if self._end - self._found >= BYTES_UNTIL_FOUND or time.monotonic() - self._since >= SECONDS_UNTIL_FOUND:
            self._write_rows()
        return begin

    def close(self) -> None:
        """Writes the rows that are missing; the contents can still be read."""
        self._write_rows()
        os.close(self._index)

    def _write_rows(self) -> None:
        os.fsync(self.data)
        os.write(self._index, np.array(self._rows, _ROW).tobytes())
        self._rows, self._found, self._since = [], self._end, time.monotonic()
