"""Variables of which each process of a job has a part.

The part of a process is a range of positions along one axis of the whole. The ranges of all processes, in the order of
the ranks, make up the axis.

Synopsis:

    >>> part = Part(whole_shape=(2, 3), lengths=(2, 1), rank=1, axis=1)
    >>> part.of(np.arange(6).reshape(2, 3))
    array([[2],
           [5]])
    >>> part.shape
    (2, 1)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfdist.internals import tensorflow_variables
from tfdist.internals.attached import Attached


@dataclass(frozen=True)
class Part:
    """The part of a variable that this process has.

    Attributes:
        whole_shape: the shape of the whole variable; one without axes counts as one with an axis of length 1.
        lengths: of the part of each process along the axis, by rank.
        rank: of this process.
        axis: along which the whole is cut.
    """

    whole_shape: tuple[int, ...]
    lengths: tuple[int, ...]
    rank: int
    axis: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether this process has all elements."""
        return self.lengths[self.rank] == sum(self.lengths)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the part of this process."""
        return self.whole_shape if self.is_whole else self._shape_of(self.rank)

    @property
    def size(self) -> int:
        """The number of elements of this process."""
        return math.prod(self.shape)

    @property
    def owner(self) -> int:
        """The process that has most elements."""
        return max(range(len(self.lengths)), key=self.lengths.__getitem__)

    def of(self, whole: np.ndarray) -> np.ndarray:
        """The part of this process, in `shape`, of an array of the whole, perhaps in the memory of that."""
        begin = sum(self.lengths[: self.rank])
        own = slice(begin, begin + self.lengths[self.rank])
        return np.atleast_1d(whole)[(slice(None),) * self.axis + (own,)].reshape(self.shape)

    def joined(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """The whole, of the elements of all processes, flat in C order, by rank."""
        shaped = [part.reshape(self._shape_of(rank)) for rank, part in enumerate(parts)]
        return np.concatenate(shaped, self.axis).reshape(self.whole_shape)

    def _shape_of(self, rank: int) -> tuple[int, ...]:
        axes = list(self.whole_shape) or [1]
        axes[self.axis] = self.lengths[rank]
        return tuple(axes)


_part: Attached[Part] = Attached("part")


def mark(variable: Any, part: Part | None) -> None:
    """Notes that a Keras variable holds `part` of a variable; with `None`, that it holds all of its own."""
    _part.set(variable, part)


def part_of(variable: Any) -> Part | None:
    """The part that a Keras variable holds, if it does not hold a whole variable."""
    return _part.get(variable)


def whole_shape(variable: Any) -> tuple[int, ...]:
    """The shape of `variable`; of one that is shared out, the shape of the whole."""
    part = part_of(variable)
    return tuple(variable.shape) if part is None else part.whole_shape


def gathered(variable: Any, exchange: Callable[[bytes], list[bytes]]) -> np.ndarray:
    """The whole of a `variable` of which each process has a part; all processes call it."""
    part = part_of(variable)
    assert part is not None
    (held,) = tensorflow_variables.copies(variable)
    mine = tensorflow_variables.memory(tensorflow_variables.read(held)) if part.size else np.zeros(0, np.uint8)
    return part.joined([np.frombuffer(one, held.dtype.as_numpy_dtype) for one in exchange(mine.tobytes())])


def fill(variable: Any, whole: np.ndarray) -> None:
    """Assigns this process' part of `whole` to a `variable` of which each process has a part."""
    part = part_of(variable)
    assert part is not None
    if part.size:
        (held,) = tensorflow_variables.copies(variable)
        tensorflow_variables.fill(held, np.ascontiguousarray(part.of(whole)))
