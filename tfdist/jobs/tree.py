"""The tree over which the processes of a job send small data: the parent, the children and the subtree of each rank.

Heartbeats go over such a tree, and so do the small messages and sums of sockets. Each process has at most `FAN_OUT`
children. The processes below it have consecutive ranks, so that ranks with equal messages form few ranges.

    rank 0
    ├── rank 1          ranks 2 to 4 are below it
    ├── rank 5          ranks 6 to 8 are below it
    ├── rank 9 ...
    └── rank 13 ...

Synopsis:

    >>> children(0, 17), children(1, 17)
    ([1, 5, 9, 13], [2, 3, 4])
    >>> ancestors(7, 17), subtree(5, 17)
    ([5, 0], range(5, 9))
    >>> [depth(size) for size in (1, 5, 17, 4096)]
    [0, 1, 2, 6]
"""

from __future__ import annotations

import functools
import itertools

FAN_OUT = 4


def children(rank: int, size: int) -> list[int]:
    """The processes directly below `rank`, of `size` processes."""
    return [part.start for part in _parts(subtree(rank, size))]


def ancestors(rank: int, size: int) -> list[int]:
    """The parent of `rank`, its parent, and so on to rank 0."""
    return [part.start for part in reversed(_path(rank, size)[:-1])]


def subtree(rank: int, size: int) -> range:
    """`rank` and all processes below it."""
    return _path(rank, size)[-1]


def depth(size: int) -> int:
    """The number of edges between rank 0 and the process that is farthest away."""
    return 0 if size == 1 else 1 + depth(max(map(len, _parts(range(size)))))


@functools.cache
def _path(rank: int, size: int) -> list[range]:
    """The processes on the way from rank 0 to `rank`, each as its subtree."""
    path = [range(size)]
    while path[-1].start != rank:
        path.append(next(part for part in _parts(path[-1]) if rank in part))
    return path


def _parts(whole: range) -> list[range]:
    """The ranks below the first of `whole`, in parts of about the same length."""
    below = whole[1:]
    count = min(FAN_OUT, len(below))
    cuts = [len(below) * index // count for index in range(count + 1)] if count else []
    return [below[begin:end] for begin, end in itertools.pairwise(cuts)]
