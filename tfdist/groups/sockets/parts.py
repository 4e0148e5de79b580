"""How an array is cut into a part per process, and the parts into rounds.

Synopsis:

    >>> even_cuts(7, 3)
    [0, 2, 4, 7]
    >>> for one in rounds([0, 4, 4, 12], most=6):
    ...     print(one.sources, one.places)
    [slice(0, 2, None), slice(4, 4, None), slice(4, 8, None)] [slice(0, 2, None), slice(2, 2, None), slice(2, 6, None)]
    [slice(2, 4, None), slice(4, 4, None), slice(8, 12, None)] [slice(0, 2, None), slice(2, 2, None), slice(2, 6, None)]
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple


class Round(NamedTuple):
    """A piece of each process' part: its place in the whole array, and in the memory that holds one round."""

    sources: list[slice]
    places: list[slice]


def even_cuts(count: int, size: int) -> list[int]:
    """The bounds of `size` parts, of about one length, of `count` elements."""
    return [count * index // size for index in range(size + 1)]


def slices(cuts: Sequence[int]) -> list[slice]:
    """The parts between the cuts."""
    return [slice(begin, end) for begin, end in itertools.pairwise(cuts)]


def rounds(cuts: Sequence[int], most: int) -> list[Round]:
    """One or more rounds of up to `most` elements, each with the same fraction of every part between two `cuts`.

    The fractions are rounded, so that a round may have up to one element more of each part.
    """
    lengths = [end - begin for begin, end in itertools.pairwise(cuts)]
    count = max(1, -(-cuts[-1] // most))
    found = []
    for index in range(count):
        pieces = [(length * index // count, length * (index + 1) // count) for length in lengths]
        sources = [slice(start + begin, start + end) for start, (begin, end) in zip(cuts, pieces, strict=False)]
        places = slices([0, *itertools.accumulate(end - begin for begin, end in pieces)])
        found.append(Round(sources, places))
    return found
