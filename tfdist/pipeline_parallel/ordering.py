"""Puts a schedule into the graph of a step: control dependencies order the tasks of each stage."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.internals import tensorflow_graphs as graphs
from tfdist.pipeline_parallel import placement, schedule
from tfdist.pipeline_parallel.schedule import Task

# The stage, the last operations of one of its tasks, and the first operations of its next task.
Edge = tuple[int, Sequence[Any], Sequence[Any]]


def order(graph: Any, name: str, devices: Sequence[str], micro_batches: int) -> bool:
    """Makes the stages in `graph` compute in the order of the schedule `name`.

    Returns:
        Whether that is possible. If micro-batches exchange values within a step, they cannot follow each other, and
        the order is left to the data dependencies.
    """
    operations = graph.get_operations()
    added = edges(operations, name, len(devices), micro_batches)
    if not _is_acyclic(operations, added):
        return False
    for stage, last, first in added:
        with tf.device(devices[stage]), tf.control_dependencies(last):
            done = tf.no_op()
        for operation in first:
            graphs.add_control_input(operation, done)
    return True


def edges(operations: Sequence[Any], name: str, stages: int, micro_batches: int) -> list[Edge]:
    """Returns the edges between consecutive tasks of each stage in the order of the schedule `name`."""
    members: dict[tuple[int, Task], list[Any]] = {}
    for operation in operations:
        task = placement.task_of(operation.name)
        if task is not None:
            members.setdefault(task, []).append(operation)
    added: list[Edge] = []
    for stage in range(stages):
        tasks = schedule.tasks(name, stage, stages, micro_batches)
        present = [members[stage, task] for task in tasks if (stage, task) in members]
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
    """Whether the graph has no cycle with these edges (Kahn's algorithm)."""
    successors: dict[Any, list[Any]] = {}
    missing: dict[Any, int] = {operation.name: 0 for operation in operations}

    def add(source: Any, target: Any) -> None:
        successors.setdefault(source, []).append(target)
        missing[target] += 1

    for operation in operations:
        for source in graphs.sources(operation):
            add(source.name, operation.name)
    for index, (_, last, first) in enumerate(edges):
        missing[index] = 0
        for operation in last:
            add(operation.name, index)
        for operation in first:
            add(index, operation.name)
    ready = [node for node, count in missing.items() if count == 0]
    done = 0
    while ready:
        done += 1
        for target in successors.get(ready.pop(), ()):
            missing[target] -= 1
            if missing[target] == 0:
                ready.append(target)
    return done == len(missing)
