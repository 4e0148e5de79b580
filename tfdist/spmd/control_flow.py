"""Loops and conditions of the one-device step, whose bodies are partitioned in their turn.

What a loop carries keeps one placement through all iterations. It is found by trial: the body is computed in a scratch
graph from the placements of what goes in, and again with those that came out, until they stay the same.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import tensorflow as tf

from tfdist.internals import tensorflow_functions
from tfdist.spmd.conversions import Conversions
from tfdist.spmd.cost import Cost
from tfdist.spmd.meshes import Mesh
from tfdist.spmd.placements import REPLICATE, Partial, Placed, Placement, Replicate, Shard
from tfdist.spmd.tensor_lists import Empty

LOOPS = frozenset(("While", "StatelessWhile"))
CONDITIONS = frozenset(("If", "StatelessIf"))
TYPES = LOOPS | CONDITIONS
Compute = Callable[[list[Placed]], list[Placed]]


class Partitions(Protocol):
    """The partitioner of a step, which also computes the graphs inside of it."""

    mesh: Mesh
    cost: Cost
    conversions: Conversions

    def run(self, graph: tf.Graph, inputs: Sequence[Placed]) -> list[Placed]:
        """Computes a function's graph on placed inputs; returns its placed outputs."""
        ...

    def counting(self, cost: Cost) -> contextlib.AbstractContextManager[None]:
        """What is computed in this context is counted in `cost`."""
        ...


def plan(
    partitioner: Partitions, operation: tf.Operation, values: Sequence[Placed]
) -> tuple[list[Placement], Compute] | None:
    """Where the inputs of a loop or a condition must be, and how it is computed; `None` if it is computed whole."""
    kind = Loop if operation.type in LOOPS else Condition
    try:
        made = kind(partitioner, operation, values)
    except Exception as error:  # whatever was not thought of is right when it is computed whole
        partitioner.cost.refused.append(f"{operation.type}: {error}")
        return None
    return made.placements, made.compute


def arguments(operation: tf.Operation, inputs: Sequence[Any]) -> dict[str, Sequence[Any]]:
    """Which of the `inputs` of a loop or a condition each of its functions is given, by the attribute that names it."""
    if operation.type in LOOPS:
        return {"cond": inputs, "body": inputs}
    return {"then_branch": inputs[1:], "else_branch": inputs[1:]}


@contextlib.contextmanager
def _trial(partitioner: Partitions) -> Iterator[Any]:
    """A scratch graph, in which nothing is counted."""
    from tensorflow.python.framework.func_graph import FuncGraph

    graph = FuncGraph("trial")
    with partitioner.counting(Cost()), partitioner.mesh.trial(), graph.as_default():
        yield graph


class _Carried:
    """One value that a loop carries, or a condition returns.

    Attributes:
        placement: of the value in all iterations; `None` for a list that is still empty.
        settled: it is replicated, since an iteration did not keep another placement.
        filled: replicated elements are put into the empty list.
    """

    def __init__(self, placement: Placement | None):
        self.placement = placement
        self.settled = self.filled = False

    def meet(self, found: Placement | None, can_be: Callable[[Placement], bool]) -> bool:
        """Takes the placement that an iteration has `found` into account; returns whether it changes."""
        if found is None or found == self.placement:
            return False
        if self.placement is None:
            if isinstance(found, Replicate):  # what is put in may still turn out to be sharded
                self.filled = True
                return False
            self.placement = found
        elif isinstance(self.placement, Replicate):
            if self.settled or not can_be(found):
                return False
            self.placement = found
        else:
            self.placement, self.settled = REPLICATE, True
        return True


def _found(value: Placed) -> Placement | None:
    return None if isinstance(value, Empty) else value.placement


class Loop:
    """A `tf.while_loop` of the one-device step.

    Args:
        partitioner: computes the body.
        operation: the loop.
        values: what goes into the first iteration.
    """

    def __init__(self, partitioner: Partitions, operation: tf.Operation, values: Sequence[Placed]):
        self._partitioner = partitioner
        self._operation = operation
        self._body = tensorflow_functions.body(operation, "body")
        self._condition = tensorflow_functions.body(operation, "cond")
        # Those that go into the first iteration, until one comes out with another.
        self._shapes = [value.shape for value in values]
        # What each iteration hands on as it was given: what the body reads from outside.
        self._constant = [
            _source(output) is given for output, given in zip(self._body.outputs, self._body.inputs, strict=True)
        ]
        self._carried = [
            _Carried(REPLICATE if isinstance(value.placement, Partial) else _found(value)) for value in values
        ]
        self._element_dtypes = [value.element_dtype for value in values]
        self._read_whole: set[int] = set()
        kept = False
        while not kept:
            kept = self._keeps_placements(values)
        for carried in self._carried:
            if carried.placement is None and carried.filled:
                carried.placement = REPLICATE

    @property
    def placements(self) -> list[Placement]:
        """Where what goes into the first iteration must be."""
        return [one.placement or REPLICATE for one in self._carried]

    def compute(self, inputs: list[Placed]) -> list[Placed]:
        """The loop, in the present graph."""
        self._partitioner.conversions.whole([inputs[index] for index in sorted(self._read_whole)])

        def body(*tensors: tf.Tensor) -> list[tf.Tensor]:
            outputs = self._partitioner.run(self._body, self._placed(inputs, iter(tensors)))
            placed = [self._partitioner.conversions.placed(o, p) for o, p in zip(outputs, self.placements, strict=True)]
            return self._flat(placed)

        def condition(*tensors: tf.Tensor) -> tf.Tensor:
            (goes_on,) = self._partitioner.run(self._condition, self._placed(inputs, iter(tensors)))
            return self._partitioner.mesh.tensors(self._partitioner.conversions.placed(goes_on, REPLICATE))[0]

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
        """Tries an iteration; returns whether what comes out is placed as what went in."""
        with _trial(self._partitioner) as graph:

            def placeholders() -> Iterator[tf.Tensor]:
                for index in self._changing:
                    for shape in self._part_shapes(index):
                        yield tf.compat.v1.placeholder(self._operation.outputs[index].dtype, shape)

            given = self._placed(values, placeholders())
            outputs = self._partitioner.run(self._body, given)
            self._partitioner.conversions.whole(self._partitioner.run(self._condition, given))
            self._read_whole = {
                index
                for index, value in enumerate(values)
                if self._constant[index] and value.converted_in(graph, REPLICATE)
            }
        changed = False
        for index, (carried, output) in enumerate(zip(self._carried, outputs, strict=True)):
            if not self._constant[index]:
                self._element_dtypes[index] = self._element_dtypes[index] or output.element_dtype
                changed |= self._relax(index, output)
                changed |= carried.meet(_found(output), functools.partial(self._can_be, index))
        return not changed

    def _relax(self, index: int, output: Placed) -> bool:
        """Takes back what is no more known of a shape after an iteration; returns whether that changes anything."""
        shape = self._shapes[index].most_specific_compatible_shape(output.shape)
        if output.shape.rank is None and self._operation.outputs[index].dtype != tf.variant:
            shape = tf.TensorShape(None)
        before, self._shapes[index] = self._shapes[index], shape
        return (
            before.as_list() != shape.as_list()
            if before.rank is not None and shape.rank is not None
            else (before.rank != shape.rank)
        )

    def _can_be(self, index: int, placement: Placement) -> bool:
        """Whether a value that is replicated before the loop can be placed so in it."""
        if isinstance(placement, Partial):
            return placement == Partial()
        dtype, shape = self._operation.outputs[index].dtype, self._shapes[index]
        assert isinstance(placement, Shard)
        if dtype == tf.variant:
            return self._element_dtypes[index] is not None
        return _divides(placement, shape)

    @property
    def _changing(self) -> list[int]:
        """The numbers of the values that are tensors of the new loop."""
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
        return [_part_shape(shape, placement, replica) for replica in mesh.local]

    def _placed(self, values: Sequence[Placed], tensors: Iterator[tf.Tensor]) -> list[Placed]:
        """The values of an iteration: those that are the same in all, and the carried ones, whose tensors are given."""
        found = []
        for index, (value, carried) in enumerate(zip(values, self._carried, strict=True)):
            if self._constant[index] or carried.placement is None:
                found.append(value)
                continue
            own = [next(tensors) for _ in self._part_shapes(index)]
            dtype = self._element_dtypes[index]
            replica = self._partitioner.mesh.local[0]
            found.append(Placed(carried.placement, own, element_dtype=dtype, replica=replica))
        return found

    def _flat(self, values: Sequence[Placed]) -> list[tf.Tensor]:
        return [tensor for index in self._changing for tensor in self._partitioner.mesh.tensors(values[index])]


class Condition:
    """A `tf.cond` of the one-device step.

    Args:
        partitioner: computes the branches.
        operation: the condition.
        values: the value that decides, and what the branches read.
    """

    def __init__(self, partitioner: Partitions, operation: tf.Operation, values: Sequence[Placed]):
        self._partitioner = partitioner
        self._branches = [tensorflow_functions.body(operation, f"{name}_branch") for name in ("then", "else")]
        self.placements: list[Placement] = [
            REPLICATE if number == 0 else partitioner.conversions.summed(value) for number, value in enumerate(values)
        ]
        self._results: list[Placement] = []
        self._element_dtypes: list[Any] = []
        given = [
            self._stand_in(value, placement) for value, placement in zip(values[1:], self.placements[1:], strict=True)
        ]
        outputs = []
        for branch in self._branches:
            with _trial(partitioner):
                outputs.append(partitioner.run(branch, given))
        for pair in zip(*outputs, strict=True):
            self._results.append(_joint(pair))
            self._element_dtypes.append(pair[0].element_dtype or pair[1].element_dtype)

    def compute(self, inputs: list[Placed]) -> list[Placed]:
        """The condition, in the present graph."""

        def taken(branch: Any) -> Callable[[], list[tf.Tensor]]:
            def call() -> list[tf.Tensor]:
                outputs = self._partitioner.run(branch, inputs[1:])
                placed = [
                    self._partitioner.conversions.placed(o, p) for o, p in zip(outputs, self._results, strict=True)
                ]
                return [tf.constant(True), *(t for one in placed for t in self._partitioner.mesh.tensors(one))]

            return call

        decides = self._partitioner.mesh.tensors(inputs[0])[0]
        with self._partitioner.mesh.branches() as done:
            tensors = iter(tf.cond(decides, *(taken(branch) for branch in self._branches)))
            done(next(tensors))  # a condition of the graph must return something
        results = []
        for placement, dtype in zip(self._results, self._element_dtypes, strict=True):
            mesh = self._partitioner.mesh
            count = mesh.copies if isinstance(placement, Replicate) else len(mesh.local)
            own = [next(tensors) for _ in range(count)]
            results.append(Placed(placement, own, element_dtype=dtype, replica=mesh.local[0]))
        return results

    def _stand_in(self, value: Placed, placement: Placement) -> Placed:
        """For a trial, a value that will have been added up."""
        if not isinstance(value.placement, Partial):
            return value
        kept = value.converted(placement)
        if kept is not None or isinstance(placement, Replicate):
            return kept or Placed(REPLICATE, value.tensors[:1] * self._partitioner.mesh.copies)
        whole = Placed(REPLICATE, value.tensors[:1] * self._partitioner.mesh.copies)
        return self._partitioner.conversions.cut(whole, placement)


def _joint(pair: Sequence[Placed]) -> Placement:
    """A placement in which both branches can return a value."""
    found = {value.placement for value in pair if not isinstance(value, Empty)}
    other = found - {REPLICATE}
    if len(other) != 1:
        return REPLICATE
    (placement,) = other
    if isinstance(placement, Shard):
        is_list = all(value.element_dtype is not None for value in pair)
        can = is_list or len(found) == 1 or all(_divides(placement, value.shape) for value in pair)
        return placement if can else REPLICATE
    return placement if placement == Partial() else REPLICATE


def _divides(placement: Shard, shape: tf.TensorShape) -> bool:
    return shape.rank is not None and placement.divides(shape[placement.axis])


def _source(tensor: tf.Tensor) -> tf.Tensor:
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


def _part_shape(shape: tf.TensorShape, shard: Shard, replica: int) -> tf.TensorShape:
    if shape.rank is None:
        return shape
    lengths = shape.as_list()
    length = lengths[shard.axis]
    lengths[shard.axis] = None if length is None else shard.part(length, replica)
    return tf.TensorShape(lengths)
