"""Random numbers of `tf.random`'s stateful operations, the same in every graph into which a step is partitioned.

The kernel of such an operation keeps the position in its random stream. A step has a graph for each number of examples,
each of which would start the stream again. So the position is kept in a variable, and a stateless operation draws the
same numbers from it. Where there is no such operation (`tf.random.shuffle`, `categorical`, `gamma`), all graphs call
one kernel, through Python.

Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011 (Philox). A draw advances the counter as
TensorFlow's `GuardedPhiloxRandom` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.internals import tensorflow_graphs
from tfdist.spmd.flattening import Node

_STATELESS = {
    "RandomStandardNormal": tf.raw_ops.StatelessRandomNormalV2,
    "RandomUniform": tf.raw_ops.StatelessRandomUniformV2,
    "TruncatedNormal": tf.raw_ops.StatelessTruncatedNormalV2,
}
_PHILOX = 1
# A draw advances the counter by this much per value, whatever the value consumes.
_RESERVED_PER_VALUE = 256


def _local_counter() -> tf.Variable:
    with tf.device("CPU:0"):
        return tf.Variable(0, trainable=False, dtype=tf.int64)


@dataclass
class Streams:
    """The positions of a step's random operations in their streams, shared by all graphs of the step.

    Attributes:
        make: makes the variable for a counter.
        counters: the counters of the operations that have a stateless equivalent, by node name.
        kernels: for the other operations, functions with a single kernel that keeps its position, by node name.
    """

    make: Callable[[], tf.Variable] = _local_counter
    counters: dict[str, tf.Variable] = field(default_factory=dict)
    kernels: dict[str, Any] = field(default_factory=dict)

    def next_counter(self, node: Node, shape: tf.Tensor) -> tf.Tensor:
        """The counter for the next draw of an operation, a uint64 scalar; advances the variable past this draw."""
        if node.name not in self.counters:
            with tf.init_scope():
                self.counters[node.name] = self.make()
        variable = self.counters[node.name]
        counter = variable.read_value()
        variable.assign_add(_RESERVED_PER_VALUE * tf.reduce_prod(tf.cast(shape, tf.int64)))
        return tf.cast(counter, tf.uint64)

    def drawn_by_kernel(self, node: Node, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The next draw of an operation, from its single kernel."""
        operation = node.operation
        if node.name not in self.kernels:
            specs = [tf.TensorSpec(None, tensor.dtype) for tensor in operation.inputs]

            def draw(*inputs: tf.Tensor) -> list[tf.Tensor]:
                return tensorflow_graphs.create(operation, inputs)

            with tf.init_scope(), tf.device("CPU:0"), tensorflow_internals.serial_calls():
                self.kernels[node.name] = tf.function(draw, autograph=False).get_concrete_function(*specs)
        kernel = self.kernels[node.name]

        def call(*inputs: tf.Tensor) -> list[tf.Tensor]:
            # In the thread that runs Python, since all other threads of the step may wait for the result.
            with tensorflow_internals.serial_calls():
                return list(kernel(*inputs))

        with tf.device("CPU:0"):
            drawn = tf.py_function(call, inputs, [tensor.dtype for tensor in operation.outputs])
        return list(drawn)


def has_stateless_equivalent(operation: tf.Operation) -> bool:
    """Whether an operation draws from a seeded stream, and a stateless operation can draw the same numbers."""
    return operation.type in _STATELESS and is_seeded(operation)


def is_seeded(operation: tf.Operation) -> bool:
    """Whether an operation draws from a seeded stream, and its kernel keeps the position."""
    if not operation.op_def.is_stateful:
        return False
    if any(tensor.dtype in (tf.resource, tf.variant) for tensor in operation.outputs):
        return False
    return any(operation.get_attr(name) for name in ("seed", "seed2") if name in operation.node_def.attr)


def draw(operation: tf.Operation, shape: tf.Tensor, counter: tf.Tensor) -> tf.Tensor:
    """The numbers `[*shape]` that `operation` draws at `counter`, a uint64 scalar."""
    return _STATELESS[operation.type](
        shape=shape,
        key=tf.constant([operation.get_attr("seed") % (1 << 64)], tf.uint64),
        counter=tf.stack([counter, tf.constant(operation.get_attr("seed2") % (1 << 64), tf.uint64)]),
        alg=_PHILOX,
        dtype=operation.outputs[0].dtype,
    )
