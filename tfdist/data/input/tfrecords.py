"""Examples in TFRecord files with random access: an example is read without the records before it."""

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
from tfdist.data.input import cache_folder
from tfdist.errors import DataError
from tfdist.jobs import consensus

# A record has its length (8 bytes), a checksum of the length (4), the data, and a checksum of the data (4).
_BEFORE, _AFTER = 12, 4


@dataclass(frozen=True)
class Records:
    """The examples of a split, as `tf.train.Example`s with an encoded picture.

    Attributes:
        paths: the files.
        ranges: the number of the file, the first byte and the length of each example: int64 `[N, 3]`.
        target: the feature with the label or the mask.
        masks: whether the target is a mask, encoded as a picture.
        first_label: the label of the first class in the file.
    """

    paths: tuple[Path, ...]
    ranges: np.ndarray
    target: str
    masks: bool = False
    first_label: int = 0

    def __len__(self) -> int:
        return len(self.ranges)

    def keep(self, indices: Sequence[int] | np.ndarray) -> Records:
        """Only the examples with these numbers."""
        if isinstance(indices, range) and indices.step == 1:  # a part of what is mapped, not a copy
            return dataclasses.replace(self, ranges=self.ranges[indices.start : indices.stop])
        return dataclasses.replace(self, ranges=self.ranges[np.asarray(indices)])

    @property
    def file_numbers(self) -> np.ndarray:
        """The number of the file of each example: int64 `[N]`."""
        return self.ranges[:, 0]

    @property
    def starts(self) -> np.ndarray:
        """The number of the first example of each file, and how many there are: int64 `[files + 1]`."""
        numbers = self.file_numbers
        return np.array([bisect.bisect_left(numbers, file) for file in range(len(self.paths) + 1)], np.int64)

    @property
    def examples_fingerprint(self) -> str:
        """Tells these examples from others of the same files."""
        return consensus.fingerprint_of_arrays([np.ascontiguousarray(self.ranges)])

    def listing(self) -> str:
        """A hash of the files' names and of each example's place and length, the same wherever their folder lies."""
        return consensus.fingerprint([[path.name for path in self.paths], self.examples_fingerprint])

    def name(self, index: int) -> str:
        """The position of an example, for messages."""
        file, begin, _ = self.ranges[index]
        return f"byte {begin} of {self.paths[file]}"

    def name_of_mask(self, index: int) -> str:
        """The name of an example's mask in messages."""
        return f"The mask at {self.name(index)}"

    def read(self, index: int) -> bytes:
        """The bytes of an example in its file."""
        file, begin, length = self.ranges[index].tolist()
        return os.pread(self._descriptors[file], length, begin)

    def will_read(self, indices: np.ndarray) -> None:
        """Has the operating system read these examples in advance, in the order in which they are stored.

        It is only advice, which systems such as macOS do not take.
        """
        if not hasattr(os, "posix_fadvise"):
            return
        file, begin, length = self.ranges[np.sort(indices)].T
        end = begin + length
        apart = np.flatnonzero((file[1:] != file[:-1]) | (begin[1:] - end[:-1] > _AFTER + _BEFORE))
        for first, last in zip([0, *apart + 1], [*apart, len(file) - 1], strict=True) if len(file) else ():
            place = int(begin[first]), int(end[last] - begin[first])
            os.posix_fadvise(self._descriptors[file[first]], *place, os.POSIX_FADV_WILLNEED)

    @cached_property
    def _descriptors(self) -> list[int]:
        return [os.open(path, os.O_RDONLY) for path in self.paths]


def index(paths: Sequence[Path]) -> np.ndarray:
    """The positions of all records of some files: int64 `[N, 3]`, file, begin, length, mapped into memory.

    They are found once, by one process while others wait, and kept in the folder of the caches. Where nothing can be
    written there, each process finds them and keeps them in memory.

    Raises:
        DataError: a file is missing or ends within a record.
    """
    try:
        kept = cache_folder.root() / f"records-{cache_folder.fingerprint('records', paths)}.npy"
    except OSError as error:
        raise _unreadable(error.filename, error) from error
    with contextlib.suppress(OSError):
        return np.load(kept, mmap_mode="r")
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{kept}.lock"):
            if not kept.exists():
                files.write_atomically(kept, lambda temporary: _write(temporary, paths))
        return np.load(kept, mmap_mode="r")
    except (OSError, NotImplementedError):  # the latter for a file system without locks
        return _found(paths)


def _write(kept: Path, paths: Sequence[Path]) -> None:
    """Writes the index file by file as an array of NumPy's format, whose header leaves room for the number of rows."""
    rows = 0
    with kept.open("wb") as index_file:
        for number, path in enumerate(paths):
            _write_header(index_file, rows)
            index_file.seek(0, os.SEEK_END)
            found = _records_of(path, number)
            index_file.write(found.data)
            rows += len(found)
        _write_header(index_file, rows)


def _write_header(index_file: BinaryIO, rows: int) -> None:
    index_file.seek(0)
    np.lib.format.write_array_header_1_0(index_file, {"descr": "<i8", "fortran_order": False, "shape": (rows, 3)})


def _found(paths: Sequence[Path]) -> np.ndarray:
    return np.concatenate(
        [np.zeros((0, 3), np.int64), *(_records_of(path, number) for number, path in enumerate(paths))]
    )


def _records_of(path: Path, number: int) -> np.ndarray:
    """The rows of one file, found without reading its records."""
    found, place = array.array("q"), 0
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            while place < size:
                file.seek(place)
                (length,) = struct.unpack("<Q", file.read(_BEFORE)[:8])
                found.extend((number, place + _BEFORE, length))
                place += _BEFORE + length + _AFTER
    except (OSError, struct.error, OverflowError) as error:
        raise _unreadable(path, error) from error
    if place != size:
        raise DataError(f"`{path}` ends within a record", "remove its folder; the next start prepares it again")
    return np.frombuffer(found, np.int64).reshape(-1, 3)


def _unreadable(path: Path | str, error: Exception) -> DataError:
    return DataError(f"`{path}` cannot be read: {error}", "remove its folder; the next start prepares it")
