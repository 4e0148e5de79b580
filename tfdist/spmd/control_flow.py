"""Loops and conditions of the one-device step, whose bodies are partitioned as the step is.

A value that a loop carries has the same placement in all iterations, which is a fixed point: the body is partitioned in
a scratch graph from the placements of the inputs, and again from those of its outputs, until they no longer change.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import tensorflow as tf

from tfdist.internals import tensorflow_graphs
from tfdist.spmd.conversions import Conversions, EmptyList
from tfdist.spmd.cost import Cost
from tfdist.spmd.meshes import Mesh
from tfdist.spmd.placements import REPLICATE, Partial, Placed, Placement, Replicate, Shard, part_shape

LOOPS = frozenset(("While", "StatelessWhile"))
TYPES = LOOPS | {"If", "StatelessIf"}
Compute = Callable[[list[Placed]], list[Placed]]


class Partitions(Protocol):
    """The partitioner of a step, which also partitions the graphs of its loops and conditions."""

    mesh: Mesh
    cost: Cost
    conversions: Conversions

    def run(self, graph: tf.Graph, inputs: Sequence[Placed]) -> list[Placed]:
        """Computes a function's graph on placed inputs; returns its placed outputs."""
        ...

    def counting(self, cost: Cost) -> contextlib.AbstractContextManager[None]:
        """Counts in `cost` what is computed in this context."""
        ...


def plan(
    partitioner: Partitions, operation: tf.Operation, values: Sequence[Placed]
) -> tuple[list[Placement], Compute] | None:
    """The placements of the inputs of a loop or condition, and its computation; `None` if it is computed whole."""
    kind = Loop if operation.type in LOOPS else Condition
    try:
        partitioned = kind(partitioner, operation, values)
    except Exception as error:  # an unforeseen case is still correct when it is computed whole
        partitioner.cost.refused.append(f"{operation.type}: {error}")
        return None
    return partitioned.placements, partitioned.compute


def arguments(operation: tf.Operation, inputs: Sequence[Any]) -> dict[str, Sequence[Any]]:
    """The arguments of each function of a loop or condition, by the attribute that names the function."""
    if operation.type in LOOPS:
        return {"cond": inputs, "body": inputs}
    return {"then_branch": inputs[1:], "else_branch": inputs[1:]}


@contextlib.contextmanager
def _trial(partitioner: Partitions) -> Iterator[Any]:
    """A scratch graph, whose computation is not counted."""
    graph = tensorflow_graphs.empty_graph("trial")
    with partitioner.counting(Cost()), partitioner.mesh.trial(), graph.as_default():
        yield graph


class _Carried:
    """The placement of one value that a loop carries.

    Attributes:
        placement: in all iterations; `None` for a list that is still empty.
        settled: it stays replicated, because an iteration did not keep another placement.
        filled: replicated elements are appended to the empty list.
    """

    def __init__(self, placement: Placement | None):
        self.placement = placement
        self.settled = self.filled = False

    def update(self, result: Placement | None, is_possible: Callable[[Placement], bool]) -> bool:
        """Updates the placement for the next trial from that after an iteration; returns whether it changes."""
        if result is None or result == self.placement:
            return False
        if self.placement is None:
            if isinstance(result, Replicate):  # a later trial may still append sharded elements
                self.filled = True
                return False
            self.placement = result
        elif isinstance(self.placement, Replicate):
            if self.settled or not is_possible(result):
                return False
            self.placement = result
        else:
            self.placement, self.settled = REPLICATE, True
        return True


def _placement_of(value: Placed) -> Placement | None:
    return None if isinstance(value, EmptyList) else value.placement


class Loop:
    """A `tf.while_loop` of the one-device step.

    Args:
        partitioner: computes the body.
        operation: the loop.
        values: the inputs of the first iteration.
    """

    def __init__(self, partitioner: Partitions, operation: tf.Operation, values: Sequence[Placed]):
        self._partitioner = partitioner
        self._operation = operation
        self._body = tensorflow_graphs.body(operation, "body")
        self._condition = tensorflow_graphs.body(operation, "cond")
        # At first the shapes of the initial values; relaxed when an iteration returns another shape.
        self._shapes = [value.shape for value in values]
        # Whether each value is loop-invariant: each iteration returns its input, such as a captured tensor.
        self._constant = [
            _source(output) is argument for output, argument in zip(self._body.outputs, self._body.inputs, strict=True)
        ]
        self._carried = [
            _Carried(REPLICATE if isinstance(value.placement, Partial) else _placement_of(value)) for value in values
        ]
        self._element_dtypes = [value.element_dtype for value in values]
        self._read_replicated: set[int] = set()
        while not self._keeps_placements(values):
            pass
        for carried in self._carried:
            if carried.placement is None and carried.filled:
                carried.placement = REPLICATE

    @property
    def placements(self) -> list[Placement]:
        """The placements of the inputs of the first iteration."""
        return [carried.placement or REPLICATE for carried in self._carried]

    def compute(self, inputs: list[Placed]) -> list[Placed]:
        """Builds the loop in the current graph."""
        self._partitioner.conversions.replicated([inputs[index] for index in sorted(self._read_replicated)])

        def body(*tensors: tf.Tensor) -> list[tf.Tensor]:
            outputs = self._partitioner.run(self._body, self._placed(inputs, iter(tensors)))
            placed = [self._partitioner.conversions.placed(o, p) for o, p in zip(outputs, self.placements, strict=True)]
            return self._flat(placed)

        def condition(*tensors: tf.Tensor) -> tf.Tensor:
            (continues,) = self._partitioner.run(self._condition, self._placed(inputs, iter(tensors)))
            return self._partitioner.mesh.tensors(self._partitioner.conversions.placed(continues, REPLICATE))[0]

        with self._partitioner.mesh.branches() as done:
            results = tf.while_loop(
                condition,
                body,
                self._flat(inputs),
                shape_invariants=[shape for index in self._changing for shape in self._part_shapes(index)],
                parallel_iterations=self._operation.get_attr("parallel_iterations"),
            )
            results = results if isinstance(results, list | tuple) else [results]
            done(results[0])
        return self._placed(inputs, iter(results))

    def _keeps_placements(self, values: Sequence[Placed]) -> bool:
        """Partitions an iteration in a scratch graph; returns whether outputs have the placements of the inputs."""
        with _trial(self._partitioner) as graph:
            placeholders = (
                tf.compat.v1.placeholder(self._operation.outputs[index].dtype, shape)
                for index in self._changing
                for shape in self._part_shapes(index)
            )
            inputs = self._placed(values, placeholders)
            outputs = self._partitioner.run(self._body, inputs)
            self._partitioner.conversions.replicated(self._partitioner.run(self._condition, inputs))
            self._read_replicated = {
                index
                for index, value in enumerate(values)
                if self._constant[index] and value.converted_in(graph, REPLICATE)
            }
        changed = False
        for index, (carried, output) in enumerate(zip(self._carried, outputs, strict=True)):
            if not self._constant[index]:
                self._element_dtypes[index] = self._element_dtypes[index] or output.element_dtype
                changed |= self._relax(index, output)
                changed |= carried.update(_placement_of(output), functools.partial(self._is_possible, index))
        return not changed

    def _relax(self, index: int, output: Placed) -> bool:
        """Drops the lengths of a shape that an iteration does not keep; returns whether the shape changes."""
        shape = self._shapes[index].most_specific_compatible_shape(output.shape)
        if output.shape.rank is None and self._operation.outputs[index].dtype != tf.variant:
            shape = tf.TensorShape(None)
        previous, self._shapes[index] = self._shapes[index], shape
        return (
            previous.as_list() != shape.as_list()
            if previous.rank is not None and shape.rank is not None
            else (previous.rank != shape.rank)
        )

    def _is_possible(self, index: int, placement: Placement) -> bool:
        """Whether a carried value whose initial value is replicated can have this placement."""
        if isinstance(placement, Partial):
            return placement == Partial()
        assert isinstance(placement, Shard)
        if self._operation.outputs[index].dtype == tf.variant:
            return self._element_dtypes[index] is not None
        return _divides(placement, self._shapes[index])

    @property
    def _changing(self) -> list[int]:
        """The numbers of the values that are loop variables of the partitioned loop."""
        return [
            index
            for index, carried in enumerate(self._carried)
            if not self._constant[index] and carried.placement is not None
        ]

    def _part_shapes(self, index: int) -> list[tf.TensorShape]:
        placement, shape = self._carried[index].placement, self._shapes[index]
        mesh = self._partitioner.mesh
        if self._operation.outputs[index].dtype == tf.variant:
            shape = tf.TensorShape([])
        if isinstance(placement, Replicate):
            return [shape] * mesh.copies
        if not isinstance(placement, Shard) or not shape.rank:
            return [shape] * len(mesh.local)
        return [part_shape(shape, placement, replica) for replica in mesh.local]

    def _placed(self, values: Sequence[Placed], tensors: Iterator[tf.Tensor]) -> list[Placed]:
        """The values of an iteration: the loop-invariant ones of `values`, and the carried ones from `tensors`."""
        replica = self._partitioner.mesh.local[0]
        placed = []
        for index, (value, carried) in enumerate(zip(values, self._carried, strict=True)):
            if self._constant[index] or carried.placement is None:
                placed.append(value)
                continue
            parts = [next(tensors) for _ in self._part_shapes(index)]
            dtype = self._element_dtypes[index]
            placed.append(Placed(carried.placement, parts, element_dtype=dtype, replica=replica))
        return placed

    def _flat(self, values: Sequence[Placed]) -> list[tf.Tensor]:
        return [tensor for index in self._changing for tensor in self._partitioner.mesh.tensors(values[index])]


class Condition:
    """A `tf.cond` of the one-device step.

    Args:
        partitioner: computes the branches.
        operation: the condition.
        values: the predicate, and the inputs of the branches.
    """

    def __init__(self, partitioner: Partitions, operation: tf.Operation, values: Sequence[Placed]):
        self._partitioner = partitioner
        self._branches = [tensorflow_graphs.body(operation, f"{name}_branch") for name in ("then", "else")]
        self.placements: list[Placement] = [
            REPLICATE if number == 0 else partitioner.conversions.summed(value) for number, value in enumerate(values)
        ]
        inputs = [
            self._stand_in(value, placement) for value, placement in zip(values[1:], self.placements[1:], strict=True)
        ]
        outputs = []
        for branch in self._branches:
            with _trial(partitioner):
                outputs.append(partitioner.run(branch, inputs))
        results = list(zip(*outputs, strict=True))
        self._results = [_common_placement(pair) for pair in results]
        self._element_dtypes = [first.element_dtype or second.element_dtype for first, second in results]

    def compute(self, inputs: list[Placed]) -> list[Placed]:
        """Builds the condition in the current graph."""
        mesh, conversions = self._partitioner.mesh, self._partitioner.conversions

        def branch_function(branch: Any) -> Callable[[], list[tf.Tensor]]:
            def call() -> list[tf.Tensor]:
                outputs = self._partitioner.run(branch, inputs[1:])
                placed = [conversions.placed(o, p) for o, p in zip(outputs, self._results, strict=True)]
                # A condition of a graph must return something.
                return [tf.constant(True), *(tensor for value in placed for tensor in mesh.tensors(value))]

            return call

        predicate = mesh.tensors(inputs[0])[0]
        with mesh.branches() as done:
            tensors = iter(tf.cond(predicate, *(branch_function(branch) for branch in self._branches)))
            done(next(tensors))
        results = []
        for placement, dtype in zip(self._results, self._element_dtypes, strict=True):
            count = mesh.copies if isinstance(placement, Replicate) else len(mesh.local)
            parts = [next(tensors) for _ in range(count)]
            results.append(Placed(placement, parts, element_dtype=dtype, replica=mesh.local[0]))
        return results

    def _stand_in(self, value: Placed, placement: Placement) -> Placed:
        """For a trial: a value of the shape and placement that a partial value will have once it is reduced."""
        if not isinstance(value.placement, Partial):
            return value
        converted = value.converted(placement)
        if converted is not None:
            return converted
        copies = Placed(REPLICATE, value.tensors[:1] * self._partitioner.mesh.copies)
        return copies if isinstance(placement, Replicate) else self._partitioner.conversions.split(copies, placement)


def _common_placement(pair: Sequence[Placed]) -> Placement:
    """A placement in which both branches can return a value."""
    placements = {value.placement for value in pair if not isinstance(value, EmptyList)}
    others = placements - {REPLICATE}
    if len(others) != 1:
        return REPLICATE
    (placement,) = others
    if isinstance(placement, Shard):
        is_list = all(value.element_dtype is not None for value in pair)
        is_possible = is_list or len(placements) == 1 or all(_divides(placement, value.shape) for value in pair)
        return placement if is_possible else REPLICATE
    return placement if placement == Partial() else REPLICATE


def _divides(placement: Shard, shape: tf.TensorShape) -> bool:
    return shape.rank is not None and placement.divides(shape[placement.axis])


def _source(tensor: tf.Tensor) -> tf.Tensor:
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor
