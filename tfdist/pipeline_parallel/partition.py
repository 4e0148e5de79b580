"""Where a row of operations is cut into stages, by what each operation costs.

Synopsis:

    >>> balanced([1.0, 1.0, 1.0, 3.0], 2)
    [0, 3]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence


def balanced(costs: Sequence[float], stages: int) -> list[int]:
    """Cuts operations into contiguous stages such that the most expensive stage is as cheap as can be.

    A dynamic program over (operations, stages), O(stages * operations²).

    Args:
        costs: of each operation, in the order in which they run; 0 or more, in any unit.
        stages: at most as many as there are operations.

    Returns:
        The index of the first operation of each stage.
    """
    until = [0.0, *itertools.accumulate(costs)]
    operations = len(costs)
    # best[end] is the cost of the most expensive stage when the operations before `end` fill the stages so far.
    best = [0.0] + [math.inf] * operations
    choices: list[list[int]] = []
    for stage in range(1, stages + 1):
        found = [math.inf] * (operations + 1)
        begins = [0] * (operations + 1)
        for end in range(stage, operations + 1):
            for begin in range(stage - 1, end):
                slowest = max(best[begin], until[end] - until[begin])
                if slowest < found[end]:
                    found[end], begins[end] = slowest, begin
        best = found
        choices.append(begins)
    cuts, end = [], operations
    for begins in reversed(choices):
        end = begins[end]
        cuts.append(end)
    return cuts[::-1]


def of_stages(costs: Sequence[float], begins: Sequence[int]) -> list[float]:
    """The cost of each stage; `begins` are the indices of their first operations."""
    ends = [*begins[1:], len(costs)]
    return [sum(costs[begin:end]) for begin, end in zip(begins, ends, strict=True)]
