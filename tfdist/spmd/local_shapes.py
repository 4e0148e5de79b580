"""The shapes of parts and of whole values, and which parts a rule asks for."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist.internals import tensorflow_functions
from tfdist.spmd.lengths import Lengths
from tfdist.spmd.operation import Operation
from tfdist.spmd.placements import REPLICATE, Placed, Placement, Shard, with_length
from tfdist.spmd.rules import Cut, Local

# Computed from the shape of their input alone.
OF_SHAPE = frozenset(("Shape", "Size"))


def whole_shape(shape: tf.Tensor, placement: Placement, replica: int) -> tf.Tensor:
    """The shape of a value, from that of one replica's part."""
    if not isinstance(placement, Shard):
        return shape
    length = placement.whole_length(shape[placement.axis], replica)
    return tf.tensor_scatter_nd_update(shape, [[placement.axis]], [length])


def of_shape(operation: tf.Operation, part: tf.Tensor, placement: Placement, replica: int) -> tf.Tensor:
    """What an operation computes from the shape alone of a value, of which one replica's part is given."""
    if operation.type not in OF_SHAPE:
        return tensorflow_functions.create(operation, [part])[0]
    shape = whole_shape(tf.shape(part, operation.outputs[0].dtype), placement, replica)
    return shape if operation.type == "Shape" else tf.reduce_prod(shape)


def part_shape(shape: tf.TensorShape, placement: Placement, replica: int) -> tf.TensorShape:
    """The shape of one replica's part of a value of this shape."""
    return with_length(shape, placement, lambda cut, whole: cut.part(whole, replica))


def known(shape: Sequence[int | None] | None, lengths: Lengths | None) -> Sequence[int | None] | None:
    """A shape with the lengths that a rule knows besides."""
    if shape is None or lengths is None:
        return shape
    known = [None if one is None or one.symbols else one.factor for one in lengths]
    return [found if length is None else length for length, found in zip(shape, known, strict=True)]


def placement(one: Cut, shard: Shard) -> Placement:
    """The placement of an input or an output that a rule describes by `one`, with its leading input cut by `shard`."""
    if one is None:
        return REPLICATE
    return one if isinstance(one, Shard) else shard.moved(one)


def is_possible(operation: Operation, found: Local, shard: Shard) -> bool:
    """Whether the axes that a rule cuts are known to be divisible so."""
    for index, one in enumerate(found.inputs):
        wanted, shape = placement(one, shard), operation.input_shapes[index]
        if not isinstance(wanted, Shard) or operation.placements[index] == wanted:
            continue
        if operation.input_dtypes[index] != tf.variant and (shape is None or not wanted.divides(shape[wanted.axis])):
            return False
    for index, out in enumerate(found.outputs):
        shape = operation.output_shapes[index]
        if isinstance(out, str):
            continue
        wanted = placement(out, shard)
        if not isinstance(wanted, Shard) or operation.output_dtypes[index] == tf.variant:
            continue
        if shape is None:
            return False
        length = shape[wanted.axis]
        if length is not None and not wanted.divides(length):
            return False
    return True


def localized(tensor: tf.Tensor, value: Placed, entry: int, shard: Shard, replica: int) -> tf.Tensor:
    """A vector of lengths, or one length, with an entry that is that of a replica's part; -1 stays."""
    if value.constant is not None:
        lengths = value.constant.copy()
        place = () if lengths.ndim == 0 else (entry,)
        if lengths[place] > 0:
            lengths[place] = shard.part(lengths[place], replica)
        return tf.constant(lengths)
    length = tensor if tensor.shape.rank == 0 else tensor[entry]
    part = tf.where(length > 0, shard.part(length, replica), length)
    return part if tensor.shape.rank == 0 else tf.tensor_scatter_nd_update(tensor, [[entry]], [part])
