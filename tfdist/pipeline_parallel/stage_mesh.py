"""The micro-batches of a pipeline whose stages are in several processes.

    the graph of all stages       x -> MatMul (stage 0) -> Relu -> MatMul (stage 1) -> loss
    in the process of stage 0     x -> MatMul -> Relu -> send
    in the process of stage 1     receive -> MatMul -> loss

Each process traces the graph of all stages, as `tfdist.pipeline_parallel.pipeline_mesh` does for one process. That
graph is never run. All processes order its operations in the same way, by the schedule. Each one copies the operations
of its stage, and sends and receives the tensors that cross between stages. Since every message is sent before it is
received in that order, no two processes wait for each other.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.groups.arrays import ArrayGroup
from tfdist.internals import tensorflow_graphs
from tfdist.pipeline_parallel import ordering, placement
from tfdist.pipeline_parallel.pipeline_mesh import PipelineMesh, warn_of_gpipe
from tfdist.pipeline_parallel.schedule import Schedule, Task
from tfdist.pipeline_parallel.staged_graph import Key, Place, StagedGraph, key
from tfdist.profiling import stages as stage_names

_MESSAGES_PER_CALL = 1 << 32


class Exchange:
    """The messages that the stage of this process sends and receives in the graph of a step.

    A message is identified by the call of the inner loop and its number within the step, so that a message of an
    interrupted call is never mistaken for another. A process sends and receives one message after the other.

    Args:
        group: the processes; stage number `rank` is in process `rank`.
    """

    def __init__(self, group: ArrayGroup):
        self._group = group
        self._call = 0
        self._open: list[tuple[tf.Tensor, list[tf.Tensor]]] = []

    def begin_call(self) -> None:
        """Called in all processes before each call of the inner loop."""
        self._call += 1

    @contextlib.contextmanager
    def sequence(self) -> Iterator[None]:
        """The context in which the messages of one graph are created; later exchanges are ordered after them."""
        self._begin()
        yield
        self._end()

    def _begin(self) -> None:
        self._open.append((self._group.begin_messages(), []))

    def _end(self) -> None:
        begin, done = self._open.pop()
        self._group.order_messages(begin, done)

    @contextlib.contextmanager
    def around_branches(self) -> Iterator[None]:
        """The context of a conditional whose branches contain messages, within the `sequence` of a graph."""
        self._end()
        with self._group.around_branches():
            yield
        self._begin()

    def note_branches(self, result: tf.Tensor) -> None:
        """Called with a result of the conditional."""
        self._group.note_branches(result)

    def send(self, tensor: tf.Tensor, to: int, number: int) -> None:
        """Sends `tensor` to stage `to` as message `number` of the step."""
        self._open[-1][1].append(self._group.send_in_graph(tensor, to, self._tag(number)))

    def receive(self, spec: tf.TensorSpec, from_: int, number: int) -> tf.Tensor:
        """Receives message `number` of the step from stage `from_`."""
        received, done = self._group.receive_in_graph(spec, from_, self._tag(number))
        self._open[-1][1].append(done)
        return received

    def _tag(self, number: int) -> Callable[[], int]:
        return lambda: self._call * _MESSAGES_PER_CALL + number


class StageMesh(PipelineMesh):
    """The micro-batches of a job in which each process computes one stage.

    Args:
        device: the device of this process.
        micro_batches: the number of micro-batches.
        schedule: the order in which a stage computes them.
        exchange: the messages to and from the other processes.
        rank: the rank of this process, and the number of its stage.
        stages: the number of stages.
        owner: returns the stage that has the variable with a handle; `None` if all processes have it.
        require_same: called with a checksum of the traced step; raises an error if that of another process differs.
    """

    def __init__(
        self,
        device: str,
        micro_batches: int,
        schedule: Schedule,
        exchange: Exchange,
        rank: int,
        stages: int,
        owner: Callable[[tf.Tensor], int | None],
        require_same: Callable[[str], None],
    ):
        super().__init__([device] * stages, micro_batches, schedule)
        self._exchange, self._rank = exchange, rank
        self._owner, self._require_same = owner, require_same
        self._steps = 0  # the number of steps that are traced into the current graph so far

    def compute(self) -> None:
        self._steps += 1

    def number(self, position: int) -> int:
        return (self._steps - 1) * len(self.local) + position

    def is_common(self, handle: tf.Tensor) -> bool:
        return self._owner(handle) is None

    def computed(self) -> None:
        """Does nothing, because only the graph of this process is put in order, in `written`."""

    def written(self, write: Callable[[], Any]) -> Any:
        self._steps = 0
        function = tf.function(write, autograph=False).get_concrete_function()
        outputs = iter(self._write_stage(function.graph))
        flat = tf.nest.flatten(function.structured_outputs, expand_composites=True)
        packed = [None if output is None else next(outputs) for output in flat]
        return tf.nest.pack_sequence_as(function.structured_outputs, packed, expand_composites=True)

    def _write_stage(self, graph: Any) -> list[Any]:
        """Writes the stage of this process into the current graph; returns the outputs of the graph of all stages."""
        outside, _ = tensorflow_graphs.captured(graph)
        places = [self._owner(tensor) for tensor in outside]
        stages, micro_batches = len(self.stage_devices), self._steps * len(self.local)
        staged, in_schedule = _staged(graph, places, self._schedule, stages, micro_batches)
        self._require_same(staged.described())
        with tf.device(self.devices[0]), self._exchange.sequence():
            outputs = _StageWriter(self._rank, self._exchange).write(staged, outside)
        if in_schedule:
            ordering.order(tf.compat.v1.get_default_graph(), self._schedule, self.stage_devices, micro_batches)
        elif self._schedule != "gpipe" and self._rank == 0:
            warn_of_gpipe(self._schedule)
        return outputs


def _staged(
    graph: Any, inputs: Sequence[Place], schedule: str, stages: int, micro_batches: int
) -> tuple[StagedGraph, bool]:
    """Returns the graph of all stages in order, and whether that is the order of the schedule.

    It is not if micro-batches exchange values within a step. The outputs are sent to every process.

    Args:
        graph: the graph of a function that computes the step.
        inputs: the place of each of its inputs, see `StagedGraph`.
        schedule: see `tfdist.pipeline_parallel.schedule`.
        stages: the number of stages.
        micro_batches: the number of micro-batches.
    """
    operations = tensorflow_graphs.in_order(graph)
    predecessors: dict[str, list[tf.Operation]] = {}
    for _, last, first in ordering.edges(operations, schedule, stages, micro_batches):
        for operation in first:
            predecessors.setdefault(operation.name, []).extend(last)
    ordered = tensorflow_graphs.in_order(graph, predecessors, _priorities(operations, predecessors))
    in_schedule = len(ordered) == len(operations)
    staged = StagedGraph(graph, inputs, ordered if in_schedule else operations, stages)
    staged.send_outputs([None] * len(graph.outputs))
    return staged, in_schedule


def _priorities(
    operations: Sequence[tf.Operation], predecessors: Mapping[str, Sequence[tf.Operation]]
) -> Callable[[tf.Operation], int]:
    """Ranks tasks first, then their dependencies, then the others, such as metrics, for which no stage must wait."""
    waiting = [operation for operation in operations if placement.task_of(operation.name) is not None]
    priorities = dict.fromkeys((operation.name for operation in waiting), 0)
    while waiting:
        operation = waiting.pop()
        for source in (*tensorflow_graphs.sources(operation), *predecessors.get(operation.name, ())):
            if source.name not in priorities:
                priorities[source.name] = 1
                waiting.append(source)
    return lambda operation: priorities.get(operation.name, 2)


class _StageWriter:
    """Writes the operations of one stage into the current graph.

    Args:
        rank: the rank of this process, and the number of its stage.
        exchange: the messages to and from the other processes, within a `sequence`.
    """

    def __init__(self, rank: int, exchange: Exchange):
        self.rank, self._exchange = rank, exchange
        self._messages = 0

    def write(self, graph: StagedGraph, inputs: Sequence[tf.Tensor | None]) -> list[tf.Tensor | None]:
        """Returns the outputs of a graph for these inputs; `None` stands for values that only other processes have."""
        return _GraphWriter(self, graph, inputs).outputs()

    def has(self, graph: StagedGraph, tensor: tf.Tensor) -> bool:
        """Whether this process computes or receives a tensor."""
        return graph.of(tensor) in (None, self.rank) or self.rank in graph.needed.get(key(tensor), ())

    def send(self, graph: StagedGraph, tensor: tf.Tensor, value: tf.Tensor | None) -> dict[int, int]:
        """Sends a tensor if this process has computed it; returns the number of the message to each stage.

        All processes number the messages in the same way.
        """
        receivers = sorted(graph.needed.get(key(tensor), ()))
        numbers = {stage: self._messages + index for index, stage in enumerate(receivers, start=1)}
        self._messages += len(receivers)
        if graph.of(tensor) == self.rank:
            assert value is not None
            with self._in_task_of(tensor.op):
                for stage, number in numbers.items():
                    self._exchange.send(value, stage, number)
        return numbers

    def receive(self, graph: StagedGraph, tensor: tf.Tensor, number: int, reader: tf.Operation | None) -> tf.Tensor:
        """Receives message `number`, a tensor of another process that an operation reads."""
        source = graph.of(tensor)
        assert source is not None
        with self._in_task_of(reader):
            return self._exchange.receive(tf.TensorSpec(tensor.shape, tensor.dtype), source, number)

    def copied(self, operation: tf.Operation, inputs: Sequence[tf.Tensor]) -> tf.Operation:
        """Returns a copy of an operation of this stage in the current graph."""
        name = operation.name if self._task_of(operation) else stage_names.without(operation.name)
        return tensorflow_graphs.copied(operation, inputs, name=name)

    def conditional(
        self, graph: StagedGraph, operation: tf.Operation, value_of: Callable[[tf.Tensor], tf.Tensor]
    ) -> list[tf.Tensor | None]:
        """Returns the outputs of a conditional of which each process computes a part."""
        branches = graph.branches[operation.name]
        has_messages = any(branch.has_messages for branch in branches)
        inputs = [
            value_of(tensor) if any(self.has(branch, branch.graph.inputs[index]) for branch in branches) else None
            for index, tensor in enumerate(operation.inputs[1:])
        ]
        present = [index for index, tensor in enumerate(operation.outputs) if graph.of(tensor) in (None, self.rank)]

        def write(branch: StagedGraph) -> list[tf.Tensor | None]:
            with self._exchange.sequence() if has_messages else contextlib.nullcontext():
                outputs = self.write(branch, inputs)
            return [tf.constant(0), *(outputs[index] for index in present)]

        predicate = value_of(operation.inputs[0])
        with self._exchange.around_branches() if has_messages else contextlib.nullcontext():
            done, *results = tf.cond(predicate, *(functools.partial(write, branch) for branch in branches))
            if has_messages:
                self._exchange.note_branches(done)
        values = dict(zip(present, results, strict=True))
        return [values.get(index) for index in range(len(operation.outputs))]

    @contextlib.contextmanager
    def _in_task_of(self, operation: tf.Operation | None) -> Iterator[None]:
        task = None if operation is None else self._task_of(operation)
        with contextlib.nullcontext() if task is None else tf.name_scope(placement.scope_of(self.rank, task)):
            yield

    def _task_of(self, operation: tf.Operation) -> Task | None:
        """Returns the task of this stage to which an operation belongs, if any."""
        stage, task = placement.task_of(operation.name) or (None, None)
        return task if stage == self.rank else None


class _GraphWriter:
    """Writes the part of one stage in a graph, or in a branch of a conditional."""

    def __init__(self, writer: _StageWriter, graph: StagedGraph, inputs: Sequence[tf.Tensor | None]):
        self._writer, self._graph = writer, graph
        self._values = {
            key(inside): value for inside, value in zip(graph.graph.inputs, inputs, strict=True) if value is not None
        }
        self._numbers: dict[Key, dict[int, int]] = {}
        self._copies: dict[str, tf.Operation] = {}

    def outputs(self) -> list[tf.Tensor | None]:
        graph = self._graph
        input_names = {tensor.op.name for tensor in graph.graph.inputs}
        for operation in graph.operations:
            if operation.name not in input_names:
                for tensor, value in zip(operation.outputs, self._results(operation), strict=True):
                    if value is not None:
                        self._values[key(tensor)] = value
                    self._numbers[key(tensor)] = self._writer.send(graph, tensor, value)
        outputs = graph.graph.outputs
        return [self._value_of(tensor, None) if self._writer.has(graph, tensor) else None for tensor in outputs]

    def _results(self, operation: tf.Operation) -> Sequence[tf.Tensor | None]:
        if operation.name in self._graph.branches:
            return self._writer.conditional(self._graph, operation, lambda tensor: self._value_of(tensor, operation))
        if self._graph.places[operation.name] not in (None, self._writer.rank):
            return [None] * len(operation.outputs)
        inputs = [self._value_of(tensor, operation) for tensor in operation.inputs]
        control_inputs = [self._copies[one.name] for one in operation.control_inputs if one.name in self._copies]
        with tf.control_dependencies(control_inputs):
            self._copies[operation.name] = self._writer.copied(operation, inputs)
        return self._copies[operation.name].outputs

    def _value_of(self, tensor: tf.Tensor, reader: tf.Operation | None) -> tf.Tensor:
        """Returns a tensor in this process, which receives it where it is first read."""
        if key(tensor) not in self._values:
            number = self._numbers[key(tensor)][self._writer.rank]
            self._values[key(tensor)] = self._writer.receive(self._graph, tensor, number, reader)
        return self._values[key(tensor)]
