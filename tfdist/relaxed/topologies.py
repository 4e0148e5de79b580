"""Which processes average with which, and with what weights: the mixing matrices of decentralized training.

    ring             the two neighbours on a ring
    grid             the four neighbours on a torus whose sides are as equal as possible
    exponential      the processes 1, 2, 4, ... positions ahead and behind
    full             all processes
    tree             the parent and the two children in a binary tree: those of i are 2i + 1 and 2i + 2
    a matrix         `[n, n]`; row i has the weights with which process i averages

Process i averages by row i of the mixing matrix W: x_i becomes the sum of W_ij x_j. W is doubly stochastic: its rows
and columns sum to one, so that the mean over the processes does not change. In a named topology a process gives each
neighbour the weight 1 / (1 + the larger number of neighbours of the two), and itself the rest; if all processes have as
many neighbours, all of these weights are the same (Metropolis weights: Xiao and Boyd, Fast linear iterations for
distributed averaging, Systems & Control Letters 53, 2004).

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

NAMES = ("ring", "grid", "exponential", "full", "tree")
ROUNDING = 1e-6  # in sums of decimal numbers that a user has written


def matrix(topology: str | Sequence[Sequence[float]] | np.ndarray, size: int) -> np.ndarray:
    """The mixing matrix of `size` processes, float64 `[size, size]`.

    Raises:
        UsageError: a user's matrix is not doubly stochastic, is for another number of processes, or does not connect
            all processes.
    """
    if not isinstance(topology, str):
        return _checked(topology, size)
    if topology not in NAMES:
        raise UnknownNameError("topology", topology, NAMES)
    others = [neighbours(topology, rank, size) for rank in range(size)]
    mixing = np.zeros((size, size))
    for rank in range(size):
        for other in others[rank]:
            mixing[rank, other] = 1 / (1 + max(len(others[rank]), len(others[other])))
        mixing[rank, rank] = 1 - mixing[rank].sum()
    return mixing


def neighbours(topology: str, rank: int, size: int) -> list[int]:
    """The other processes that process `rank` averages with in a named topology."""
    if topology == "full":
        others = set(range(size))
    elif topology == "tree":
        others = {(rank - 1) // 2, 2 * rank + 1, 2 * rank + 2} & set(range(size))
    elif topology == "grid":
        columns = next(width for width in range(int(size**0.5), 0, -1) if size % width == 0)
        row, column = divmod(rank, columns)
        rows = size // columns
        vertical = {(row + step) % rows * columns + column for step in (-1, 1)}
        others = vertical | {row * columns + (column + step) % columns for step in (-1, 1)}
    else:
        jumps = [1] if topology == "ring" else [2**power for power in range((size - 1).bit_length())]
        others = {(rank + sign * jump) % size for jump in jumps for sign in (-1, 1)}
    return sorted(others - {rank})


def sends_to(step: int, rank: int, size: int) -> int:
    """The process that `rank` pushes to in step number `step` of push-sum: 1, 2, 4, ... positions ahead, in turn.

    Source: Assran et al., Stochastic gradient push for distributed deep learning, arXiv 1811.10792, appendix A.
    """
    jumps = max(1, (size - 1).bit_length())
    return (rank + 2 ** (step % jumps)) % size


def _checked(topology: Any, size: int) -> np.ndarray:
    """A user's mixing matrix as an array; raises `UsageError`, see `matrix`."""
    try:
        mixing = np.array(topology, np.float64)
    except (TypeError, ValueError):
        mixing = np.zeros(0)
    if mixing.shape != (size, size):
        shown = " x ".join(map(str, mixing.shape)) if mixing.ndim == 2 else "no matrix"
        raise UsageError(
            f"`topology` is {shown}, and the job has {size} processes",
            f"pass a matrix of {size} rows and {size} columns, or one of {', '.join(f'`{name}`' for name in NAMES)}",
        )
    if (mixing < 0).any() or not np.isfinite(mixing).all():
        raise UsageError("`topology` has weights that are below zero or not finite", "use weights from 0 to 1")
    for axis, kind in ((1, "row"), (0, "column")):
        sums = mixing.sum(axis=axis)
        worst = int(np.argmax(abs(sums - 1)))
        if abs(sums[worst] - 1) > ROUNDING:
            raise UsageError(
                f"`topology` is not doubly stochastic: {kind} {worst} sums to {sums[worst]:g}",
                "pass weights whose rows and columns each sum to 1, so that averaging keeps the mean of all processes",
            )
    if (np.linalg.matrix_power((mixing + np.eye(size)) / 2, size) == 0).any():
        raise UsageError(
            "`topology` is not connected: the weights of some processes never reach some others",
            "connect all processes, directly or through others",
        )
    return mixing
