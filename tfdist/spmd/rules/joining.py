"""Rules for operations that join or split values along an axis, among them those on lists of tensors."""

from __future__ import annotations

from collections.abc import Sequence

from tfdist.spmd.operation import Operation
from tfdist.spmd.placements import Shard
from tfdist.spmd.rules.registry import OpSharding, Rule, Sharding, rule


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
