"""Local and global shapes, and the placements that a sharding rule asks for."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist.internals import tensorflow_functions
from tfdist.spmd.lengths import Lengths
from tfdist.spmd.operation import Operation
from tfdist.spmd.placements import REPLICATE, Placed, Placement, Shard
from tfdist.spmd.rules import OpSharding, Sharding

# Operations that depend on nothing but the shape of their input.
OF_SHAPE = frozenset(("Shape", "Size"))


def of_shape(operation: tf.Operation, part: tf.Tensor, placement: Placement, replica: int) -> tf.Tensor:
    """The result of an operation that needs only the shape of its input, from the tensor of one replica."""
    if operation.type not in OF_SHAPE:
        return tensorflow_functions.create(operation, [part])[0]
    shape = tf.shape(part, operation.outputs[0].dtype)
    if isinstance(placement, Shard):
        length = placement.whole_length(shape[placement.axis], replica)
        shape = tf.tensor_scatter_nd_update(shape, [[placement.axis]], [length])
    return shape if operation.type == "Shape" else tf.reduce_prod(shape)


def refined(shape: Sequence[int | None] | None, lengths: Lengths | None) -> Sequence[int | None] | None:
    """`shape` with unknown lengths replaced by those of `lengths` that are known."""
    if shape is None or lengths is None:
        return shape
    known = [None if length is None or length.symbols else length.factor for length in lengths]
    return [refinement if length is None else length for length, refinement in zip(shape, known, strict=True)]


def placement_of(sharding: Sharding, shard: Shard) -> Placement:
    """The placement that a rule describes by `sharding`, with its leading input sharded by `shard`."""
    if sharding is None:
        return REPLICATE
    return sharding if isinstance(sharding, Shard) else shard.moved(sharding)


def is_divisible(operation: Operation, op_sharding: OpSharding, shard: Shard) -> bool:
    """Whether the axes that a rule shards are known to be divisible in these proportions."""
    for index, sharding in enumerate(op_sharding.inputs):
        placement, shape = placement_of(sharding, shard), operation.input_shapes[index]
        if not isinstance(placement, Shard) or operation.placements[index] == placement:
            continue
        if operation.input_dtypes[index] != tf.variant and (
            shape is None or not placement.divides(shape[placement.axis])
        ):
            return False
    for index, output in enumerate(op_sharding.outputs):
        shape = operation.output_shapes[index]
        if isinstance(output, str):
            continue
        placement = placement_of(output, shard)
        if not isinstance(placement, Shard) or operation.output_dtypes[index] == tf.variant:
            continue
        if shape is None:
            return False
        length = shape[placement.axis]
        if length is not None and not placement.divides(length):
            return False
    return True


def local_lengths(tensor: tf.Tensor, value: Placed, entry: int, shard: Shard, replica: int) -> tf.Tensor:
    """A length, or a vector of lengths, with the global length at `entry` replaced by the local one; -1 stays."""
    if value.constant is not None:
        lengths = value.constant.copy()
        place = () if lengths.ndim == 0 else (entry,)
        if lengths[place] > 0:
            lengths[place] = shard.part(lengths[place], replica)
        return tf.constant(lengths)
    length = tensor if tensor.shape.rank == 0 else tensor[entry]
    part = tf.where(length > 0, shard.part(length, replica), length)
    return part if tensor.shape.rank == 0 else tf.tensor_scatter_nd_update(tensor, [[entry]], [part])
