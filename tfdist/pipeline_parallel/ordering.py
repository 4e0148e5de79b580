"""Puts a schedule into the graph of a step: on each stage one task follows the other, by control dependencies."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.internals import tensorflow_graphs as graphs
from tfdist.pipeline_parallel import placement, schedule
from tfdist.pipeline_parallel.schedule import Task

# The last operations of a task of a stage, and the first of the next one.
Edge = tuple[int, Sequence[Any], Sequence[Any]]


def order(graph: Any, name: str, devices: Sequence[str], micro_batches: int) -> bool:
    """Makes the stages in `graph` compute in the order of the schedule `name`.

    Returns:
        Whether that is possible. Where micro-batches meet in the middle of a step, they cannot follow each other, and
        their order is left to the data.
    """
    operations = graph.get_operations()
    found = edges(operations, name, len(devices), micro_batches)
    if not _possible(operations, found):
        return False
    for stage, last, first in found:
        with tf.device(devices[stage]), tf.control_dependencies(last):
            done = tf.no_op()
        for operation in first:
            graphs.add_control_input(operation, done)
    return True


def edges(operations: Sequence[Any], name: str, stages: int, micro_batches: int) -> list[Edge]:
    """What follows what in the order of the schedule `name`."""
    members: dict[tuple[int, Task], list[Any]] = {}
    for operation in operations:
        task = placement.task_of(operation.name)
        if task is not None:
            members.setdefault(task, []).append(operation)
    found: list[Edge] = []
    for stage in range(stages):
        tasks = schedule.tasks(name, stage, stages, micro_batches)
        present = [members[stage, task] for task in tasks if (stage, task) in members]
        found += [(stage, _last(one, operations), _first(other)) for one, other in itertools.pairwise(present)]
    return found


def _first(members: Sequence[Any]) -> list[Any]:
    """The operations of a task that take nothing from others of the same task."""
    inside = {one.name for one in members}
    return [one for one in members if not any(source.name in inside for source in graphs.sources(one))]


def _last(members: Sequence[Any], operations: Sequence[Any]) -> list[Any]:
    """The operations of a task that others use, and none of the same task.

    What nobody uses, such as the gradient of the first layer's input, must not be computed for the order's sake.
    """
    inside = {one.name for one in members}
    within = {source.name for one in members for source in graphs.sources(one)}
    outside = {source.name for one in operations if one.name not in inside for source in graphs.sources(one)}
    return [one for one in members if one.name in outside and one.name not in within]


def _possible(operations: Sequence[Any], edges: Sequence[Edge]) -> bool:
    """Whether the graph remains without circles with these edges (Kahn's algorithm)."""
    after: dict[Any, list[Any]] = {}
    missing: dict[Any, int] = {one.name: 0 for one in operations}

    def add(source: Any, target: Any) -> None:
        after.setdefault(source, []).append(target)
        missing[target] += 1

    for one in operations:
        for source in graphs.sources(one):
            add(source.name, one.name)
    for index, (_, last, first) in enumerate(edges):
        missing[index] = 0
        for one in last:
            add(one.name, index)
        for one in first:
            add(index, one.name)
    ready = [one for one, count in missing.items() if count == 0]
    done = 0
    while ready:
        one = ready.pop()
        done += 1
        for target in after.get(one, ()):
            missing[target] -= 1
            if missing[target] == 0:
                ready.append(target)
    return done == len(missing)
