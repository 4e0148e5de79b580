"""Sums, means and the like along axes: along a cut axis they give terms of a sum, or of another reduction."""

from __future__ import annotations

from tfdist.spmd.operation import Operation
from tfdist.spmd.placements import Shard
from tfdist.spmd.rules.registry import Cut, Local, rule

_REDUCTIONS = {"Sum": "sum", "Mean": "sum", "Max": "max", "Min": "min", "Prod": "prod", "All": "all", "Any": "any"}


def _after(axis: int, removed: set[int]) -> int:
    """The number of an axis when others are removed."""
    return axis - sum(one < axis for one in removed)


@rule(*_REDUCTIONS, attributes="keep_dims")
def reduction(operation: Operation, index: int, shard: Shard) -> Local | None:
    """A reduction along axes that are known, or of which it is known whether the cut one is among them."""
    axes = operation.axes(1, operation.rank(0))
    if index != 0:
        return None
    if shard.axis in (operation.included[1] if axes is None else axes):
        return _along_cut_axis(operation, shard)
    if axes is None:
        # The number of a later axis depends on which axes before it are removed.
        return Local([0, None], [0]) if shard.axis == 0 and 0 in operation.excluded[1] else None
    kept = shard.axis if operation.attribute("keep_dims") else _after(shard.axis, axes)
    return Local([shard.axis, None], [kept])


def _along_cut_axis(operation: Operation, shard: Shard) -> Local | None:
    if operation.output_dtypes[0].is_complex and operation.type != "Sum":
        return None
    if operation.type == "Mean" and not operation.output_dtypes[0].is_floating:
        return None
    return Local([shard.axis, None], [_REDUCTIONS[operation.type]], mean=operation.type == "Mean")


@rule("EuclideanNorm", attributes="keep_dims")
def norm(operation: Operation, index: int, shard: Shard) -> Local | None:
    """Along axes that are whole."""
    axes = operation.axes(1, operation.rank(0))
    if index != 0 or axes is None or shard.axis in axes:
        return None
    return Local([shard.axis, None], [shard.axis if operation.attribute("keep_dims") else _after(shard.axis, axes)])


@rule("L2Loss")
def l2_loss(operation: Operation, index: int, shard: Shard) -> Local | None:
    """Half of the sum of squares."""
    del operation, index
    return Local([shard.axis], ["sum"])


@rule("ArgMax", "ArgMin")
def arg(operation: Operation, index: int, shard: Shard) -> Local | None:
    """Along an axis that is whole."""
    axis = operation.axis(1, operation.rank(0))
    if index != 0 or axis is None or axis == shard.axis:
        return None
    return Local([shard.axis, None], [_after(shard.axis, {axis})])


@rule("Cumsum", "Cumprod", "CumulativeLogsumexp", attributes="exclusive reverse")
@rule("ReverseV2")
def along(operation: Operation, index: int, shard: Shard) -> Local | None:
    """Running sums and reversed orders, along axes that are whole."""
    axes = operation.axes(1, operation.rank(0))
    if index != 0 or axes is None or shard.axis in axes:
        return None
    return Local([shard.axis, None], [shard.axis])


@rule("Roll")
def roll(operation: Operation, index: int, shard: Shard) -> Local | None:
    """Along axes that are whole."""
    axes = operation.axes(2, operation.rank(0))
    if index != 0 or axes is None or shard.axis in axes:
        return None
    return Local([shard.axis, None, None], [shard.axis])


@rule("ReverseSequence", attributes="seq_dim batch_dim")
def reverse_sequence(operation: Operation, index: int, shard: Shard) -> Local | None:
    """Of cut rows, each with its length, or along an axis that is neither."""
    batch = operation.attribute("batch_dim")
    axis = batch if index else shard.axis
    if batch < 0 or operation.attribute("seq_dim") in range(-9, 0) or axis == operation.attribute("seq_dim"):
        return None
    return Local([axis, 0 if axis == batch else None], [axis])


@rule("TopKV2", attributes="sorted")
@rule("NthElement", attributes="reverse")
def along_last(operation: Operation, index: int, shard: Shard) -> Local | None:
    """Along the last axis."""
    if index != 0 or operation.rank(0) in (None, shard.axis + 1):
        return None
    rest: list[Cut] = [None] * (len(operation.placements) - 1)
    return Local([shard.axis, *rest], [shard.axis] * len(operation.output_shapes))


@rule("HistogramFixedWidth")
def histogram(operation: Operation, index: int, shard: Shard) -> Local | None:
    """Counts of the values in each bin."""
    del operation
    return None if index else Local([shard.axis, None, None], ["sum"])
