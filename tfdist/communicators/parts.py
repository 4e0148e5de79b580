"""Variables of which each process of a job has a part.

The part of a process is a range of the elements of the whole, flattened in C order. The ranges of all processes, in the
order of the ranks, make up the whole.

Synopsis:

    >>> part = Part(whole_shape=(2, 3), ends=(4, 6), rank=1)
    >>> part.of(np.arange(6).reshape(2, 3))
    array([4, 5])
    >>> part.sizes
    (4, 2)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfdist.internals import tensorflow_variables

_PART = "_tfdist_part"


@dataclass(frozen=True)
class Part:
    """The part of a variable that this process has.

    Attributes:
        whole_shape: the shape of the whole variable.
        ends: the element after the last one of each process, by rank.
        rank: of this process.
    """

    whole_shape: tuple[int, ...]
    ends: tuple[int, ...]
    rank: int

    @property
    def begins(self) -> tuple[int, ...]:
        """The first element of each process, by rank."""
        return (0, *self.ends[:-1])

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of elements of each process, by rank."""
        return tuple(end - begin for begin, end in zip(self.begins, self.ends, strict=True))

    @property
    def size(self) -> int:
        """The number of elements of this process."""
        return self.sizes[self.rank]

    @property
    def own(self) -> slice:
        """The elements of this process, in the flattened whole."""
        return slice(self.begins[self.rank], self.ends[self.rank])

    @property
    def is_whole(self) -> bool:
        """Whether this process has all elements."""
        return self.size == math.prod(self.whole_shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the part: that of the whole where one process has all of it, flat elsewhere."""
        return self.whole_shape if self.is_whole else (self.size,)

    def of(self, whole: np.ndarray) -> np.ndarray:
        """The part of this process, in `shape`, of an array of the whole."""
        return whole.reshape(-1)[self.own].reshape(self.shape)


def mark(variable: Any, part: Part | None) -> None:
    """Notes that a Keras variable holds `part` of a variable; with `None`, that it holds all of its own."""
    # Past Keras' attribute tracking, so that it is not saved with the model.
    object.__setattr__(variable, _PART, part)


def part_of(variable: Any) -> Part | None:
    """The part that a Keras variable holds, if it does not hold a whole variable."""
    found: Part | None = getattr(variable, _PART, None)
    return found


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
    whole = np.frombuffer(b"".join(exchange(mine.tobytes())), held.dtype.as_numpy_dtype)
    return whole.reshape(part.whole_shape)


def fill(variable: Any, whole: np.ndarray) -> None:
    """Assigns this process' part of `whole` to a `variable` of which each process has a part."""
    part = part_of(variable)
    assert part is not None
    if part.size:
        (held,) = tensorflow_variables.copies(variable)
        tensorflow_variables.fill(held, np.ascontiguousarray(part.of(whole)))
