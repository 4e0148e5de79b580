"""Which stage computes each operation of a step whose stages are in processes of their own.

    an operation on a variable of a stage           that stage
    on a variable of no stage, as of a metric       all processes, each of which has it
    on nothing but what all processes have          all processes; who has no use for it leaves it out
    of the model, forward or backward               its stage, by its name (`tfdist.pipeline_parallel.placement`)
    another                                         the stage that has the largest of its inputs

Nothing is assumed of what an operation computes: what it reads is sent to wherever it is computed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.internals import tensorflow_functions
from tfdist.pipeline_parallel import placement
from tfdist.spmd.operation import runs_once

Place = int | None  # a stage; `None` for all of them
Key = tuple[str, int]  # of a tensor in its graph

ONE_PROCESS = "train it in one process, whose stages are on devices"
_CONDITIONS = frozenset(("If", "StatelessIf"))
_BACKWARD = "gradient_tape/"  # TensorFlow's, in the names of what a tape computes


def key(tensor: tf.Tensor) -> Key:
    """What tells a tensor from others of its graph."""
    return tensor.op.name, tensor.value_index


class Region:
    """A graph, and where each of its operations is computed.

    Args:
        graph: of a function.
        inputs: the place of each of its inputs; of a resource, that of whoever has it.
        operations: those that are computed, each behind those that it reads.
        stages: the number of stages.

    Attributes:
        places: of the operations, by name; a condition of several stages has none.
        branches: the regions of such conditions, by their names.
        needed: the stages to which a tensor is sent, by its key.

    Raises:
        UsageError: an operation has to be in two stages.
    """

    def __init__(self, graph: tf.Graph, inputs: Sequence[Place], operations: Sequence[tf.Operation], stages: int):
        self.graph, self.operations = graph, operations
        self._stages = stages
        self._of = {key(tensor): place for tensor, place in zip(graph.inputs, inputs, strict=True)}
        self.places: dict[str, Place] = {}
        self.branches: dict[str, list[Region]] = {}
        self.needed: dict[Key, set[int]] = {}
        given = {tensor.op.name for tensor in graph.inputs}
        for operation in operations:
            if operation.name not in given:
                self._find(operation)

    def of(self, tensor: tf.Tensor) -> Place:
        """Where a tensor is computed."""
        return self._of[key(tensor)]

    def send_outputs(self, places: Sequence[Place]) -> None:
        """Has each output of the graph sent to where it is wanted, and each tensor to where it is read."""
        for operation in self.operations:
            for index, tensor in enumerate(operation.inputs):
                self._need(tensor, self._readers(operation, index))
        for tensor, place in zip(self.graph.outputs, places, strict=True):
            self._need(tensor, self._all if place is None else {place})

    def described(self) -> str:
        """A checksum of what is computed where, which is the same in all processes."""
        lines = [(one.type, str(self.places.get(one.name)), len(one.outputs)) for one in self.operations]
        inside = [branch.described() for branches in self.branches.values() for branch in branches]
        return hashlib.sha256(repr((lines, inside)).encode()).hexdigest()

    @property
    def has_messages(self) -> bool:
        """Whether something is sent in this graph, or in a condition within."""
        inputs = {key(tensor) for tensor in self.graph.inputs}
        inside = any(branch.has_messages for branches in self.branches.values() for branch in branches)
        return inside or any(found not in inputs for found in self.needed)

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
        """The stages that read an input of an operation."""
        branches = self.branches.get(operation.name)
        if branches is not None and index:
            return {stage for one in branches for stage in one.needed.get(key(one.graph.inputs[index - 1]), ())}
        place = self.places.get(operation.name)
        return self._all if place is None else {place}

    def _find(self, operation: tf.Operation) -> None:
        resources = {self.of(tensor) for tensor in operation.inputs if tensor.dtype == tf.resource}
        # One of no stage may have effects within, as a `tf.print`, which must not be those of all processes.
        of_none = operation.type == "If" and not resources - {None}
        if operation.type in _CONDITIONS and (len(resources) > 1 or of_none):
            self._find_branches(operation)
            return
        if len(resources) > 1:
            raise UsageError(
                f"The operation `{operation.name}` uses variables of several stages of the pipeline, which are in "
                "different processes",
                f"cut the model elsewhere with `stages`, or {ONE_PROCESS}",
            )
        place = resources.pop() if resources else self._of_values(operation)
        self.places[operation.name] = place
        for tensor in operation.outputs:
            self._of[key(tensor)] = place

    def _of_values(self, operation: tf.Operation) -> Place:
        known = [(tensor, place) for tensor in operation.inputs if (place := self.of(tensor)) is not None]
        if not known:
            return 0 if runs_once(operation) else None
        named = placement.task_of(operation.name)
        if named is not None:
            return named[0]
        # Of equal inputs, the one that goes on: forward to later stages, backward to earlier ones.
        later = -1 if _BACKWARD in operation.name else 1
        return max(known, key=lambda one: (_elements(one[0]), later * one[1]))[1]

    def _find_branches(self, operation: tf.Operation) -> None:
        """Has each stage compute its part of a condition, on a predicate that all have."""
        inputs = [self.of(tensor) for tensor in operation.inputs[1:]]
        branches = []
        for attribute in ("then_branch", "else_branch"):
            graph = tensorflow_functions.body(operation, attribute)
            branches.append(Region(graph, inputs, tensorflow_functions.in_order(graph), self._stages))
        self.branches[operation.name] = branches
        outputs = list(zip(*(map(one.of, one.graph.outputs) for one in branches), strict=True))
        for tensor, found in zip(operation.outputs, outputs, strict=True):
            self._of[key(tensor)] = next((place for place in found if place is not None), None)
        for one in branches:
            one.send_outputs([self.of(tensor) for tensor in operation.outputs])


def _elements(tensor: tf.Tensor) -> int:
    """The number of elements, as far as it is known."""
    return math.prod(length or 1 for length in tensor.shape) if tensor.shape.rank else 1
