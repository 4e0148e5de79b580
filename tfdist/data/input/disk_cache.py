"""A cache of decoded examples on the disk, in a few files, to which an example is added when it is first decoded.

The folder's name depends on the decoded files, their sizes and times, so that other files have another folder. Several
processes, on several machines too, write at the same time:

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

import contextlib
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.input import cache_folder

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


# An example has height and width of the picture, then its pixels, then the target as int32.
_HEADER = np.dtype(np.int32)


class DiskCache:
    """The cache of the examples of a split.

    Args:
        what: tells the examples of these files from others: which there are, and how they are decoded.
        paths: the files that contain the examples.
        count: the number of examples.
    """

    def __init__(self, what: Any, paths: Sequence[str | Path], count: int):
        folder = cache_folder.root() / cache_folder.fingerprint(["packed", what], paths)
        self._files = PackedFiles(folder, count)

    def through(
        self, index: tf.Tensor, decode: Callable[[], tuple[tf.Tensor, tf.Tensor]], channels: int
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """The cached result of `decode` for example `index`: picture uint8 `[h, w, C]` and target int32."""
        kept = tf.ensure_shape(tf.numpy_function(self._read, [index], tf.string), [])

        def unpacked() -> tuple[tf.Tensor, tf.Tensor]:
            size = tf.io.decode_raw(tf.strings.substr(kept, 0, 2 * _HEADER.itemsize), tf.int32)
            pixels = size[0] * size[1] * channels
            picture = tf.io.decode_raw(tf.strings.substr(kept, 2 * _HEADER.itemsize, pixels), tf.uint8)
            target = tf.io.decode_raw(tf.strings.substr(kept, 2 * _HEADER.itemsize + pixels, -1), tf.int32)
            # A label is one number; a mask has one number per pixel.
            shape = tf.cond(tf.size(target) == 1, lambda: tf.zeros(0, tf.int32), lambda: size)
            return tf.reshape(picture, [size[0], size[1], channels]), tf.reshape(target, shape)

        def packed() -> tuple[tf.Tensor, tf.Tensor]:
            picture, target = decode()
            written = tf.numpy_function(self._write, [index, picture, target], tf.int32)
            with tf.control_dependencies([written]):
                return tf.identity(picture), tf.identity(target)

        return tf.cond(tf.strings.length(kept) > 0, unpacked, packed)

    def _read(self, index: int) -> bytes:
        return self._files.read(int(index))

    def _write(self, index: int, picture: np.ndarray, target: np.ndarray) -> np.int32:
        content = np.array(picture.shape[:2], _HEADER).tobytes() + picture.tobytes() + target.astype(np.int32).tobytes()
        with contextlib.suppress(OSError):  # if the disk is full, the example is decoded again next time
            self._files.write(int(index), content)
        return np.int32(0)
