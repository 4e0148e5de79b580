"""The folder of caches that all processes and runs share: indexes of files, and decoded examples.

A cache of decoded examples is a folder of a few files, to which an example is added when it is first decoded. The name
of the folder depends on the names, sizes and modification times of the decoded files. Several processes, also on
several machines, can write at the same time:

    NAME.data     contents, one after the other        each process appends to its own pair of files,
    NAME.index    (number, begin, length) of each      and reads those of all processes

A row is written to the index after its content is on the disk: what is left behind by a process that was killed, or
by a machine that lost power, is either complete or not in the index. Files only change at their end.

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
import shutil
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdist.jobs import consensus

if TYPE_CHECKING:
    import tensorflow as tf

FOLDER_VARIABLE = "TFDIST_CACHE_DIR"
DEFAULT_FOLDER = "~/.cache/tfdist"
# Rows are written to the index after this many bytes or seconds, and at the end; only then other processes see them.
BYTES_BETWEEN_ROWS, SECONDS_BETWEEN_ROWS = 64 << 20, 5.0
# How often a process reads the indexes of others.
SECONDS_BETWEEN_LOOKS = 1.0

_ROW = np.dtype([("number", "<i8"), ("begin", "<i8"), ("length", "<i8")])
_NOWHERE = -1

# An example is stored as height and width of the picture, its pixels, and the target as int32.
_HEADER = np.dtype(np.int32)


def root() -> Path:
    """The folder: TFDIST_CACHE_DIR, else `~/.cache/tfdist`."""
    return Path(os.environ.get(FOLDER_VARIABLE) or DEFAULT_FOLDER).expanduser()


def free_bytes() -> int:
    """The free space on the disk of the folder; 0 if it is unknown."""
    folder = root()
    with contextlib.suppress(OSError, StopIteration):
        return shutil.disk_usage(next(parent for parent in (folder, *folder.parents) if parent.exists())).free
    return 0


def fingerprint(purpose: Any, paths: Sequence[str | Path]) -> str:
    """A name for a cache of these files; it changes with their names, sizes and modification times.

    Args:
        purpose: what is cached, and how it was made from the files.
        paths: the files.

    Raises:
        OSError: a file is missing.
    """
    files = [(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in zip(paths, map(os.stat, paths), strict=True)]
    return consensus.fingerprint([purpose, files])


class DiskCache:
    """The cache of the examples of a split.

    Args:
        decoded_as: identifies the examples of these files and how they are decoded.
        paths: the files that contain the examples.
        count: the number of examples.
    """

    def __init__(self, decoded_as: Any, paths: Sequence[str | Path], count: int):
        folder = root() / fingerprint(["packed", decoded_as], paths)
        self._files = PackedFiles(folder, count)

    def through(
        self, index: tf.Tensor, decode: Callable[[], tuple[tf.Tensor, tf.Tensor]], channels: int
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """The cached or new result of `decode` for example `index`: picture uint8 `[h, w, C]` and target int32."""
        import tensorflow as tf  # not at the top: `tfdist doctor` looks at the folder without TensorFlow

        stored = tf.ensure_shape(tf.numpy_function(self._files.read, [index], tf.string), [])

        def unpacked() -> tuple[tf.Tensor, tf.Tensor]:
            size = tf.io.decode_raw(tf.strings.substr(stored, 0, 2 * _HEADER.itemsize), tf.int32)
            pixels = size[0] * size[1] * channels
            picture = tf.io.decode_raw(tf.strings.substr(stored, 2 * _HEADER.itemsize, pixels), tf.uint8)
            target = tf.io.decode_raw(tf.strings.substr(stored, 2 * _HEADER.itemsize + pixels, -1), tf.int32)
            # A label is one number; a mask has one number per pixel.
            shape = tf.cond(tf.size(target) == 1, lambda: tf.zeros(0, tf.int32), lambda: size)
            return tf.reshape(picture, [size[0], size[1], channels]), tf.reshape(target, shape)

        def packed() -> tuple[tf.Tensor, tf.Tensor]:
            picture, target = decode()
            written = tf.numpy_function(self._write, [index, picture, target], tf.int32)
            with tf.control_dependencies([written]):
                return tf.identity(picture), tf.identity(target)

        return tf.cond(tf.strings.length(stored) > 0, unpacked, packed)

    def _write(self, index: int, picture: np.ndarray, target: np.ndarray) -> np.int32:
        content = np.array(picture.shape[:2], _HEADER).tobytes() + picture.tobytes() + target.astype(np.int32).tobytes()
        with contextlib.suppress(OSError):  # if the disk is full, the example is decoded again next time
            self._files.write(int(index), content)
        return np.int32(0)


class PackedFiles:
    """Contents with the numbers 0 to `count - 1`, each of which may or may not be in the files.

    Args:
        folder: the folder of the files; the first `write` creates it.
        count: the number of contents.
    """

    def __init__(self, folder: Path, count: int):
        self._folder = folder
        self._places = np.zeros(count, [("file", "<i4"), ("begin", "<i8"), ("length", "<i8")])
        self._places["file"] = _NOWHERE
        self._data: list[int] = []  # the descriptors of the data files
        self._indexes: dict[str, tuple[int, int]] = {}  # per index its data file, and how many bytes of it were read
        self._lock = threading.Lock()
        self._looked = float("-inf")
        self._writer: _Writer | None = None

    def read(self, number: int) -> bytes:
        """The content with a number; empty if it was not written, or only just now by another process."""
        if self._places["file"][number] == _NOWHERE:
            self._look()
        file, begin, length = self._places[number].tolist()
        return b"" if file == _NOWHERE else os.pread(self._data[file], length, begin)

    def write(self, number: int, content: bytes) -> None:
        """Writes the content with a number.

        Raises:
            OSError: the disk is full, or the folder is read-only; earlier contents stay.
        """
        with self._lock:
            if self._writer is None:
                self._writer = _Writer(self._folder)
                weakref.finalize(self, self._writer.close)
                self._indexes[self._writer.name] = len(self._data), 0
                self._data.append(self._writer.data)
            begin = self._writer.append(number, content)
            self._places[number] = self._indexes[self._writer.name][0], begin, len(content)

    def _look(self) -> None:
        """Reads the rows that other processes have added to their indexes."""
        with self._lock:
            if time.monotonic() - self._looked < SECONDS_BETWEEN_LOOKS:
                return
            self._looked = time.monotonic()
            for path in sorted(self._folder.glob("*.index")):
                if self._writer is None or path.stem != self._writer.name:
                    self._read_index(path)

    def _read_index(self, path: Path) -> None:
        if path.stem not in self._indexes:
            self._indexes[path.stem] = len(self._data), 0
            self._data.append(os.open(path.with_suffix(".data"), os.O_RDONLY))
        file, done = self._indexes[path.stem]
        rows = np.fromfile(path, _ROW, offset=done)  # ignores an incomplete last row
        self._indexes[path.stem] = file, done + rows.nbytes
        complete = rows[rows["begin"] + rows["length"] <= os.fstat(self._data[file]).st_size]
        places = np.empty(len(complete), self._places.dtype)
        places["file"], places["begin"], places["length"] = file, complete["begin"], complete["length"]
        self._places[complete["number"]] = places


class _Writer:
    """The pair of files that this process writes.

    Attributes:
        name: the name of both files without suffix.
        data: the descriptor of the data file, for reading and writing.
    """

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.name = uuid.uuid4().hex
        self.data = os.open(folder / f"{self.name}.data", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        self._index = os.open(folder / f"{self.name}.index", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._end = self._indexed = 0  # the size of all contents, and of those whose rows are written
        self._rows: list[tuple[int, int, int]] = []
        self._rows_written = time.monotonic()

    def append(self, number: int, content: bytes) -> int:
        """Writes a content; returns its first byte in the data file."""
        begin = self._end
        if os.pwrite(self.data, content, begin) < len(content):
            raise OSError("the disk is full")  # the next content overwrites this part
        self._end += len(content)
        self._rows.append((number, begin, len(content)))
        seconds = time.monotonic() - self._rows_written
        if self._end - self._indexed >= BYTES_BETWEEN_ROWS or seconds >= SECONDS_BETWEEN_ROWS:
            self._write_rows()
        return begin

    def close(self) -> None:
        """Writes the remaining rows; the contents can still be read."""
        self._write_rows()
        os.close(self._index)

    def _write_rows(self) -> None:
        os.fsync(self.data)
        os.write(self._index, np.array(self._rows, _ROW).tobytes())
        self._rows, self._indexed, self._rows_written = [], self._end, time.monotonic()
