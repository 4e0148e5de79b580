"""The part of one process in the graph of a step of all stages.

    the graph of all stages       x -> MatMul (stage 0) -> Relu -> MatMul (stage 1) -> loss
    in the process of stage 0     x -> MatMul -> Relu -> send
    in the process of stage 1     receive -> MatMul -> loss

All processes make the same graph of all stages, which nobody runs, and put it into the same order, that of the
schedule. Each one copies the operations of its stage, and sends and receives what crosses. In that order a message is
sent before it is received, so that no two processes wait for each other.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist.internals import tensorflow_functions, tensorflow_graphs
from tfdist.pipeline_parallel import ordering, placement
from tfdist.pipeline_parallel.exchange import Exchange
from tfdist.pipeline_parallel.regions import Key, Place, Region, key
from tfdist.pipeline_parallel.schedule import Task
from tfdist.profiling import stages as stage_names


@dataclass(frozen=True)
class Whole:
    """The graph of all stages, in order.

    Attributes:
        region: says where its operations are computed.
        in_schedule: whether the order is that of the schedule; not where micro-batches meet in the middle of a step.
    """

    region: Region
    in_schedule: bool


def whole(graph: Any, inputs: Sequence[Place], schedule: str, stages: int, micro_batches: int) -> Whole:
    """The graph of all stages, whose outputs are wanted in every process.

    Args:
        graph: of a function that computes the step.
        inputs: the place of each of its inputs, see `Region`.
        schedule: see `tfdist.pipeline_parallel.schedule`.
        stages: their number.
        micro_batches: their number.
    """
    operations = tensorflow_functions.in_order(graph)
    after: dict[str, list[tf.Operation]] = {}
    for _, last, first in ordering.edges(operations, schedule, stages, micro_batches):
        for operation in first:
            after.setdefault(operation.name, []).extend(last)
    in_time = tensorflow_functions.in_order(graph, after, _priorities(operations, after))
    in_schedule = len(in_time) == len(operations)
    region = Region(graph, inputs, in_time if in_schedule else operations, stages)
    region.send_outputs([None] * len(graph.outputs))
    return Whole(region, in_schedule)


def _priorities(
    operations: Sequence[tf.Operation], after: Mapping[str, Sequence[tf.Operation]]
) -> Callable[[tf.Operation], int]:
    """Tasks come first, then what a task waits for, and then the rest, as metrics, for which no stage is to wait."""
    of_tasks = [one for one in operations if placement.task_of(one.name) is not None]
    found = dict.fromkeys((one.name for one in of_tasks), 0)
    waiting = list(of_tasks)
    while waiting:
        operation = waiting.pop()
        for one in (*tensorflow_graphs.sources(operation), *after.get(operation.name, ())):
            if one.name not in found:
                found[one.name] = 1
                waiting.append(one)
    return lambda operation: found.get(operation.name, 2)


class Part:
    """Writes the part of one stage into the present graph.

    Args:
        rank: of this process, and of its stage.
        exchange: with the other processes, in a sequence of messages.

    Attributes:
        rank: of this process.
    """

    def __init__(self, rank: int, exchange: Exchange):
        self.rank, self._exchange = rank, exchange
        self._messages = 0

    def write(self, region: Region, inputs: Sequence[tf.Tensor | None]) -> list[tf.Tensor | None]:
        """The outputs of a graph on inputs; `None` stands for what is in other processes alone."""
        return _Writing(self, region, inputs).outputs()

    def next_number(self) -> int:
        """The number of the next message, counted alike in all processes."""
        self._messages += 1
        return self._messages

    def has(self, region: Region, tensor: tf.Tensor) -> bool:
        """Whether this process computes a tensor, or is sent it."""
        return region.of(tensor) in (None, self.rank) or self.rank in region.needed.get(key(tensor), ())

    def send(self, region: Region, tensor: tf.Tensor, value: tf.Tensor | None) -> dict[int, int]:
        """Sends a tensor, if this process has computed it; the number of the message to each stage that needs it."""
        numbers = {stage: self.next_number() for stage in sorted(region.needed.get(key(tensor), ()))}
        if region.of(tensor) == self.rank:
            assert value is not None
            with self._in_task_of(tensor.op):
                for stage, number in numbers.items():
                    self._exchange.send(value, stage, number)
        return numbers

    def receive(self, region: Region, tensor: tf.Tensor, number: int, reader: tf.Operation | None) -> tf.Tensor:
        """A tensor of another process, which is sent as this number and read by an operation."""
        source = region.of(tensor)
        assert source is not None
        with self._in_task_of(reader):
            return self._exchange.receive(tf.TensorSpec(tensor.shape, tensor.dtype), source, number)

    def copied(self, operation: tf.Operation, reads: Sequence[tf.Tensor]) -> tf.Operation:
        """A copy of an operation of this process in the present graph."""
        name = operation.name if self._task_of(operation) else stage_names.without(operation.name)
        return tensorflow_functions.copied(operation, reads, name=name)

    def condition(
        self,
        region: Region,
        operation: tf.Operation,
        found: Callable[[tf.Tensor], tf.Tensor],
    ) -> list[tf.Tensor | None]:
        """The outputs of a condition, of which each process computes a part."""
        branches = region.branches[operation.name]
        has_messages = any(one.has_messages for one in branches)
        inputs = [
            found(tensor) if any(self.has(one, one.graph.inputs[index]) for one in branches) else None
            for index, tensor in enumerate(operation.inputs[1:])
        ]
        own = [index for index, tensor in enumerate(operation.outputs) if region.of(tensor) in (None, self.rank)]

        def write(branch: Region) -> list[tf.Tensor | None]:
            with self._exchange.sequence() if has_messages else contextlib.nullcontext():
                outputs = self.write(branch, inputs)
            return [tf.constant(0), *(outputs[index] for index in own)]

        predicate = found(operation.inputs[0])
        with self._exchange.around_branches() if has_messages else contextlib.nullcontext():
            done, *results = tf.cond(predicate, *(functools.partial(write, one) for one in branches))
            if has_messages:
                self._exchange.note_branches(done)
        values = dict(zip(own, results, strict=True))
        return [values.get(index) for index in range(len(operation.outputs))]

    @contextlib.contextmanager
    def _in_task_of(self, operation: tf.Operation | None) -> Iterator[None]:
        task = None if operation is None else self._task_of(operation)
        with contextlib.nullcontext() if task is None else tf.name_scope(placement.scope_of(self.rank, task)):
            yield

    def _task_of(self, operation: tf.Operation) -> Task | None:
        """The task of this stage to which an operation belongs, if it belongs to one."""
        found = placement.task_of(operation.name)
        return None if found is None or found[0] != self.rank else found[1]


class _Writing:
    """A graph of which one process writes its part."""

    def __init__(self, part: Part, region: Region, inputs: Sequence[tf.Tensor | None]):
        self._part, self._region = part, region
        self._values = {
            key(inside): value for inside, value in zip(region.graph.inputs, inputs, strict=True) if value is not None
        }
        self._numbers: dict[Key, dict[int, int]] = {}
        self._copies: dict[str, tf.Operation] = {}

    def outputs(self) -> list[tf.Tensor | None]:
        region = self._region
        given = {tensor.op.name for tensor in region.graph.inputs}
        for operation in region.operations:
            if operation.name not in given:
                for tensor, value in zip(operation.outputs, self._results(operation), strict=True):
                    if value is not None:
                        self._values[key(tensor)] = value
                    self._numbers[key(tensor)] = self._part.send(region, tensor, value)
        return [
            self._found(tensor, None) if self._part.has(region, tensor) else None for tensor in region.graph.outputs
        ]

    def _results(self, operation: tf.Operation) -> Sequence[tf.Tensor | None]:
        if operation.name in self._region.branches:
            return self._part.condition(self._region, operation, lambda tensor: self._found(tensor, operation))
        if self._region.places[operation.name] not in (None, self._part.rank):
            return [None] * len(operation.outputs)
        reads = [self._found(tensor, operation) for tensor in operation.inputs]
        before = [self._copies[one.name] for one in operation.control_inputs if one.name in self._copies]
        with tf.control_dependencies(before):
            self._copies[operation.name] = self._part.copied(operation, reads)
        return self._copies[operation.name].outputs

    def _found(self, tensor: tf.Tensor, reader: tf.Operation | None) -> tf.Tensor:
        """A tensor in this process, which receives it where it is first read."""
        if key(tensor) not in self._values:
            number = self._numbers[key(tensor)][self._part.rank]
            self._values[key(tensor)] = self._part.receive(self._region, tensor, number, reader)
        return self._values[key(tensor)]
