"""Which process updates which elements of the variables of an optimizer, and holds their slots.

    split       every process has about the same number of elements
    placed      one process has all elements
    replicated  every process has all elements, and updates all of them

A variable is split into equal parts; what remains goes to the processes that have least so far, so that the largest
share is at most an N-th of all elements and one unit (`UNIT`), as long as nothing is placed.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence

from tfdist.communicators.parts import Part

# Elements of a large variable that stay together: TensorFlow divides a tensor without a copy only where its parts begin
# at multiples of 64 bytes.
UNIT = 16
LARGE = 1024


class Sharing(enum.Enum):
    """How a variable is shared by the processes."""

    SPLIT = "split"
    PLACED = "placed"
    REPLICATED = "replicated"


def parts(shapes: Sequence[tuple[int, ...]], sharings: Sequence[Sharing], rank: int, ranks: int) -> list[Part | None]:
    """The part of process `rank` in each variable; `None` for one that is replicated.

    Args:
        shapes: of the variables.
        sharings: how each of them is shared.
        rank: of this process.
        ranks: the number of processes.
    """
    loads = [0] * ranks
    found: list[Part | None] = [None] * len(shapes)
    sizes = [math.prod(shape) for shape in shapes]
    # The largest first, as in the longest-processing-time rule of scheduling (Graham, SIAM J. Appl. Math., 1969).
    for index in sorted(_which(sharings, Sharing.PLACED), key=lambda index: -sizes[index]):
        owner = loads.index(min(loads))
        loads[owner] += sizes[index]
        found[index] = Part(shapes[index], (0,) * owner + (sizes[index],) * (ranks - owner), rank)
    for index in _which(sharings, Sharing.SPLIT):
        of_each = _divided(sizes[index], loads)
        loads = [load + size for load, size in zip(loads, of_each, strict=True)]
        found[index] = Part(shapes[index], tuple(sum(of_each[: rank + 1]) for rank in range(ranks)), rank)
    return found


def _which(sharings: Sequence[Sharing], wanted: Sharing) -> list[int]:
    return [index for index, sharing in enumerate(sharings) if sharing is wanted]


def _divided(size: int, loads: Sequence[int]) -> list[int]:
    """The number of elements for each process: equal numbers of units, the rest to those with the smallest loads."""
    ranks = len(loads)
    unit = UNIT if size >= LARGE else 1
    units, rest = divmod(size, unit)
    each, more = divmod(units, ranks)
    of_each = [each * unit] * ranks
    by_load = sorted(range(ranks), key=lambda rank: loads[rank])
    for rank in by_load[:more]:
        of_each[rank] += unit
    of_each[by_load[more % ranks]] += rest
    return of_each
