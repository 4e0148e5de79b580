"""Operations that change the shape of a value and keep its elements, or repeat them."""

from __future__ import annotations

import numpy as np

from tfdist.spmd.lengths import Lengths, Monomial, product
from tfdist.spmd.operation import Operation
from tfdist.spmd.placements import Shard
from tfdist.spmd.rules.registry import Local, rule


@rule("Reshape")
def reshape(operation: Operation, index: int, shard: Shard) -> Local | None:
    """The output's axis, or blocks of it, before which there are as many elements as before the cut axis.

    A value `[P, L, ...]` whose axis L is cut consists of P pieces, each cut in the same proportions. The same holds for
    an output `[P, M, ...]`, if M can be cut in these proportions, and for `[P / k, k M, ...]` with k blocks.
    """
    own = operation.own_lengths(0)
    lengths = _lengths(operation, own)
    if index != 0 or lengths is None or (own is None and shard.axis):
        return None
    pieces = product([*(own or [])[: shard.axis], Monomial(shard.blocks)])
    for axis, length in enumerate(lengths):
        before = product(lengths[:axis])
        if before is None or pieces is None:
            return None
        blocks = pieces.divided_by(before)
        if blocks is None or blocks.symbols or not blocks.factor or length is None:
            continue
        if length.multiple_of(blocks.factor * shard.total):
            cut = shard.moved(axis, blocks.factor)
            return Local([shard.axis, None], [cut], localized={1: axis}, lengths={0: lengths})
    return None


def _lengths(operation: Operation, own: list[Monomial] | None) -> Lengths | None:
    """What is known of the lengths of the output; an entry of -1 follows from the others."""
    static = operation.output_shapes[0]
    given = operation.lengths[1]
    if static is None:
        return None
    if given is None or len(given) != len(static):
        given = [None] * len(static)
    found: Lengths = [one if n is None else Monomial(n) for n, one in zip(static, given, strict=True)]
    if found.count(None) == 1 and own is not None:
        elements, rest = product(own), product([one for one in found if one is not None])
        if elements is not None and rest is not None:
            found[found.index(None)] = elements.divided_by(rest)
    return found


@rule("Transpose", "ConjugateTranspose")
def transpose(operation: Operation, index: int, shard: Shard) -> Local | None:
    """By a known permutation."""
    order = operation.constants[1]
    if index != 0 or order is None:
        return None
    return Local([shard.axis, None], [order.tolist().index(shard.axis)])


@rule("ExpandDims")
def expand_dims(operation: Operation, index: int, shard: Shard) -> Local | None:
    """At a known place."""
    rank = operation.rank(0)
    axis = None if rank is None else operation.axis(1, rank + 1)
    if index != 0 or axis is None:
        return None
    return Local([shard.axis, None], [shard.axis + (axis <= shard.axis)])


@rule("Squeeze", attributes="squeeze_dims")
def squeeze(operation: Operation, index: int, shard: Shard) -> Local | None:
    """Of axes other than the cut one, which is longer than 1."""
    shape = operation.input_shapes[index]
    if shape is None:
        return None
    removed = [axis % len(shape) for axis in operation.attribute("squeeze_dims")]
    if not removed:
        if None in shape:
            return None
        removed = [axis for axis, length in enumerate(shape) if length == 1]
        if not removed:  # there is no way to state that no axis is removed, and a part may have the length 1
            return None
    if shard.axis in removed:
        return None
    left = shard.axis - sum(axis < shard.axis for axis in removed)
    return Local([shard.axis], [left], attributes={"squeeze_dims": removed})


@rule("BroadcastTo")
def broadcast_to(operation: Operation, index: int, shard: Shard) -> Local | None:
    """The cut axis is not broadcast, since it is longer than 1."""
    rank, own_rank = operation.output_rank(), operation.rank(0)
    if index != 0 or rank is None or own_rank is None:
        return None
    axis = shard.axis + rank - own_rank
    return Local([shard.axis, None], [axis], localized={1: axis})


@rule("Tile")
def tile(operation: Operation, index: int, shard: Shard) -> Local | None:
    """A repeated cut axis consists of more blocks."""
    multiples = operation.constants[1]
    if index != 0 or multiples is None or multiples[shard.axis] < 1:
        return None
    return Local([shard.axis, None], [shard.moved(shard.axis, shard.blocks * int(multiples[shard.axis]))])


@rule("SpaceToBatchND")
def space_to_batch(operation: Operation, index: int, shard: Shard) -> Local | None:
    """Rows become a block of rows for each place in a block of space."""
    sides = operation.constants[1]
    if index != 0 or sides is None or 0 < shard.axis <= len(sides):
        return None
    blocks = 1 if shard.axis else int(np.prod(sides))
    return Local([shard.axis, None, None], [shard.moved(shard.axis, shard.blocks * blocks)])


@rule("BatchToSpaceND")
def batch_to_space(operation: Operation, index: int, shard: Shard) -> Local | None:
    """The inverse of `space_to_batch`, of rows that consist of blocks."""
    sides = operation.constants[1]
    if index != 0 or sides is None or 0 < shard.axis <= len(sides):
        return None
    blocks = 1 if shard.axis else int(np.prod(sides))
    if shard.blocks % blocks:
        return None
    return Local([shard.axis, None, None], [shard.moved(shard.axis, shard.blocks // blocks)])


@rule("Pad", "PadV2")
@rule("MirrorPad", "MirrorPadGrad", attributes="mode")
def pad(operation: Operation, index: int, shard: Shard) -> Local | None:
    """Of axes other than the cut one."""
    paddings = operation.constants[1]
    if index != 0 or paddings is None or paddings[shard.axis].any():
        return None
    return Local([shard.axis] + [None] * (len(operation.placements) - 1), [shard.axis])
