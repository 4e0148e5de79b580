"""The stage that computes each operation of a step, if the stages are in different processes.

    an operation on a variable of a stage                that stage
    on a variable of no stage, such as a metric's        all processes, since each has the variable
    only on values that all processes have               all processes; a process that does not use it leaves it out
    of the model, forward or backward                    its stage, by its name (`tfdist.pipeline_parallel.placement`)
    any other                                            the stage that has the largest of its inputs

Nothing is assumed about what an operation computes: its inputs are sent to the stage that computes it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.internals import tensorflow_graphs
from tfdist.pipeline_parallel import placement
from tfdist.spmd.flattening import runs_once

Place = int | None  # a stage; `None` for all of them
Key = tuple[str, int]  # the key of a tensor in its graph

ONE_PROCESS = "train it in one process, whose stages are on devices"
_CONDITIONALS = frozenset(("If", "StatelessIf"))


def key(tensor: tf.Tensor) -> Key:
    """Returns a key that identifies the tensor within its graph."""
    return tensor.op.name, tensor.value_index


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
        """Returns the stages that read an input of an operation."""
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
        named = placement.task_of(operation.name)
        if named is not None:
            return named[0]
        # Among equally large inputs, choose the one in the direction of the pass: forward to later stages, backward to
        # earlier ones.
        sign = -1 if placement.BACKWARD in operation.name else 1
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


def _elements(tensor: tf.Tensor) -> int:
    """Returns the number of elements; unknown lengths count as 1."""
    return math.prod(length or 1 for length in tensor.shape) if tensor.shape.rank else 1
