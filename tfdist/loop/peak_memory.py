"""Estimates the memory of a training step from its graph, before anything is allocated or run.

The step is traced with variables that have a shape but no memory. Its operations are then visited in the order in which
they were traced, which back-propagation also follows: a result is in memory from its operation to the last operation
that uses it. Elementwise operations overwrite an argument that nothing else uses, as TensorFlow's kernels do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist.data.input.division import Division
from tfdist.data.input.feed import Batches
from tfdist.interface.program import Steps
from tfdist.internals import keras as keras_internals
from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.internals import tensorflow_graphs as graphs
from tfdist.internals.keras import tf_variable
from tfdist.loop import building
from tfdist.loop.inner_loop import StepProgram
from tfdist.loop.recomputation import UNKNOWN_LENGTH, Key, key
from tfdist.loop.while_loops import UPDATES, WhileLoop

# The overhead of a CPU process relative to the peak: the allocator keeps freed blocks and cannot reuse all of them.
# Fitted to five models (see `benchmarks/estimates.py`), and checked with others.
ALLOCATOR_SHARE = 0.35


@dataclass(frozen=True)
class Estimate:
    """The memory of one replica, in bytes.

    Attributes:
        weights: the variables of the model.
        slots: the variables of its optimizers.
        gradients: the gradients of the trainable variables.
        activations: everything else in memory at the peak of a step: results of the forward pass that the backward pass
            needs, and temporary results.
    """

    weights: int
    slots: int
    gradients: int
    activations: int

    @property
    def allocator(self) -> int:
        """The empirical overhead of the CPU allocator."""
        return round(ALLOCATOR_SHARE * (self.weights + self.slots + self.gradients + self.activations))

    @property
    def total(self) -> int:
        return self.weights + self.slots + self.gradients + self.activations + self.allocator


class _OneBatch(Batches):
    """Batches of a fixed size, which are never fetched."""

    def __init__(self, spec: Any, batch_size: int):
        self.spec, self.batch_size = spec, batch_size

    def part(self, state: Any, batch: Any, index: int, division: Division) -> tuple[Any, float]:
        del state, batch, index, division
        return tensorflow_internals.placeholders(self.spec), 1.0


def of_training(strategy: Any, model: Any, batch_size: int, spec: Any) -> Estimate:
    """Estimates the memory of a training step of `model`.

    Args:
        strategy: a strategy with one replica.
        model: a compiled model, created within `keras_variables.without_memory`.
        batch_size: the number of examples per step.
        spec: the `tf.TensorSpec`s of a batch.
    """

    def with_lengths(tensor: tf.TensorSpec) -> tf.TensorSpec:
        lengths = [UNKNOWN_LENGTH if length is None else length for length in tensor.shape[1:]]
        return tf.TensorSpec([batch_size, *lengths], tensor.dtype)

    spec = tf.nest.map_structure(with_lengths, spec)
    building.build(strategy, model, "train", spec)
    program = StepProgram(strategy, Steps(model, "train", _OneBatch(spec, batch_size)))
    with tensorflow_internals.scratch_graph(strategy.scope):
        begin = tf.constant(0)
        program._step(None, None)
        operations = begin.graph.get_operations()
    weights = _bytes(model.variables)
    slots = _bytes([v for optimizer in keras_internals.optimizers(model) for v in optimizer.variables])
    gradients = _bytes(model.trainable_variables)
    return Estimate(weights, slots, gradients, max(0, peak_bytes(operations) - gradients))


def _bytes(variables: Sequence[Any]) -> int:
    distinct = {id(variable): tf_variable(variable) for variable in variables}
    return sum(math.prod(variable.shape) * variable.dtype.size for variable in distinct.values())


# Operations whose results are in memory that is counted elsewhere.
_OF_VARIABLES = frozenset(("ReadVariableOp", "VarHandleOp", "Placeholder", "Const"))
# Operations that overwrite an argument of the size of their result, if nothing else uses it.
_OVERWRITING = frozenset(
    (
        *("Add", "AddV2", "AddN", "Sub", "Mul", "Div", "RealDiv", "DivNoNan", "MulNoNan", "Maximum", "Minimum", "Neg"),
        *("Sqrt", "Rsqrt", "Square", "SquaredDifference", "Exp", "Log", "Tanh", "Sigmoid", "Relu", "Relu6", "Elu"),
        *("ReluGrad", "Relu6Grad", "TanhGrad", "SigmoidGrad", "EluGrad", "RsqrtGrad", "SqrtGrad", "BiasAdd"),
        *("Softmax", "LogSoftmax", "Erf", "Abs", "Sign", "Softplus", "SoftplusGrad", "Pow", "SelectV2", "Select"),
    )
)


def peak_bytes(operations: Sequence[tf.Operation]) -> int:
    """Returns the largest sum of the results that are in memory at the same time, without variables.

    Args:
        operations: all operations of a graph.
    """
    return _Execution(operations, graphs.effective(operations)).peak_bytes()


class _Execution:
    """The execution of a graph, one operation after the other, with the memory of the results.

    Args:
        operations: all operations of the graph.
        needed: the names of those that run.
    """

    def __init__(self, operations: Sequence[tf.Operation], needed: set[str]):
        self._loops = {o.name: WhileLoop(o) for o in operations if o.name in needed and graphs.is_loop(o)}
        self._order = _in_order(operations, needed)
        self._sizes: dict[Key, int] = {}  # of all results, in bytes
        self._remaining: dict[Key, int] = {}  # the number of outstanding uses of each result
        for operation in self._order:
            for root in self._used(operation):
                self._remaining[root] = self._remaining.get(root, 0) + 1

    def peak_bytes(self) -> int:
        in_memory: dict[Key, int] = {}
        current = peak = 0
        for operation in self._order:
            if operation.type in _OF_VARIABLES:
                continue
            used, results = self._used(operation), self._results(operation)
            self._sizes |= results
            for root in used:
                self._remaining[root] -= 1
            done = [root for root in dict.fromkeys(used) if self._remaining[root] == 0 and root in in_memory]
            # While a function runs, arguments and results are in memory, and parts of the results replace arguments.
            inside = max((_peak_in(function) for function in graphs.functions(operation)), default=0)
            peak = max(peak, current + inside)
            for root in self._overwritten(operation, done, results):
                current -= in_memory.pop(root)
            in_memory |= results
            current += sum(results.values())
            peak = max(peak, current + inside)
            for root in [*done, *(name for name in results if not self._remaining.get(name))]:
                current -= in_memory.pop(root, 0)
        return peak

    def _results(self, operation: tf.Operation) -> dict[Key, int]:
        """The size of each result that has its own memory, in bytes."""
        if operation.name in self._loops:
            of_arguments = [self._sizes.get(self._root(tensor), 0) for tensor in operation.inputs]
            sizes = self._loops[operation.name].result_bytes(of_arguments)
        elif operation.type == "TensorListFromTensor":  # which copies
            sizes = [graphs.bytes_of(operation.inputs[0], UNKNOWN_LENGTH)]
        elif operation.type == "ZerosLike" and operation.outputs[0].dtype == tf.variant:
            sizes = [self._sizes.get(self._root(operation.inputs[0]), 0)]
        else:
            sizes = [graphs.bytes_of(tensor, UNKNOWN_LENGTH) for tensor in operation.outputs]
        pairs = zip(operation.outputs, sizes, strict=True)
        return {key(tensor): size for tensor, size in pairs if self._root(tensor) == key(tensor)}

    def _overwritten(self, operation: tf.Operation, done: Sequence[Key], results: Mapping[Key, int]) -> list[Key]:
        """The arguments whose memory the results take over, among those that nothing else uses."""
        if operation.name in self._loops:  # lists that a loop fills or empties
            return [self._root(t) for t in operation.inputs if t.dtype == tf.variant and self._root(t) in done]
        if operation.type in _OVERWRITING and results:
            size = next(iter(results.values()))
            return [root for root in done if self._sizes[root] == size][:1]
        return []

    def _used(self, operation: tf.Operation) -> list[Key]:
        """The results whose memory an operation reads."""
        return [] if operation.type in graphs.OF_SHAPE else [self._root(tensor) for tensor in operation.inputs]

    def _root(self, tensor: tf.Tensor) -> Key:
        """The result whose memory a tensor shares."""
        while True:
            tensor = graphs.root(tensor)
            loop, index = self._loops.get(tensor.op.name), tensor.value_index
            if loop is not None and loop.passes_on(index):
                tensor = tensor.op.inputs[index]
            elif tensor.op.type in UPDATES and index == 0:
                tensor = tensor.op.inputs[0]
            else:
                return key(tensor)


def _peak_in(function: Any) -> int:
    """The largest sum of the results of a function's operations that are in memory at the same time."""
    return _Execution(function.get_operations(), graphs.needed(function)).peak_bytes()


def _in_order(operations: Sequence[tf.Operation], needed: set[str]) -> list[tf.Operation]:
    """Returns the operations in traced order, but each before its users, and recomputed copies only when used."""
    ordered: list[tf.Operation] = []
    seen: set[str] = set()
    for last in operations:
        is_copy = last.name.endswith("/again") or "/held_" in last.name  # see `tfdist.loop.recomputation`
        if last.name not in needed or is_copy:
            continue
        waiting = [last]
        while waiting:
            operation = waiting[-1]
            missing = [source for source in graphs.sources(operation) if source.name not in seen]
            if operation.name in seen or not missing:
                waiting.pop()
                if operation.name not in seen:
                    seen.add(operation.name)
                    ordered.append(operation)
            else:
                waiting += missing
    return ordered
