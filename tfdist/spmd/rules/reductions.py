"""Rules for reductions and scans along axes: reducing a sharded axis gives partial values."""

from __future__ import annotations

from tfdist.spmd.placements import Shard
from tfdist.spmd.rules.registry import Operation, OpSharding, Sharding, rule

_REDUCTIONS = {"Sum": "sum", "Mean": "sum", "Max": "max", "Min": "min", "Prod": "prod", "All": "all", "Any": "any"}


def _after_removing(removed: set[int], axis: int) -> int:
    return axis - sum(other < axis for other in removed)


@rule(*_REDUCTIONS, "EuclideanNorm", attributes="keep_dims")
def reduction(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """The axes must be known, or it must be known whether they contain the sharded axis."""
    axes = operation.axes(1, operation.rank(0))
    if index != 0:
        return None
    if shard.axis in (operation.included[1] if axes is None else axes):
        return _along_sharded_axis(operation, shard)
    if axes is None:
        # The output's number of a later axis depends on which axes before it are removed.
        return OpSharding([0, None], [0]) if shard.axis == 0 and 0 in operation.excluded[1] else None
    axis = shard.axis if operation.attribute("keep_dims") else _after_removing(axes, shard.axis)
    return OpSharding([shard.axis, None], [axis])


def _along_sharded_axis(operation: Operation, shard: Shard) -> OpSharding | None:
    dtype = operation.output_dtypes[0]
    if operation.type == "EuclideanNorm" or (dtype.is_complex and operation.type != "Sum"):
        return None
    if operation.type == "Mean" and not dtype.is_floating:
        return None
    return OpSharding([shard.axis, None], [_REDUCTIONS[operation.type]], mean=operation.type == "Mean")


@rule("L2Loss", "HistogramFixedWidth")
def sums(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """Half the sum of squares, and the number of values in each bin of a histogram."""
    return None if index else OpSharding([shard.axis] + [None] * (len(operation.placements) - 1), ["sum"])


@rule("ArgMax", "ArgMin")
def arg(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """Shards any other axis than that of the search."""
    axis = operation.axis(1, operation.rank(0))
    if index != 0 or axis is None or axis == shard.axis:
        return None
    return OpSharding([shard.axis, None], [_after_removing({axis}, shard.axis)])


@rule("Cumsum", "Cumprod", "CumulativeLogsumexp", attributes="exclusive reverse")
@rule("ReverseV2", "Roll")
def along(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """The axes that the last input lists must be whole."""
    count = len(operation.placements)
    axes = operation.axes(count - 1, operation.rank(0))
    if index != 0 or axes is None or shard.axis in axes:
        return None
    return OpSharding([shard.axis] + [None] * (count - 1), [shard.axis])


@rule("ReverseSequence", attributes="seq_dim batch_dim")
def reverse_sequence(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """Shards the batch together with its lengths, or an axis that is neither batch nor sequence."""
    batch = operation.attribute("batch_dim")
    axis = batch if index else shard.axis
    if batch < 0 or operation.attribute("seq_dim") in range(-9, 0) or axis == operation.attribute("seq_dim"):
        return None
    return OpSharding([axis, 0 if axis == batch else None], [axis])


@rule("TopKV2", attributes="sorted")
@rule("NthElement", attributes="reverse")
@rule("Softmax", "LogSoftmax", "BiasAddV1")
def along_last(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """The last axis must be whole."""
    if index != 0 or operation.rank(0) in (None, shard.axis + 1):
        return None
    others: list[Sharding] = [None] * (len(operation.placements) - 1)
    return OpSharding([shard.axis, *others], [shard.axis] * len(operation.output_shapes))
