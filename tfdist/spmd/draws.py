"""Random numbers of `tf.random`'s stateful operations, the same in every graph that a step is partitioned into.

Such an operation keeps its place in a stream of random numbers in its kernel. A step has a graph for each number of
examples, which would begin the stream anew. So the place is kept in a variable, and the numbers are drawn by the
stateless operation that draws them from the same stream. Where there is none (`tf.random.shuffle`, `categorical`,
`gamma`), all graphs call one kernel, through Python.

Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011 (Philox); what a draw reserves of the stream is
as in TensorFlow's `GuardedPhiloxRandom`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.internals import tensorflow_functions
from tfdist.spmd.flattening import Node

_STATELESS = {
    "RandomStandardNormal": tf.raw_ops.StatelessRandomNormalV2,
    "RandomUniform": tf.raw_ops.StatelessRandomUniformV2,
    "TruncatedNormal": tf.raw_ops.StatelessTruncatedNormalV2,
}
_PHILOX = 1
# A draw moves on in its stream by this for each value, whatever the value takes.
_RESERVED_PER_VALUE = 256


def _place_of_process() -> tf.Variable:
    with tf.device("CPU:0"):
        return tf.Variable(0, trainable=False, dtype=tf.int64)


@dataclass
class Streams:
    """Where the random operations of a step are in their streams, for all graphs of the step.

    Attributes:
        make: makes a variable for a place.
        places: the variables with the places, by operation.
        kernels: the functions, each of one operation, that keep their place themselves.
    """

    make: Callable[[], tf.Variable] = _place_of_process
    places: dict[str, tf.Variable] = field(default_factory=dict)
    kernels: dict[str, Any] = field(default_factory=dict)

    def next_place(self, node: Node, shape: tf.Tensor) -> tf.Tensor:
        """Where the next draw of an operation begins, which is put behind it for the one after."""
        if node.name not in self.places:
            with tf.init_scope():
                self.places[node.name] = self.make()
        variable = self.places[node.name]
        place = variable.read_value()
        variable.assign_add(_RESERVED_PER_VALUE * tf.reduce_prod(tf.cast(shape, tf.int64)))
        return tf.cast(place, tf.uint64)

    def drawn_by_kernel(self, node: Node, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """What the kernel of an operation draws next."""
        operation = node.operation
        if node.name not in self.kernels:
            specs = [tf.TensorSpec(None, tensor.dtype) for tensor in operation.inputs]

            def draw(*given: tf.Tensor) -> list[tf.Tensor]:
                return tensorflow_functions.create(operation, given)

            with tf.init_scope(), tf.device("CPU:0"), tensorflow_internals.serial_calls():
                self.kernels[node.name] = tf.function(draw, autograph=False).get_concrete_function(*specs)
        kernel = self.kernels[node.name]

        def call(*given: tf.Tensor) -> list[tf.Tensor]:
            # By the thread that runs Python, since all others of the step may wait for what is drawn.
            with tensorflow_internals.serial_calls():
                return list(kernel(*given))

        with tf.device("CPU:0"):
            drawn = tf.py_function(call, inputs, [one.dtype for one in operation.outputs])
        return list(drawn)


def has_a_place(operation: tf.Operation) -> bool:
    """Whether an operation draws from a stream that seeds determine, from a place that can be set."""
    return operation.type in _STATELESS and is_seeded(operation)


def is_seeded(operation: tf.Operation) -> bool:
    """Whether an operation draws from a stream that seeds determine, and keeps its place in it."""
    if not operation.op_def.is_stateful or any(one.dtype in (tf.resource, tf.variant) for one in operation.outputs):
        return False
    return any(operation.get_attr(name) for name in ("seed", "seed2") if name in operation.node_def.attr)


def draw(operation: tf.Operation, shape: tf.Tensor, place: tf.Tensor) -> tf.Tensor:
    """The numbers `[*shape]` that `operation` draws at a `place` in its stream, a uint64 scalar."""
    return _STATELESS[operation.type](
        shape=shape,
        key=tf.constant([operation.get_attr("seed") % (1 << 64)], tf.uint64),
        counter=tf.stack([place, tf.constant(operation.get_attr("seed2") % (1 << 64), tf.uint64)]),
        alg=_PHILOX,
        dtype=operation.outputs[0].dtype,
    )
