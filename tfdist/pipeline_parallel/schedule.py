"""The order in which a stage computes the forward and backward passes of its micro-batches.

| schedule | a stage computes | micro-batches whose activations it stores |
|---|---|---|
| `gpipe` | all forward passes, then all backward passes | all |
| `1f1b` | a backward pass as soon as one is possible, else a forward pass | at most one per stage from it on |
| `2bw` | as `1f1b`, and continues from one step into the next | as `1f1b` |

Sources: `gpipe`, Huang et al. 2019 (arXiv 1811.06965); `1f1b`, Narayanan et al. 2019 (arXiv 1806.03377); `2bw`,
Narayanan et al. 2021 (arXiv 2006.09503), with gradients at the weights from before the last update; see
`tfdist.pipeline_parallel.delayed`.

`order` puts a schedule into the graph of a step: control dependencies order the tasks of each stage. The names of the
operations show their tasks. The forward pass of an operation is traced in a name scope with the numbers of the stage
and the micro-batch. When a tape differentiates an operation, TensorFlow passes the name scope of its forward pass to
the gradient function. So the names in the graph show to which stage an operation belongs, forward or backward, without
a special model or tape.

Synopsis:

    >>> [f"{task.direction[0]}{task.micro_batch}" for task in tasks("1f1b", stage=0, stages=2, micro_batches=3)]
    ['f0', 'f1', 'b0', 'f2', 'b1', 'b2']
"""

from __future__ import annotations

import graphlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import tensorflow as tf

from tfdist.internals import tensorflow_graphs as graphs
from tfdist.profiling import stages as stage_names

Synchronous = Literal["gpipe", "1f1b"]
Schedule = Literal["gpipe", "1f1b", "2bw"]
DELAYED: Schedule = "2bw"
BACKWARD = "gradient_tape/"  # TensorFlow's prefix for the names of operations that a tape computes
# The stage, the last operations of one of its tasks, and the first operations of its next task.
Edge = tuple[int, Sequence[Any], Sequence[Any]]


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


def task_of(name: str) -> tuple[int, Task] | None:
    """Returns the stage and the task of an operation by its name; `None` if it belongs to no task."""
    numbers = stage_names.stage_and_micro_batch(name)
    if numbers is None:
        return None
    stage, micro_batch = numbers
    return stage, Task("backward" if BACKWARD in name else "forward", micro_batch)


def scope_of(stage: int, task: Task) -> str:
    """Returns the name scope for additional operations of a stage's task, besides those of the model and the tape."""
    scope = stage_names.scope(stage, task.micro_batch)
    return BACKWARD + scope if task.direction == "backward" else scope


def order_tasks(graph: Any, name: str, devices: Sequence[str], micro_batches: int) -> bool:
    """Makes the stages in `graph` compute in the order of the schedule `name`.

    Returns:
        Whether that is possible. If micro-batches exchange values within a step, they cannot follow each other, and
        the order is left to the data dependencies.
    """
    operations = graph.get_operations()
    added = task_edges(operations, name, len(devices), micro_batches)
    if not _is_acyclic(operations, added):
        return False
    for stage, last, first in added:
        with tf.device(devices[stage]), tf.control_dependencies(last):
            done = tf.no_op()
        for operation in first:
            graphs.add_control_input(operation, done)
    return True


def task_edges(operations: Sequence[Any], name: str, stages: int, micro_batches: int) -> list[Edge]:
    """Returns the edges between consecutive tasks of each stage in the order of the schedule `name`."""
    members: dict[tuple[int, Task], list[Any]] = {}
    for operation in operations:
        task = task_of(operation.name)
        if task is not None:
            members.setdefault(task, []).append(operation)
    added: list[Edge] = []
    for stage in range(stages):
        in_order = tasks(name, stage, stages, micro_batches)
        present = [members[stage, task] for task in in_order if (stage, task) in members]
        added += [(stage, _last(task, operations), _first(after)) for task, after in itertools.pairwise(present)]
    return added


def _first(members: Sequence[Any]) -> list[Any]:
    """Returns the operations of a task that have no inputs from the same task."""
    names = {operation.name for operation in members}
    return [operation for operation in members if not any(source.name in names for source in graphs.sources(operation))]


def _last(members: Sequence[Any], operations: Sequence[Any]) -> list[Any]:
    """Returns the operations of a task that only other tasks use.

    Operations that nothing uses, such as the gradient of the first layer's input, must not be computed only because of
    the order.
    """
    names = {operation.name for operation in members}
    used_inside = {source.name for operation in members for source in graphs.sources(operation)}
    others = [operation for operation in operations if operation.name not in names]
    used_outside = {source.name for operation in others for source in graphs.sources(operation)}
    return [operation for operation in members if operation.name in used_outside and operation.name not in used_inside]


def _is_acyclic(operations: Sequence[Any], edges: Sequence[Edge]) -> bool:
    """Whether the graph has no cycle with these edges."""
    predecessors: dict[Any, list[Any]] = {
        operation.name: [source.name for source in graphs.sources(operation)] for operation in operations
    }
    for edge, (_, last, first) in enumerate(edges):
        predecessors[edge] = [operation.name for operation in last]
        for operation in first:
            predecessors[operation.name].append(edge)
    try:
        graphlib.TopologicalSorter(predecessors).prepare()
    except graphlib.CycleError:
        return False
    return True
