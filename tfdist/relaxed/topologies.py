"""Which processes average with which, and by how much: the mixing matrices of decentralised training.

    ring             the two neighbours on a ring
    grid             the four neighbours on a torus whose sides are as equal as can be
    exponential      the processes 1, 2, 4, ... places behind and before
    full             all
    a matrix         `[n, n]`, row i with the weights that process i gives to the weights of each

Row i of a mixing matrix W says how process i averages: x_i becomes the sum of W_ij x_j. W is doubly stochastic: its
rows and columns sum to one, so that the mean over the processes stays what it is.

In a topology with a name a process gives itself and each neighbour the same weight.
Source: Lian et al., Can decentralized algorithms outperform centralized algorithms?, arXiv 1705.09056.

Synopsis:

    >>> matrix("ring", 4)[0].round(2).tolist()
    [0.33, 0.33, 0.0, 0.33]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdist.errors import UnknownNameError, UsageError

NAMES = ("ring", "grid", "exponential", "full")
# Of sums of decimal numbers that a user has written.
ROUNDING = 1e-6


def matrix(topology: str | Sequence[Sequence[float]] | np.ndarray, size: int) -> np.ndarray:
    """The mixing matrix of `size` processes, float64 `[size, size]`.

    Raises:
        UsageError: the user's own matrix is not doubly stochastic, or is for another number of processes, or its graph
            falls apart, so that some processes never hear of others.
    """
    if isinstance(topology, str):
        if topology not in NAMES:
            raise UnknownNameError("topology", topology, NAMES)
        found = np.eye(size)
        for rank in range(size):
            found[rank, neighbours(topology, rank, size)] = 1
        return found / found.sum(axis=1, keepdims=True)
    return _checked(topology, size)


def neighbours(topology: str, rank: int, size: int) -> list[int]:
    """The processes that process `rank` averages with in one of the topologies with a name, without itself."""
    if topology == "full":
        found = set(range(size))
    elif topology == "grid":
        across = next(width for width in range(int(size**0.5), 0, -1) if size % width == 0)
        row, column = divmod(rank, across)
        rows = size // across
        vertical = {(row + step) % rows * across + column for step in (-1, 1)}
        found = vertical | {row * across + (column + step) % across for step in (-1, 1)}
    else:
        jumps = [1] if topology == "ring" else [2**power for power in range((size - 1).bit_length())]
        found = {(rank + sign * jump) % size for jump in jumps for sign in (-1, 1)}
    return sorted(found - {rank})


def sends_to(step: int, rank: int, size: int) -> int:
    """The process that `rank` pushes to in step number `step` of push-sum: 1, 2, 4, ... places on, in turn.

    Source: Assran et al., Stochastic gradient push for distributed deep learning, arXiv 1811.10792, appendix A.
    """
    jumps = max(1, (size - 1).bit_length())
    return (rank + 2 ** (step % jumps)) % size


def _checked(given: Any, size: int) -> np.ndarray:
    try:
        found = np.array(given, np.float64)
    except (TypeError, ValueError):
        found = np.zeros(0)
    if found.shape != (size, size):
        shown = " x ".join(map(str, found.shape)) if found.ndim == 2 else "no matrix"
        raise UsageError(
            f"`topology` is {shown}, and the job has {size} processes",
            f"give a matrix of {size} rows and {size} columns, or one of {', '.join(f'`{name}`' for name in NAMES)}",
        )
    if (found < 0).any() or not np.isfinite(found).all():
        raise UsageError("`topology` has weights below zero, or that are not finite", "use weights from 0 to 1")
    for axis, what in ((1, "row"), (0, "column")):
        sums = found.sum(axis=axis)
        worst = int(np.argmax(abs(sums - 1)))
        if abs(sums[worst] - 1) > ROUNDING:
            raise UsageError(
                f"`topology` is not doubly stochastic: {what} {worst} sums to {sums[worst]:g}",
                "give weights whose rows and columns each sum to 1, so that the mean over the processes stays",
            )
    if (np.linalg.matrix_power((found + np.eye(size)) / 2, size) == 0).any():
        raise UsageError(
            "`topology` falls apart: some processes never hear of others", "connect all of them, directly or by others"
        )
    return found
