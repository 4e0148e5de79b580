"""Estimates the memory of a training step from its graph, before anything is allocated or run.

The step is traced with variables that have a shape but no memory. Its operations are then visited in the order in which
they were traced, which back-propagation also follows: a result is in memory from its operation to the last operation
that uses it. Elementwise operations overwrite an argument that nothing else uses, as TensorFlow's kernels do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist.internals import keras as keras_internals
from tfdist.internals import tensorflow_graphs as graphs
from tfdist.internals.keras import tf_variable
from tfdist.loop import traced_step
from tfdist.loop.recomputation import UNKNOWN_LENGTH, Key, key

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


def of_training(strategy: Any, model: Any, batch_size: int, spec: Any) -> Estimate:
    """Estimates the memory of a training step of `model`.

    Args:
        strategy: a strategy with one replica.
        model: a compiled model, created within `keras_variables.without_memory`.
        batch_size: the number of examples per step.
        spec: the `tf.TensorSpec`s of a batch.
    """
    operations = traced_step.operations(strategy, model, batch_size, spec, UNKNOWN_LENGTH)
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
    needed = graphs.effective(operations)
    remaining: dict[Key, int] = {}  # the number of outstanding uses of each result
    for operation in operations:
        for root in _used(operation) if operation.name in needed else ():
            remaining[root] = remaining.get(root, 0) + 1
    in_memory: dict[Key, int] = {}
    current = peak = 0
    for operation in _in_order(operations, needed):
        if operation.type in _OF_VARIABLES:
            continue
        used = _used(operation)
        made = [tensor for tensor in operation.outputs if key(graphs.root(tensor)) == key(tensor)]
        results = {key(tensor): graphs.bytes_of(tensor, UNKNOWN_LENGTH) for tensor in made}
        for root in used:
            remaining[root] -= 1
        done = [root for root in dict.fromkeys(used) if remaining[root] == 0 and root in in_memory]
        if operation.type in _OVERWRITING and results:
            size = next(iter(results.values()))
            overwritten = next((root for root in done if in_memory[root] == size), None)
            if overwritten is not None:
                current -= in_memory.pop(overwritten)
                done.remove(overwritten)
        in_memory |= results
        current += sum(results.values())
        peak = max(peak, current)
        for root in [*done, *(name for name in results if not remaining.get(name))]:
            current -= in_memory.pop(root, 0)
    return peak


def _used(operation: tf.Operation) -> list[Key]:
    """Returns the results whose memory an operation reads."""
    return [] if operation.type in graphs.OF_SHAPE else [key(graphs.root(tensor)) for tensor in operation.inputs]


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
