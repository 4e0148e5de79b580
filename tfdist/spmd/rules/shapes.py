"""Rules for operations that change the shape of a value, repeat its elements, or join or split values.

Those on lists of tensors are among them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfdist.spmd.placements import Lengths, Monomial, Shard, product
from tfdist.spmd.rules.registry import Operation, OpSharding, Rule, Sharding, rule


@rule("Reshape")
def reshape(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """Shards the output axis, or blocks of it, that is preceded by as many elements as the sharded input axis.

    A value `[P, L, ...]` that is sharded along L consists of P pieces, each sharded in the same proportions. The same
    holds for an output `[P, M, ...]`, if M can be divided in these proportions, and for `[P / k, k M, ...]` with k
    blocks.
    """
    dimensions = operation.dimensions(0)
    lengths = _output_lengths(operation, dimensions)
    if index != 0 or lengths is None or (dimensions is None and shard.axis):
        return None
    pieces = product([*(dimensions or [])[: shard.axis], Monomial(shard.blocks)])
    for axis, length in enumerate(lengths):
        before = product(lengths[:axis])
        if before is None or pieces is None:
            return None
        blocks = pieces.divided_by(before)
        if blocks is None or blocks.symbols or not blocks.factor or length is None:
            continue
        if length.multiple_of(blocks.factor * shard.total):
            output = shard.moved(axis, blocks.factor)
            return OpSharding([shard.axis, None], [output], localized={1: axis}, lengths={0: lengths})
    return None


def _output_lengths(operation: Operation, dimensions: list[Monomial] | None) -> Lengths | None:
    """What is known of the lengths of the output; an entry of -1 follows from the others."""
    static = operation.output_shapes[0]
    requested = operation.lengths[1]
    if static is None:
        return None
    if requested is None or len(requested) != len(static):
        requested = [None] * len(static)
    lengths: Lengths = [symbolic if n is None else Monomial(n) for n, symbolic in zip(static, requested, strict=True)]
    if lengths.count(None) == 1 and dimensions is not None:
        elements, others = product(dimensions), product([length for length in lengths if length is not None])
        if elements is not None and others is not None:
            lengths[lengths.index(None)] = elements.divided_by(others)
    return lengths


@rule("Transpose", "ConjugateTranspose")
def transpose(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """The permutation must be known."""
    order = operation.constants[1]
    if index != 0 or order is None:
        return None
    return OpSharding([shard.axis, None], [order.tolist().index(shard.axis)])


@rule("ExpandDims")
def expand_dims(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """The position of the new axis must be known."""
    rank = operation.rank(0)
    axis = None if rank is None else operation.axis(1, rank + 1)
    if index != 0 or axis is None:
        return None
    return OpSharding([shard.axis, None], [shard.axis + (axis <= shard.axis)])


@rule("Squeeze", attributes="squeeze_dims")
def squeeze(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """Lists the removed axes explicitly, because the local length of the sharded axis may be 1."""
    shape = operation.input_shapes[index]
    if shape is None:
        return None
    removed = [axis % len(shape) for axis in operation.attribute("squeeze_dims")]
    if not removed:
        if None in shape:
            return None
        removed = [axis for axis, length in enumerate(shape) if length == 1]
        if not removed:  # an empty list would mean all axes of length 1
            return None
    if shard.axis in removed:
        return None
    axis = shard.axis - sum(other < shard.axis for other in removed)
    return OpSharding([shard.axis], [axis], attributes={"squeeze_dims": removed})


@rule("BroadcastTo")
def broadcast_to(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """A sharded axis is not broadcast, since it is longer than 1."""
    output_rank, rank = operation.output_rank(), operation.rank(0)
    if index != 0 or output_rank is None or rank is None:
        return None
    axis = shard.axis + output_rank - rank
    return OpSharding([shard.axis, None], [axis], localized={1: axis})


@rule("Tile")
def tile(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """A sharded axis that is repeated consists of more blocks."""
    multiples = operation.constants[1]
    if index != 0 or multiples is None or multiples[shard.axis] < 1:
        return None
    return OpSharding([shard.axis, None], [shard.moved(shard.axis, shard.blocks * int(multiples[shard.axis]))])


@rule("SpaceToBatchND", "BatchToSpaceND")
def space_to_batch(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """The batch becomes one block of rows per position in a block of space, or the inverse."""
    sides = operation.constants[1]
    if index != 0 or sides is None or 0 < shard.axis <= len(sides):
        return None
    factor = 1 if shard.axis else int(np.prod(sides))
    if operation.type == "SpaceToBatchND":
        blocks = shard.blocks * factor
    elif shard.blocks % factor:
        return None
    else:
        blocks = shard.blocks // factor
    return OpSharding([shard.axis, None, None], [shard.moved(shard.axis, blocks)])


@rule("Pad", "PadV2")
@rule("MirrorPad", "MirrorPadGrad", attributes="mode")
def pad(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """The sharded axis must not be padded."""
    paddings = operation.constants[1]
    if index != 0 or paddings is None or paddings[shard.axis].any():
        return None
    return OpSharding([shard.axis] + [None] * (len(operation.placements) - 1), [shard.axis])


@rule("Pack", attributes="N axis")
def pack(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """Joins along a new axis."""
    rank = operation.output_rank()
    if rank is None:
        return None
    axis = operation.attribute("axis") % rank
    return OpSharding([shard.axis] * len(operation.placements), [shard.axis + (axis <= shard.axis)])


@rule("Unpack", attributes="num axis")
def unpack(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """Splits an axis that is whole."""
    rank = operation.rank(index)
    if rank is None:
        return None
    axis = operation.attribute("axis") % rank
    if axis == shard.axis:
        return None
    return OpSharding([shard.axis], [shard.axis - (axis < shard.axis)] * len(operation.output_shapes))


@rule("ConcatV2", attributes="N")
def concat(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """Concatenates along a whole axis; or along the sharded one, if all inputs are sharded: the blocks add up."""
    count = len(operation.placements) - 1
    axis = operation.axis(count, operation.output_rank())
    if index == count or axis is None:
        return None
    if axis != shard.axis:
        return OpSharding([shard.axis] * count + [None], [shard.axis])
    placements: list[Shard] = []
    block_lengths = set()
    for number in range(count):
        placement, length = operation.placements[number], operation.length(number, axis)
        if not isinstance(placement, Shard) or placement.axis != axis or placement.sizes != shard.sizes:
            return None
        if length is None:
            return None
        block_lengths.add(length // placement.blocks)
        placements.append(placement)
    if len(block_lengths) > 1:
        return None
    blocks = sum(placement.blocks for placement in placements)
    return OpSharding([*placements, None], [shard.moved(axis, blocks)])


@rule("Split", attributes="num_split")
def split(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """Splits a whole axis into equal parts, or the sharded one between its blocks."""
    axis = operation.axis(0, operation.rank(1))
    if index != 1 or axis is None:
        return None
    parts = operation.attribute("num_split")
    if axis != shard.axis:
        return OpSharding([None, shard.axis], [shard.axis] * parts)
    if shard.blocks % parts:
        return None
    return OpSharding([None, shard.axis], [shard.moved(axis, shard.blocks // parts)] * parts)


@rule("SplitV", attributes="num_split")
def split_by_lengths(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """Splits a whole axis."""
    axis = operation.axis(2, operation.rank(0))
    if index != 0 or axis is None or axis == shard.axis:
        return None
    return OpSharding([shard.axis, None, None], [shard.axis] * operation.attribute("num_split"))


def of_list(sharded: Sequence[bool], outputs: int = 1, shift: int = 0, element_shape: int | None = None) -> Rule:
    """The rule of an operation on lists of tensors, which are sharded along an axis of their elements.

    Args:
        sharded: for each input, whether it is a list or an element or elements, which are sharded.
        outputs: the number of outputs.
        shift: 1 if elements are stacked along a new first axis, -1 if they are taken from a first axis, which is whole.
        element_shape: the number of the input that is the shape of an element.
    """

    def sharding(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
        axis = shard.axis + min(shift, 0)  # of an element
        if not sharded[index] or axis < 0:
            return None
        inputs: list[Sharding] = [shard.axis if is_sharded else None for is_sharded in sharded]
        localized = {} if element_shape is None else {element_shape: axis}
        return OpSharding(inputs, [shard.axis + shift] * outputs, localized)

    return sharding


rule("TensorListPushBack")(of_list([True, True]))
rule("TensorListSetItem", attributes="resize_if_index_out_of_bounds")(of_list([True, False, True]))
rule("TensorListPopBack")(of_list([True, False], outputs=2, element_shape=1))
rule("TensorListGetItem")(of_list([True, False, False], element_shape=2))
rule("TensorListStack", attributes="num_elements")(of_list([True, False], shift=1, element_shape=1))
rule("TensorListGather")(of_list([True, False, False], shift=1, element_shape=2))
rule("TensorListResize")(of_list([True, False]))
rule("TensorListScatterV2")(of_list([True, False, False, False], shift=-1, element_shape=2))
rule("TensorListFromTensor")(of_list([True, False], shift=-1, element_shape=1))
