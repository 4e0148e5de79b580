"""Random numbers of `tf.random`'s stateful operations, the same in every graph that a step is partitioned into.

Such an operation keeps its place in a stream of random numbers in the graph. A step has a graph for each number of
examples, which would begin the stream anew. So the place is kept in a variable, and the numbers are drawn by the
stateless operation that draws them from the same stream.

Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011 (Philox); what a draw reserves of the stream is
as in TensorFlow's `GuardedPhiloxRandom`.
"""

from __future__ import annotations

import tensorflow as tf

_STATELESS = {
    "RandomStandardNormal": tf.raw_ops.StatelessRandomNormalV2,
    "RandomUniform": tf.raw_ops.StatelessRandomUniformV2,
    "TruncatedNormal": tf.raw_ops.StatelessTruncatedNormalV2,
}
_PHILOX = 1
# A draw moves on in its stream by this for each value, whatever the value takes.
_RESERVED_PER_VALUE = 256

# The place in its stream of each operation, by its name.
Places = dict[str, tf.Variable]


def is_seeded(operation: tf.Operation) -> bool:
    """Whether an operation draws from a stream that seeds determine."""
    seeds = ("seed", "seed2")
    return operation.type in _STATELESS and any(operation.get_attr(name) for name in seeds)


def draw(operation: tf.Operation, shape: tf.Tensor, place: tf.Tensor) -> tf.Tensor:
    """The numbers `[*shape]` that `operation` draws at a `place` in its stream, a uint64 scalar."""
    return _STATELESS[operation.type](
        shape=shape,
        key=tf.constant([operation.get_attr("seed") % (1 << 64)], tf.uint64),
        counter=tf.stack([place, tf.constant(operation.get_attr("seed2") % (1 << 64), tf.uint64)]),
        alg=_PHILOX,
        dtype=operation.outputs[0].dtype,
    )


def next_place(operation: tf.Operation, shape: tf.Tensor, places: Places) -> tf.Tensor:
    """Where the next draw of `operation` begins, which is put behind it for the one after."""
    if operation.name not in places:
        with tf.init_scope(), tf.device("CPU:0"):
            places[operation.name] = tf.Variable(0, trainable=False, dtype=tf.int64)
    variable = places[operation.name]
    place = variable.read_value()
    variable.assign_add(_RESERVED_PER_VALUE * tf.reduce_prod(tf.cast(shape, tf.int64)))
    return tf.cast(place, tf.uint64)
