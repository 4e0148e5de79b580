"""Collective operations: their header, which also precedes an error, and how arrays are divided and added.

Synopsis:

    >>> header = Operation(7, ALL_REDUCE, 40).header(body_bytes=0)
    >>> Operation.read(header)
    (Operation(number=7, kind=0, size_bytes=40), 0)
    >>> print(Operation.read(header)[0])
    a tensor of 40 bytes

Two arrays are added in their own dtype, with the results of NumPy's own additions. An array is divided into one part
per process, and the parts into rounds:

    >>> even_cuts(7, 3)
    [0, 2, 4, 7]
    >>> for round_ in rounds([0, 4, 4, 12], most=6):
    ...     print(round_.sources, round_.places)
    [slice(0, 2, None), slice(4, 4, None), slice(4, 8, None)] [slice(0, 2, None), slice(2, 2, None), slice(2, 6, None)]
    [slice(2, 4, None), slice(4, 4, None), slice(8, 12, None)] [slice(0, 2, None), slice(2, 2, None), slice(2, 6, None)]
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Round(NamedTuple):
    """A piece of each process's part: its place in the whole array, and in the memory of one round."""

    sources: list[slice]
    places: list[slice]


def even_cuts(count: int, size: int) -> list[int]:
    """The bounds of `size` parts of `count` elements, which have about the same length."""
    return [count * index // size for index in range(size + 1)]


def slices(cuts: Sequence[int]) -> list[slice]:
    """The parts between the cuts."""
    return [slice(begin, end) for begin, end in itertools.pairwise(cuts)]


def rounds(cuts: Sequence[int], most: int) -> list[Round]:
    """One or more rounds of up to `most` elements, each with the same fraction of every part between two `cuts`.

    The fractions are rounded, so a round may have up to one element more of each part.
    """
    lengths = [end - begin for begin, end in itertools.pairwise(cuts)]
    count = max(1, -(-cuts[-1] // most))
    result = []
    for index in range(count):
        pieces = [(length * index // count, length * (index + 1) // count) for length in lengths]
        sources = [slice(start + begin, start + end) for start, (begin, end) in zip(cuts, pieces, strict=False)]
        places = slices([0, *itertools.accumulate(end - begin for begin, end in pieces)])
        result.append(Round(sources, places))
    return result


def add_into(total: np.ndarray, first: np.ndarray, second: np.ndarray) -> None:
    """Writes `first + second` into `total`; all have the same shape and dtype."""
    if total.dtype.name == "bfloat16":  # adding bfloat16 itself takes up to twice as long
        np.add(first, second, out=total, dtype=np.float32, casting="unsafe")
    else:
        np.add(first, second, out=total)


Body = bytes | bytearray | memoryview

# The number of the operation, its kind, its size in bytes, and the size in bytes of the body that follows.
HEADER = struct.Struct("<QQQQ")
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, EXCHANGE, ERROR, MEETING = range(6)
NAMES = {
    ALL_REDUCE: "a tensor",
    ALL_GATHER: "rows",
    REDUCE_SCATTER: "a tensor to be scattered",
    EXCHANGE: "a message",
}


class Operation(NamedTuple):
    """A collective operation, which must be equal in all processes.

    Attributes:
        number: how many operations this process has begun.
        kind: such as `ALL_REDUCE`.
        size_bytes: the size that is the same in all processes: that of a tensor to be added, or of one gathered row.
    """

    number: int
    kind: int
    size_bytes: int

    def header(self, body_bytes: int = 0) -> bytes:
        return HEADER.pack(*self, body_bytes)

    @classmethod
    def read(cls, header: bytes | bytearray) -> tuple[Operation, int]:
        """The operation of a header, and the size of its body in bytes."""
        number, kind, size_bytes, body_bytes = HEADER.unpack(header[: HEADER.size])
        return cls(number, kind, size_bytes), body_bytes

    def __str__(self) -> str:
        name = NAMES.get(self.kind, "something else")
        return name if self.kind == EXCHANGE else f"{name} of {self.size_bytes} bytes"
