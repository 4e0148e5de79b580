"""The micro-batches of a pipeline whose stages are in several processes.

    the graph of all stages       x -> MatMul (stage 0) -> Relu -> MatMul (stage 1) -> loss
    in the process of stage 0     x -> MatMul -> Relu -> send
    in the process of stage 1     receive -> MatMul -> loss

Each process traces the graph of all stages, as `tfdist.pipeline_parallel.local_pipeline` does for one process. That
graph is never run. All processes order its operations in the same way, by the schedule. Each one copies the operations
of its stage, and sends and receives the tensors that cross between stages. Since every message is sent before it is
received in that order, no two processes wait for each other.

The stage that computes an operation:

    an operation on a variable of a stage                that stage
    on a variable of no stage, such as a metric's        all processes, since each has the variable
    only on values that all processes have               all processes; a process that does not use it leaves it out
    of the model, forward or backward                    its stage, by its name (`schedule.task_of`)
    any other                                            the stage that has the largest of its inputs

Nothing is assumed about what an operation computes: its inputs are sent to the stage that computes it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.groups.arrays import ArrayGroup
from tfdist.internals import tensorflow_graphs
from tfdist.pipeline_parallel.local_pipeline import PipelineMesh, warn_of_gpipe
from tfdist.pipeline_parallel.schedule import BACKWARD, Schedule, Task, order_tasks, scope_of, task_edges, task_of
from tfdist.profiling import stages as stage_names
from tfdist.spmd.flattening import runs_once

ONE_PROCESS = "train it in one process, whose stages are on devices"
_MESSAGES_PER_CALL = 1 << 32
_CONDITIONALS = frozenset(("If", "StatelessIf"))
Place = int | None  # a stage; `None` for all of them
Key = tuple[str, int]  # the key of a tensor in its graph


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
            order_tasks(tf.compat.v1.get_default_graph(), self._schedule, self.stage_devices, micro_batches)
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
    for _, last, first in task_edges(operations, schedule, stages, micro_batches):
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
    waiting = [operation for operation in operations if task_of(operation.name) is not None]
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
        with contextlib.nullcontext() if task is None else tf.name_scope(scope_of(self.rank, task)):
            yield

    def _task_of(self, operation: tf.Operation) -> Task | None:
        """Returns the task of this stage to which an operation belongs, if any."""
        stage, task = task_of(operation.name) or (None, None)
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


class StagedGraph:
    """A graph with the place where each of its operations is computed.

    Args:
        graph: the graph of a function.
        inputs: the place of each input; for a resource, the place of the variable.
        operations: the operations to compute, each after its inputs.
        stages: the number of stages.

    Attributes:
        places: the places of the operations by name; a conditional of several stages has none.
        branches: the branches of such conditionals by name.
        needed: the stages to which a tensor is sent, by its key.

    Raises:
        UsageError: an operation would have to be in two stages.
    """

    def __init__(self, graph: tf.Graph, inputs: Sequence[Place], operations: Sequence[tf.Operation], stages: int):
        self.graph, self.operations = graph, operations
        self._stages = stages
        self._tensor_places = {key(tensor): place for tensor, place in zip(graph.inputs, inputs, strict=True)}
        self.places: dict[str, Place] = {}
        self.branches: dict[str, list[StagedGraph]] = {}
        self.needed: dict[Key, set[int]] = {}
        input_names = {tensor.op.name for tensor in graph.inputs}
        for operation in operations:
            if operation.name not in input_names:
                self._place(operation)

    def of(self, tensor: tf.Tensor) -> Place:
        """Returns the place where a tensor is computed."""
        return self._tensor_places[key(tensor)]

    def send_outputs(self, places: Sequence[Place]) -> None:
        """Plans to send each output of the graph to its place, and each tensor to the stages that read it."""
        for operation in self.operations:
            for index, tensor in enumerate(operation.inputs):
                self._need(tensor, self._readers(operation, index))
        for tensor, place in zip(self.graph.outputs, places, strict=True):
            self._need(tensor, self._all if place is None else {place})

    def described(self) -> str:
        """Returns a checksum of the operations and their places, which must be equal in all processes."""
        lines = [(op.type, str(self.places.get(op.name)), len(op.outputs)) for op in self.operations]
        inside = [branch.described() for branches in self.branches.values() for branch in branches]
        return hashlib.sha256(repr((lines, inside)).encode()).hexdigest()

    @property
    def has_messages(self) -> bool:
        """Whether something is sent in this graph, or in a conditional within."""
        inputs = {key(tensor) for tensor in self.graph.inputs}
        inside = any(branch.has_messages for branches in self.branches.values() for branch in branches)
        return inside or any(sent not in inputs for sent in self.needed)

    @property
    def _all(self) -> set[int]:
        return set(range(self._stages))

    def _need(self, tensor: tf.Tensor, stages: set[int]) -> None:
        others = stages - {self.of(tensor)}
        if self.of(tensor) is None or tensor.dtype == tf.resource or not others:
            return
        if tensor.dtype == tf.variant:
            raise UsageError(
                f"The operation `{tensor.op.name}` makes a `{tensor.dtype.name}` in stage {self.of(tensor)} of the "
                f"pipeline, and stage {min(others)} needs it in another process",
                f"cut the model elsewhere with `stages`, or {ONE_PROCESS}",
            )
        self.needed.setdefault(key(tensor), set()).update(others)

    def _readers(self, operation: tf.Operation, index: int) -> set[int]:
        branches = self.branches.get(operation.name)
        if branches is not None and index:
            readers = (branch.needed.get(key(branch.graph.inputs[index - 1]), set()) for branch in branches)
            return set().union(*readers)
        place = self.places.get(operation.name)
        return self._all if place is None else {place}

    def _place(self, operation: tf.Operation) -> None:
        resources = {self.of(tensor) for tensor in operation.inputs if tensor.dtype == tf.resource}
        # A conditional without a stage may have effects inside, such as a `tf.print`, that must not occur in all
        # processes.
        has_no_stage = operation.type == "If" and not resources - {None}
        if operation.type in _CONDITIONALS and (len(resources) > 1 or has_no_stage):
            self._place_branches(operation)
            return
        if len(resources) > 1:
            raise UsageError(
                f"The operation `{operation.name}` uses variables of several stages of the pipeline, which are in "
                "different processes",
                f"cut the model elsewhere with `stages`, or {ONE_PROCESS}",
            )
        place = resources.pop() if resources else self._place_by_values(operation)
        self.places[operation.name] = place
        for tensor in operation.outputs:
            self._tensor_places[key(tensor)] = place

    def _place_by_values(self, operation: tf.Operation) -> Place:
        known = [(tensor, place) for tensor in operation.inputs if (place := self.of(tensor)) is not None]
        if not known:
            return 0 if runs_once(operation) else None
        named = task_of(operation.name)
        if named is not None:
            return named[0]
        # Among equally large inputs, choose the one in the direction of the pass: forward to later stages, backward to
        # earlier ones.
        sign = -1 if BACKWARD in operation.name else 1
        return max(known, key=lambda pair: (_elements(pair[0]), sign * pair[1]))[1]

    def _place_branches(self, operation: tf.Operation) -> None:
        """Lets each stage compute its part of a conditional, whose predicate all stages have."""
        inputs = [self.of(tensor) for tensor in operation.inputs[1:]]
        branches = []
        for attribute in ("then_branch", "else_branch"):
            graph = tensorflow_graphs.body(operation, attribute)
            branches.append(StagedGraph(graph, inputs, tensorflow_graphs.in_order(graph), self._stages))
        self.branches[operation.name] = branches
        places = zip(*(map(branch.of, branch.graph.outputs) for branch in branches), strict=True)
        for tensor, places_in_branches in zip(operation.outputs, places, strict=True):
            known = (place for place in places_in_branches if place is not None)
            self._tensor_places[key(tensor)] = next(known, None)
        for branch in branches:
            branch.send_outputs([self.of(tensor) for tensor in operation.outputs])


def key(tensor: tf.Tensor) -> Key:
    """Returns a key that identifies the tensor within its graph."""
    return tensor.op.name, tensor.value_index


def _elements(tensor: tf.Tensor) -> int:
    """Returns the number of elements; unknown lengths count as 1."""
    return math.prod(length or 1 for length in tensor.shape) if tensor.shape.rank else 1
