"""Examples in TFRecord files, each read from where it lies: any order costs the same, and nothing before it is read."""

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

# A record: its length (8 bytes), a checksum of that (4), the record, a checksum of it (4).
_BEFORE, _AFTER = 12, 4


@dataclass(frozen=True)
class Records:
    """The examples of a split, as `tf.train.Example`s with an encoded picture.

    Attributes:
        paths: the files.
        places: for each example, the number of its file, where it begins and how long it is: int64 `[N, 3]`.
        target: the feature with the label or the mask.
        masks: whether that is a mask, encoded as a picture.
        first_label: what the first class is called in the file.
    """

    paths: tuple[Path, ...]
    places: np.ndarray
    target: str
    masks: bool = False
    first_label: int = 0

    def __len__(self) -> int:
        return len(self.places)

    def keep(self, indices: Sequence[int]) -> Records:
        """Only the examples with these numbers."""
        return dataclasses.replace(self, places=self.places[list(indices)])

    @property
    def file_numbers(self) -> np.ndarray:
        """The number of the file that each example is in: int64 `[N]`."""
        return self.places[:, 0]

    def name(self, index: int) -> str:
        """Where an example lies, for messages."""
        file, begin, _ = self.places[index]
        return f"byte {begin} of {self.paths[file]}"

    def name_of_mask(self, index: int) -> str:
        """How messages call the mask of an example."""
        return f"The mask at {self.name(index)}"

    def read(self, index: int) -> bytes:
        """An example as it is in its file."""
        file, begin, length = self.places[index].tolist()
        return os.pread(self._descriptors[file], length, begin)

    @cached_property
    def _descriptors(self) -> list[int]:
        return [os.open(path, os.O_RDONLY) for path in self.paths]


def index(paths: Sequence[Path]) -> np.ndarray:
    """Where the records of some files lie, without reading them: int64 `[N, 3]`, file, begin and length in bytes.

    Raises:
        DataError: a file is missing or ends within a record.
    """
    places = [(number, begin, length) for number, path in enumerate(paths) for begin, length in _records_of(path)]
    return np.array(places, np.int64).reshape(-1, 3)


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
