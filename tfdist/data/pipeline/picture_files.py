"""The picture files of a split, with their labels or masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfdist.errors import DataError


@dataclass(frozen=True)
class Pictures:
    """The files of a split.

    Attributes:
        pictures: the path of each picture: JPEG, PNG, GIF or BMP.
        targets: the label of each, int32 `[N]`; or the path of its mask, a picture of one channel with a class a
            pixel; or what `draw` makes its mask of.
        draw: the mask uint8 `[h, w]` of one of the targets, or `None` where they are labels or paths.
    """

    pictures: Sequence[str]
    targets: np.ndarray | Sequence[Any]
    draw: Callable[[Any], np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self.pictures)

    def keep(self, indices: Sequence[int]) -> Pictures:
        """Only the examples with these numbers."""
        pictures = [self.pictures[index] for index in indices]
        if isinstance(self.targets, np.ndarray):
            return Pictures(pictures, self.targets[list(indices)])
        return Pictures(pictures, [self.targets[index] for index in indices], self.draw)

    @property
    def paths(self) -> list[str]:
        """All files that the examples are in, but for what masks are drawn of."""
        of_masks = [] if self.draw is not None or isinstance(self.targets, np.ndarray) else self.targets
        return [*map(str, self.pictures), *map(str, of_masks)]

    @property
    def file_numbers(self) -> np.ndarray:
        """The number of the file that each example is in: int64 `[N]`."""
        return np.arange(len(self))

    def name(self, index: int) -> str:
        """The path of an example's picture."""
        return str(self.pictures[index])

    def name_of_mask(self, index: int) -> str:
        """How messages call the mask of an example."""
        return f"The mask `{self.targets[index]}`" if self.draw is None else f"The mask of `{self.name(index)}`"


def size_of(path: str) -> tuple[int, int]:
    """Height and width of a picture.

    Raises:
        DataError: it is missing or no picture.
    """
    from PIL import Image

    try:
        with Image.open(path) as picture:
            width, height = picture.size
    except OSError as error:
        raise DataError(
            f"The first picture, `{path}`, cannot be read: {error}",
            "repair it, or say to what size pictures are brought with `--data-option size=64,64`",
        ) from error
    return height, width
