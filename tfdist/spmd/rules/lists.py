"""Lists of tensors, which loops read and write: the axis is that of the elements."""

from __future__ import annotations

from tfdist.spmd.operation import Operation
from tfdist.spmd.placements import Shard
from tfdist.spmd.rules.registry import Local, rule


@rule("TensorListPushBack")
def push_back(operation: Operation, index: int, shard: Shard) -> Local | None:
    """An element cut as those of the list."""
    del operation, index
    return Local([shard.axis, shard.axis], [shard.axis])


@rule("TensorListSetItem", attributes="resize_if_index_out_of_bounds")
def set_item(operation: Operation, index: int, shard: Shard) -> Local | None:
    """An element cut as those of the list."""
    del operation, index
    return Local([shard.axis, None, shard.axis], [shard.axis])


@rule("TensorListPopBack")
def pop_back(operation: Operation, index: int, shard: Shard) -> Local | None:
    """The last element."""
    del operation
    return None if index else Local([shard.axis, None], [shard.axis, shard.axis], localized={1: shard.axis})


@rule("TensorListGetItem")
def get_item(operation: Operation, index: int, shard: Shard) -> Local | None:
    """One element."""
    del operation
    return None if index else Local([shard.axis, None, None], [shard.axis], localized={2: shard.axis})


@rule("TensorListStack", attributes="num_elements")
def stack(operation: Operation, index: int, shard: Shard) -> Local | None:
    """The elements along a new first axis."""
    del operation
    return None if index else Local([shard.axis, None], [shard.axis + 1], localized={1: shard.axis})


@rule("TensorListGather")
def gather(operation: Operation, index: int, shard: Shard) -> Local | None:
    """Some elements along a new first axis."""
    del operation
    return None if index else Local([shard.axis, None, None], [shard.axis + 1], localized={2: shard.axis})


@rule("TensorListResize")
def resize(operation: Operation, index: int, shard: Shard) -> Local | None:
    """Elements at the end that are added or removed."""
    del operation
    return None if index else Local([shard.axis, None], [shard.axis])


@rule("TensorListScatterV2")
def scatter(operation: Operation, index: int, shard: Shard) -> Local | None:
    """The elements are along the first axis, which is whole."""
    del operation
    if index or shard.axis == 0:
        return None
    return Local([shard.axis, None, None, None], [shard.axis - 1], localized={2: shard.axis - 1})


@rule("TensorListFromTensor")
def from_tensor(operation: Operation, index: int, shard: Shard) -> Local | None:
    """The elements are along the first axis, which is whole."""
    del operation
    if index or shard.axis == 0:
        return None
    return Local([shard.axis, None], [shard.axis - 1], localized={1: shard.axis - 1})
