"""The picture files of a split, with their labels or masks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tfdist.data.input import picture_headers
from tfdist.errors import DataError
from tfdist.jobs import consensus


@dataclass(frozen=True)
class Pictures:
    """The files of a split.

    Attributes:
        pictures: the path of each picture: JPEG, PNG, GIF or BMP.
        targets: the label of each picture, int32 `[N]`; or the path of its mask, a picture whose single channel is the
            class of each pixel; or the argument of `draw`.
        draw: returns the mask uint8 `[h, w]` for a target; `None` if the targets are labels or paths.
        max_pixels: the most pixels of a picture or a mask that is decoded.
    """

    pictures: Sequence[str]
    targets: np.ndarray | Sequence[Any]
    draw: Callable[[Any], np.ndarray] | None = None
    max_pixels: int = picture_headers.MAX_PIXELS

    def __len__(self) -> int:
        return len(self.pictures)

    def keep(self, indices: Sequence[int] | np.ndarray) -> Pictures:
        """The files of the examples with these numbers only."""
        pictures = [self.pictures[index] for index in indices]
        if isinstance(self.targets, np.ndarray):
            return replace(self, pictures=pictures, targets=self.targets[np.asarray(indices)])
        return replace(self, pictures=pictures, targets=[self.targets[index] for index in indices])

    @property
    def paths(self) -> list[str]:
        """All files of the examples, except annotations from which masks are drawn."""
        return [*map(str, self.pictures), *map(str, [] if self._targets_are_not_paths else self.targets)]

    @property
    def _targets_are_not_paths(self) -> bool:
        return self.draw is not None or isinstance(self.targets, np.ndarray)

    @property
    def file_numbers(self) -> np.ndarray:
        """The number of the file of each example: int64 `[N]`."""
        return np.arange(len(self))

    @property
    def examples_fingerprint(self) -> str:
        """A hash that distinguishes these examples from other examples of the same files."""
        return consensus.fingerprint(list(map(str, self.pictures)))

    def listing(self) -> str:
        """A hash of the files' names and sizes and of the targets, which does not depend on where their folder is.

        Raises:
            OSError: a file is missing.
        """
        folder = os.path.commonpath(self.paths)
        files = [(os.path.relpath(path, folder), os.path.getsize(path)) for path in self.paths]
        targets = self.targets.tolist() if isinstance(self.targets, np.ndarray) else self.targets
        return consensus.fingerprint([files, targets if self._targets_are_not_paths else []])

    def name(self, index: int) -> str:
        """The path of an example's picture."""
        return str(self.pictures[index])

    def name_of_mask(self, index: int) -> str:
        """The name of an example's mask in messages."""
        return f"The mask `{self.targets[index]}`" if self.draw is None else f"The mask of `{self.name(index)}`"


def size_of(path: str, max_pixels: int) -> tuple[int, int]:
    """Height and width of the first picture, which is not decoded.

    Raises:
        DataError: the file is missing or not a picture, or has more than `max_pixels` pixels.
    """
    try:
        size, reason = picture_headers.size_of(Path(path).read_bytes()), "it is no complete picture"
    except OSError as error:
        size, reason = None, error.strerror or str(error)
    if size is None:
        raise DataError(
            f"The first picture, `{path}`, cannot be read: {reason}",
            "repair it, or set the size of pictures with `--data-option size=64,64`",
        )
    if size.pixels > max_pixels:
        raise DataError(
            f"The first picture, `{path}`, has {size}, and at most {max_pixels:,} pixels are decoded",
            "allow more with `--data-option max_pixels=N` if the memory suffices, or remove the picture",
        )
    return size.height, size.width
