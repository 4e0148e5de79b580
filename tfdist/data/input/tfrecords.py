"""Random access to the examples in TFRecord files: an example is read without reading earlier records."""

from __future__ import annotations

import array
import bisect
import contextlib
import dataclasses
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import numpy as np
from filelock import FileLock

from tfdist import files
from tfdist.data.input import disk_cache, picture_headers
from tfdist.errors import DataError
from tfdist.jobs import consensus

# A record has its length (8 bytes), a checksum of the length (4), the data, and a checksum of the data (4).
_BEFORE, _AFTER = 12, 4


@dataclass(frozen=True)
class Records:
    """The examples of a split, as `tf.train.Example`s with an encoded picture.

    Attributes:
        paths: the files.
        ranges: the file's number, the first byte and the length of each example: int64 `[N, 3]`.
        target: the feature with the label or the mask.
        masks: whether the target is a mask, encoded as a picture.
        first_label: the label of the first class in the files.
        max_pixels: the most pixels of a picture or a mask that is decoded.
    """

    paths: tuple[Path, ...]
    ranges: np.ndarray
    target: str
    masks: bool = False
    first_label: int = 0
    max_pixels: int = picture_headers.MAX_PIXELS

    def __len__(self) -> int:
        return len(self.ranges)

    def keep(self, indices: Sequence[int] | np.ndarray) -> Records:
        """The records of the examples with these numbers only."""
        if isinstance(indices, range) and indices.step == 1:  # a view of the memory-mapped array, not a copy
            return dataclasses.replace(self, ranges=self.ranges[indices.start : indices.stop])
        return dataclasses.replace(self, ranges=self.ranges[np.asarray(indices)])

    @property
    def file_numbers(self) -> np.ndarray:
        """The number of the file of each example: int64 `[N]`."""
        return self.ranges[:, 0]

    @property
    def starts(self) -> np.ndarray:
        """The number of the first example of each file, and the number of examples: int64 `[files + 1]`."""
        numbers = self.file_numbers
        return np.array([bisect.bisect_left(numbers, file) for file in range(len(self.paths) + 1)], np.int64)

    @property
    def examples_fingerprint(self) -> str:
        """A hash that distinguishes these examples from other examples of the same files."""
        return consensus.fingerprint_of_arrays([np.ascontiguousarray(self.ranges)])

    def listing(self) -> str:
        """A hash of the files' names and of the examples' ranges, which does not depend on where their folder is."""
        return consensus.fingerprint([[path.name for path in self.paths], self.examples_fingerprint])

    def name(self, index: int) -> str:
        """The position of an example, for messages."""
        file, begin, _ = self.ranges[index]
        return f"byte {begin} of {self.paths[file]}"

    def name_of_mask(self, index: int) -> str:
        """The name of an example's mask in messages."""
        return f"The mask at {self.name(index)}"

    def read(self, index: int) -> bytes:
        """Reads the bytes of an example from its file."""
        file, begin, length = self.ranges[index].tolist()
        return os.pread(self._descriptors[file], length, begin)

    def will_read(self, indices: np.ndarray) -> None:
        """Advises the operating system to read these examples ahead, in the order in which they are stored.

        Systems such as macOS do not support this advice.
        """
        if not hasattr(os, "posix_fadvise"):
            return
        file, begin, length = self.ranges[np.sort(indices)].T
        end = begin + length
        gaps = np.flatnonzero((file[1:] != file[:-1]) | (begin[1:] - end[:-1] > _AFTER + _BEFORE))
        for first, last in zip([0, *gaps + 1], [*gaps, len(file) - 1], strict=True) if len(file) else ():
            offset, length_of_run = int(begin[first]), int(end[last] - begin[first])
            os.posix_fadvise(self._descriptors[file[first]], offset, length_of_run, os.POSIX_FADV_WILLNEED)

    @cached_property
    def _descriptors(self) -> list[int]:
        return [os.open(path, os.O_RDONLY) for path in self.paths]


def index(paths: Sequence[Path]) -> np.ndarray:
    """The ranges of all records in some files: int64 `[N, 3]`, file, begin and length, memory-mapped.

    One process finds them, while the others wait, and writes them to the cache folder. If it cannot be written, each
    process finds them and keeps them in memory.

    Raises:
        DataError: a file is missing or ends within a record.
    """
    try:
        cached = disk_cache.root() / f"records-{disk_cache.fingerprint('records', paths)}.npy"
    except OSError as error:
        raise _unreadable(error.filename, error) from error
    with contextlib.suppress(OSError):
        return np.load(cached, mmap_mode="r")
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{cached}.lock"):
            if not cached.exists():
                files.write_atomically(cached, lambda temporary: _write_index(temporary, paths))
        return np.load(cached, mmap_mode="r")
    except (OSError, NotImplementedError):  # the latter for a file system without locks
        ranges = [_records_of(path, number) for number, path in enumerate(paths)]
        return np.concatenate([np.zeros((0, 3), np.int64), *ranges])


def _write_index(path_of_index: Path, paths: Sequence[Path]) -> None:
    """Writes the ranges file by file in NumPy's format, whose header leaves room for the number of rows."""
    rows = 0
    with path_of_index.open("wb") as index_file:
        for number, path in enumerate(paths):
            _write_header(index_file, rows)
            index_file.seek(0, os.SEEK_END)
            ranges = _records_of(path, number)
            index_file.write(ranges.data)
            rows += len(ranges)
        _write_header(index_file, rows)


def _write_header(index_file: BinaryIO, rows: int) -> None:
    index_file.seek(0)
    np.lib.format.write_array_header_1_0(index_file, {"descr": "<i8", "fortran_order": False, "shape": (rows, 3)})


def _records_of(path: Path, number: int) -> np.ndarray:
    """The ranges of the records in one file, which reads only their lengths."""
    ranges, position = array.array("q"), 0
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            while position < size:
                file.seek(position)
                (length,) = struct.unpack("<Q", file.read(_BEFORE)[:8])
                ranges.extend((number, position + _BEFORE, length))
                position += _BEFORE + length + _AFTER
    except (OSError, struct.error, OverflowError) as error:
        raise _unreadable(path, error) from error
    if position != size:
        raise DataError(f"`{path}` ends within a record", "remove its folder; the next start prepares it again")
    return np.frombuffer(ranges, np.int64).reshape(-1, 3)


def _unreadable(path: Path | str, error: Exception) -> DataError:
    return DataError(f"`{path}` cannot be read: {error}", "remove its folder; the next start prepares it")
