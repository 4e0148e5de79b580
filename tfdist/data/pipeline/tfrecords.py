"""Examples in TFRecord files with random access: an example is read without the records before it."""

from __future__ import annotations

import dataclasses
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from tfdist.errors import DataError

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

    def keep(self, indices: Sequence[int]) -> Records:
        """Only the examples with these numbers."""
        return dataclasses.replace(self, ranges=self.ranges[list(indices)])

    @property
    def file_numbers(self) -> np.ndarray:
        """The number of the file of each example: int64 `[N]`."""
        return self.ranges[:, 0]

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

    @cached_property
    def _descriptors(self) -> list[int]:
        return [os.open(path, os.O_RDONLY) for path in self.paths]


def index(paths: Sequence[Path]) -> np.ndarray:
    """The positions of all records of some files, found without reading them: int64 `[N, 3]`, file, begin, length.

    Raises:
        DataError: a file is missing or ends within a record.
    """
    ranges = [(number, begin, length) for number, path in enumerate(paths) for begin, length in _records_of(path)]
    return np.array(ranges, np.int64).reshape(-1, 3)


def _records_of(path: Path) -> list[tuple[int, int]]:
    found = []
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            place = 0
            while place < size:
                file.seek(place)
                (length,) = struct.unpack("<Q", file.read(_BEFORE)[:8])
                found.append((place + _BEFORE, length))
                place += _BEFORE + length + _AFTER
    except (OSError, struct.error) as error:
        raise DataError(f"`{path}` cannot be read: {error}", "remove its folder; the next start prepares it") from error
    if place != size:
        raise DataError(f"`{path}` ends within a record", "remove its folder; the next start prepares it again")
    return found
