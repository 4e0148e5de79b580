"""Values that are joined, or taken apart, along an axis."""

from __future__ import annotations

from tfdist.spmd.operation import Operation
from tfdist.spmd.placements import Shard
from tfdist.spmd.rules.registry import Cut, Local, rule


@rule("Pack", attributes="N axis")
def pack(operation: Operation, index: int, shard: Shard) -> Local | None:
    """Along a new axis."""
    del index
    rank = operation.output_rank()
    if rank is None:
        return None
    axis = operation.attribute("axis") % rank
    return Local([shard.axis] * len(operation.placements), [shard.axis + (axis <= shard.axis)])


@rule("Unpack", attributes="num axis")
def unpack(operation: Operation, index: int, shard: Shard) -> Local | None:
    """Along an axis that is whole."""
    rank = operation.rank(index)
    if rank is None:
        return None
    axis = operation.attribute("axis") % rank
    if axis == shard.axis:
        return None
    return Local([shard.axis], [shard.axis - (axis < shard.axis)] * len(operation.output_shapes))


@rule("ConcatV2", attributes="N")
def concat(operation: Operation, index: int, shard: Shard) -> Local | None:
    """Along another axis; or along the cut one, where all inputs are cut: their blocks are those of the output."""
    count = len(operation.placements) - 1
    axis = operation.axis(count, operation.output_rank())
    if index == count or axis is None:
        return None
    if axis != shard.axis:
        return Local([shard.axis] * count + [None], [shard.axis])
    cuts: list[Cut] = []
    lengths = set()
    for one in range(count):
        placement, length = operation.placements[one], operation.length(one, axis)
        if not isinstance(placement, Shard) or placement.axis != axis or placement.sizes != shard.sizes:
            return None
        if length is None:
            return None
        lengths.add(length // placement.blocks)
        cuts.append(placement)
    if len(lengths) > 1:
        return None
    blocks = sum(one.blocks for one in cuts if isinstance(one, Shard))
    return Local([*cuts, None], [shard.moved(axis, blocks)])


@rule("Split", attributes="num_split")
def split(operation: Operation, index: int, shard: Shard) -> Local | None:
    """Into equal parts, along a whole axis or between the blocks of the cut one."""
    axis = operation.axis(0, operation.rank(1))
    if index != 1 or axis is None:
        return None
    parts = operation.attribute("num_split")
    if axis != shard.axis:
        return Local([None, shard.axis], [shard.axis] * parts)
    if shard.blocks % parts:
        return None
    return Local([None, shard.axis], [shard.moved(axis, shard.blocks // parts)] * parts)


@rule("SplitV", attributes="num_split")
def split_by_lengths(operation: Operation, index: int, shard: Shard) -> Local | None:
    """Along a whole axis."""
    axis = operation.axis(2, operation.rank(0))
    if index != 0 or axis is None or axis == shard.axis:
        return None
    return Local([shard.axis, None, None], [shard.axis] * operation.attribute("num_split"))
