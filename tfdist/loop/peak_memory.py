"""The memory that a training step needs, estimated from its graph before anything is allocated or run.

The step is traced with variables that have a shape and no memory. Then its operations are gone through in the order in
which they were traced, which back-propagation follows too: each result is there from its operation to the last one that
uses it. Elementwise operations overwrite an argument that nothing else uses, as TensorFlow's kernels do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from tfdist.loop.forward_pass import Key, key
from tfdist.loop.inner_loop import StepProgram

# The length of an axis other than the first that a model leaves open.
OPEN_AXIS = 32
# What a process on CPUs holds besides, of what is needed at once: the allocator keeps pieces that have become free, and
# does not find a use for all. It was fitted to five models, see `benchmarks/estimates.py`, and tried on others.
ALLOCATOR_SHARE = 0.35


@dataclass(frozen=True)
class Estimate:
    """The memory of one replica, in bytes.

    Attributes:
        weights: the variables of the model.
        slots: the variables of its optimizers.
        gradients: one per trainable variable.
        activations: all else that is there at the peak of a step: results of the forward pass that the backward pass
            waits for, and what operations pass on.
    """

    weights: int
    slots: int
    gradients: int
    activations: int

    @property
    def allocator(self) -> int:
        """What the allocator of a CPU holds besides, by experience."""
        return round(ALLOCATOR_SHARE * (self.weights + self.slots + self.gradients + self.activations))

    @property
    def total(self) -> int:
        """The sum of all, with `allocator`."""
        return self.weights + self.slots + self.gradients + self.activations + self.allocator


class _OneBatch(Batches):
    """Batches of which every replica gets a part of a known size; they are never fetched."""

    def __init__(self, spec: Any, batch_size: int):
        self.spec, self.batch_size = spec, batch_size

    def part(self, state: Any, batch: Any, index: int, division: Division) -> tuple[Any, float]:
        del state, batch, index, division
        return tensorflow_internals.placeholders(self.spec), 1.0


def of_training(strategy: Any, model: Any, batch_size: int, spec: Any) -> Estimate:
    """The memory of a training step of `model` on the one replica of `strategy`.

    Args:
        strategy: of one replica.
        model: compiled, and made with variables without memory, see `keras_variables.without_memory`.
        batch_size: examples per step.
        spec: the `tf.TensorSpec`s of a batch.
    """
    spec = tf.nest.map_structure(lambda one: _with_lengths(one, batch_size), spec)
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


def _with_lengths(spec: Any, batch_size: int) -> Any:
    shape = [OPEN_AXIS if length is None else length for length in spec.shape[1:]]
    return tf.TensorSpec([batch_size, *shape], spec.dtype)


def _bytes(variables: Sequence[Any]) -> int:
    each = {id(variable): tf_variable(variable) for variable in variables}
    return sum(math.prod(one.shape) * one.dtype.size for one in each.values())


# Results that lie in memory which is counted elsewhere.
_OF_VARIABLES = frozenset(("ReadVariableOp", "VarHandleOp", "Placeholder", "Const"))
# Kernels that overwrite an argument of the size of their result, if nothing else uses it.
_OVERWRITING = frozenset(
    (
        *("Add", "AddV2", "AddN", "Sub", "Mul", "Div", "RealDiv", "DivNoNan", "MulNoNan", "Maximum", "Minimum", "Neg"),
        *("Sqrt", "Rsqrt", "Square", "SquaredDifference", "Exp", "Log", "Tanh", "Sigmoid", "Relu", "Relu6", "Elu"),
        *("ReluGrad", "Relu6Grad", "TanhGrad", "SigmoidGrad", "EluGrad", "RsqrtGrad", "SqrtGrad", "BiasAdd"),
        *("Softmax", "LogSoftmax", "Erf", "Abs", "Sign", "Softplus", "SoftplusGrad", "Pow", "SelectV2", "Select"),
    )
)


def peak_bytes(operations: Sequence[tf.Operation]) -> int:
    """The largest sum of the results that are there at the same time, without variables.

    Args:
        operations: all of a graph.
    """
    needed = graphs.effective(operations)
    left: dict[Key, int] = {}  # the uses of a result that are still to come
    for operation in operations:
        for root in _used(operation) if operation.name in needed else ():
            left[root] = left.get(root, 0) + 1
    held: dict[Key, int] = {}
    current = peak = 0
    for operation in _in_order(operations, needed):
        if operation.type in _OF_VARIABLES:
            continue
        used = _used(operation)
        own = {
            key(one): graphs.bytes_of(one, OPEN_AXIS) for one in operation.outputs if key(graphs.root(one)) == key(one)
        }
        for root in used:
            left[root] -= 1
        done = [root for root in dict.fromkeys(used) if left[root] == 0 and root in held]
        if operation.type in _OVERWRITING and own:
            same = next((root for root in done if held[root] == next(iter(own.values()))), None)
            if same is not None:
                current -= held.pop(same)
                done.remove(same)
        held |= own
        current += sum(own.values())
        peak = max(peak, current)
        for root in [*done, *(name for name in own if not left.get(name))]:
            current -= held.pop(root, 0)
    return peak


def _used(operation: tf.Operation) -> list[Key]:
    """The results whose memory an operation reads."""
    return [] if operation.type in graphs.OF_SHAPE else [key(graphs.root(tensor)) for tensor in operation.inputs]


def _in_order(operations: Sequence[tf.Operation], needed: set[str]) -> list[tf.Operation]:
    """The operations as they were traced, but each before those that use it, and copies when they are used."""
    found: list[tf.Operation] = []
    seen: set[str] = set()
    for last in operations:
        if last.name not in needed or _is_copy(last):
            continue
        waiting = [last]
        while waiting:
            operation = waiting[-1]
            missing = [one for one in graphs.sources(operation) if one.name not in seen]
            if operation.name in seen or not missing:
                waiting.pop()
                if operation.name not in seen:
                    seen.add(operation.name)
                    found.append(operation)
            else:
                waiting += missing
    return found


def _is_copy(operation: tf.Operation) -> bool:
    return operation.name.endswith("/again") or "/held_" in operation.name
