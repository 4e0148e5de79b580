"""The order in which a stage computes the forward and backward passes of its micro-batches.

| schedule | a stage computes | micro-batches whose activations it stores |
|---|---|---|
| `gpipe` | all forward passes, then all backward passes | all |
| `1f1b` | a backward pass as soon as one is possible, else a forward pass | at most one per stage from it on |
| `2bw` | as `1f1b`, and continues from one step into the next | as `1f1b` |

Sources: `gpipe`, Huang et al. 2019 (arXiv 1811.06965); `1f1b`, Narayanan et al. 2019 (arXiv 1806.03377); `2bw`,
Narayanan et al. 2021 (arXiv 2006.09503), with gradients at the weights from before the last update; see
`tfdist.pipeline_parallel.delayed`.

Synopsis:

    >>> [f"{task.direction[0]}{task.micro_batch}" for task in tasks("1f1b", stage=0, stages=2, micro_batches=3)]
    ['f0', 'f1', 'b0', 'f2', 'b1', 'b2']
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Synchronous = Literal["gpipe", "1f1b"]
Schedule = Literal["gpipe", "1f1b", "2bw"]
DELAYED: Schedule = "2bw"


@dataclass(frozen=True)
class Task:
    """One pass of a micro-batch through a stage; `direction` is "forward" or "backward"."""

    direction: str
    micro_batch: int


def tasks(schedule: str, stage: int, stages: int, micro_batches: int) -> list[Task]:
    """Returns the tasks of stage number `stage` of `stages` in a step, in order."""
    ahead = micro_batches if schedule == "gpipe" else min(stages - 1 - stage, micro_batches)
    order = [Task("forward", index) for index in range(ahead)]
    for index in range(ahead, micro_batches):
        order += [Task("forward", index), Task("backward", index - ahead)]
    return order + [Task("backward", index) for index in range(micro_batches - ahead, micro_batches)]


def bubble(stages: int, micro_batches: int) -> float:
    """Returns the fraction of a step in which a stage waits, if all stages take the same time."""
    return (stages - 1) / (micro_batches + stages - 1)
