"""Variables that are divided among the processes of a job.

The part of a process is a range of positions along one axis of the whole variable. The ranges of all processes, in the
order of the ranks, cover the axis.

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
from tfdist.internals.patching import Attached


@dataclass(frozen=True)
class Part:
    """This process's part of a variable.

    Attributes:
        whole_shape: the shape of the whole variable; a scalar counts as a vector of length 1.
        lengths: the length of each process's part along the axis, by rank.
        rank: the rank of this process.
        axis: the axis along which the variable is divided.
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
        """The shape of this process's part."""
        return self.whole_shape if self.is_whole else self._shape_of(self.rank)

    @property
    def size(self) -> int:
        """The number of elements of this process's part."""
        return math.prod(self.shape)

    @property
    def owner(self) -> int:
        """The rank of the process that has the most elements."""
        return max(range(len(self.lengths)), key=self.lengths.__getitem__)

    def of(self, whole: np.ndarray) -> np.ndarray:
        """This process's part of the array `whole`, in `shape`; may share its memory."""
        begin = sum(self.lengths[: self.rank])
        positions = slice(begin, begin + self.lengths[self.rank])
        return np.atleast_1d(whole)[(slice(None),) * self.axis + (positions,)].reshape(self.shape)

    def joined(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """The whole array, from the parts of all processes by rank, each flat in C order."""
        shaped = [part.reshape(self._shape_of(rank)) for rank, part in enumerate(parts)]
        return np.concatenate(shaped, self.axis).reshape(self.whole_shape)

    def _shape_of(self, rank: int) -> tuple[int, ...]:
        axes = list(self.whole_shape) or [1]
        axes[self.axis] = self.lengths[rank]
        return tuple(axes)


_part: Attached[Part] = Attached("part")


def mark(variable: Any, part: Part | None) -> None:
    """Notes that a Keras variable contains only `part` of a variable; with `None`, that it contains all elements."""
    _part.set(variable, part)


def part_of(variable: Any) -> Part | None:
    """The part that a Keras variable contains; `None` if it contains a whole variable."""
    return _part.get(variable)


def whole_shape(variable: Any) -> tuple[int, ...]:
    """The shape of `variable`; if it is divided among the processes, the shape of the whole."""
    part = part_of(variable)
    return tuple(variable.shape) if part is None else part.whole_shape


def gathered(variable: Any, exchange: Callable[[bytes], list[bytes]]) -> np.ndarray:
    """The whole of a `variable` that is divided among the processes; all processes call it."""
    part = part_of(variable)
    assert part is not None
    (local,) = tensorflow_variables.copies(variable)
    own = tensorflow_variables.memory(tensorflow_variables.read(local)) if part.size else np.zeros(0, np.uint8)
    return part.joined([np.frombuffer(values, local.dtype.as_numpy_dtype) for values in exchange(own.tobytes())])


def fill(variable: Any, whole: np.ndarray) -> None:
    """Assigns this process's part of `whole` to a `variable` that is divided among the processes."""
    part = part_of(variable)
    assert part is not None
    if part.size:
        (local,) = tensorflow_variables.copies(variable)
        tensorflow_variables.fill(local, np.ascontiguousarray(part.of(whole)))
