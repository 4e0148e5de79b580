"""Rules for slices, gathers and scatters."""

from __future__ import annotations

from tfdist.spmd.placements import Shard
from tfdist.spmd.rules.registry import Operation, OpSharding, rule


@rule("Slice")
def slices(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """The slice must contain all of the sharded axis."""
    begin, size = operation.constants[1], operation.constants[2]
    length = operation.length(0, shard.axis)
    if index != 0 or begin is None or size is None or begin[shard.axis] != 0:
        return None
    if size[shard.axis] not in (-1, length):
        return None
    return OpSharding([shard.axis, None, None], [shard.axis], localized={2: shard.axis})


_MASKS = "begin_mask end_mask ellipsis_mask new_axis_mask shrink_axis_mask"


class _Slice:
    """How a strided slice maps each axis.

    Attributes:
        axes: for each input axis that the specification covers: its number, the number of the specification's entry
            (`None` for an ellipsis), and the number of the output axis (`None` if the axis is removed).
        end: the number of the first input axis that the specification does not cover.
        shift: for the axes from `end` on, the number in the output minus the number in the input.
    """

    def __init__(self, operation: Operation, entries: int, rank: int):
        self._operation = operation
        self.axes: list[tuple[int, int | None, int | None]] = []
        axis = result = 0
        for entry in range(entries):
            if self._masked("ellipsis_mask", entry):
                others = sum(not self._masked("new_axis_mask", other) for other in range(entries) if other != entry)
                for _ in range(rank - others):
                    self.axes.append((axis, None, result))
                    axis, result = axis + 1, result + 1
            elif self._masked("new_axis_mask", entry):
                result += 1
            elif self._masked("shrink_axis_mask", entry):
                self.axes.append((axis, entry, None))
                axis += 1
            else:
                self.axes.append((axis, entry, result))
                axis, result = axis + 1, result + 1
        self.end, self.shift = axis, result - axis

    def _masked(self, name: str, entry: int) -> bool:
        return bool(self._operation.attribute(name) >> entry & 1)

    def takes_all(self, entry: int | None, length: int | None) -> bool:
        """Whether an entry selects all of an axis of `length`, in order."""
        begin, end, step = self._operation.constants[1:4]
        if entry is None:
            return True
        if step is None or step[entry] != 1:
            return False
        from_start = self._masked("begin_mask", entry) or (
            begin is not None and (begin[entry] == 0 or (length is not None and begin[entry] <= -length))
        )
        to_end = self._masked("end_mask", entry) or (end is not None and length is not None and end[entry] >= length)
        return from_start and to_end

    def attributes(self, entry: int | None) -> dict[str, int]:
        """The attributes with which an entry selects all of a shard."""
        if entry is None:
            return {}
        return {name: self._operation.attribute(name) | 1 << entry for name in ("begin_mask", "end_mask")}


@rule("StridedSlice", attributes=_MASKS)
def strided_slice(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """The slice must contain all of the sharded axis."""
    shape, rank = operation.input_shapes[1], operation.rank(0)
    if index != 0 or rank is None or shape is None or shape[0] is None:
        return None
    strided = _Slice(operation, shape[0], rank)
    for axis, entry, result in strided.axes:
        if axis == shard.axis:
            length = operation.length(0, axis)
            if result is None or not strided.takes_all(entry, length):
                return None
            return OpSharding([axis, None, None, None], [result], attributes=strided.attributes(entry))
    return OpSharding([shard.axis, None, None, None], [shard.axis + strided.shift])


@rule("StridedSliceGrad", attributes=_MASKS)
def strided_slice_gradient(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """The slice must have contained all of the sharded axis."""
    entries, lengths = operation.input_shapes[1], operation.lengths[0]
    if index != 4 or lengths is None or entries is None or entries[0] is None:
        return None
    strided, length = _Slice(operation, entries[0], len(lengths)), operation.length(4, shard.axis)
    for axis, entry, result in strided.axes:
        if result == shard.axis:
            length_before = lengths[axis]
            known = None if length_before is None or length_before.symbols else length_before.factor
            if known is None or known != length or not strided.takes_all(entry, known):
                return None
            return OpSharding([None] * 4 + [shard.axis], [axis], {0: axis}, strided.attributes(entry))
    axis = shard.axis - strided.shift
    if shard.axis < strided.end + strided.shift:  # an axis that the slice added
        return None
    return OpSharding([None] * 4 + [shard.axis], [axis], {0: axis})


@rule("GatherV2", attributes="batch_dims")
def gather(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """Shards the indices, or any other axis of the values than the indexed one, or both along `batch_dims`."""
    rank, index_rank = operation.rank(0), operation.rank(1)
    axis, batch = operation.axis(2, rank), operation.attribute("batch_dims")
    if rank is None or index_rank is None or axis is None:
        return None
    batch += index_rank if batch < 0 else 0
    if shard.axis < batch:
        return OpSharding([shard.axis, shard.axis, None], [shard.axis])
    if index == 1:
        return OpSharding([None, shard.axis, None], [axis + shard.axis - batch]) if not batch else None
    if index != 0 or shard.axis == axis:
        return None
    output = shard.axis if shard.axis < axis else shard.axis - 1 + index_rank - batch
    return OpSharding([shard.axis, None, None], [output])


@rule("GatherNd", attributes="bad_indices_policy")
def gather_nd(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """Shards the indices, or an axis of the values that the indices do not refer to."""
    rank = operation.rank(1)
    if rank is None:
        return None
    if index == 1:
        return OpSharding([None, shard.axis], [shard.axis]) if shard.axis < rank - 1 else None
    depth = operation.length(1, rank - 1)
    if depth is None or shard.axis < depth:
        return None
    return OpSharding([shard.axis, None], [shard.axis - depth + rank - 1])


@rule("ResourceGather", attributes="batch_dims validate_indices")
def resource_gather(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """Shards the indices; the variable is whole."""
    if index != 1 or operation.attribute("batch_dims"):
        return None
    return OpSharding([None, shard.axis], [shard.axis])


@rule("ResourceGatherNd")
def resource_gather_nd(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """Shards the indices; the variable is whole."""
    return gather_nd(operation, index, shard) if index == 1 else None


@rule("OneHot", attributes="axis")
def one_hot(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """Shards the indices."""
    rank, axis = operation.rank(0), operation.attribute("axis")
    if index != 0 or rank is None:
        return None
    axis = rank if axis == -1 else axis
    return OpSharding([shard.axis, None, None, None], [shard.axis + (axis <= shard.axis)])


_SEGMENTS = {"Sum": "sum", "Max": "max", "Min": "min", "Prod": "prod"}


@rule(*(f"UnsortedSegment{kind}" for kind in _SEGMENTS))
def segments(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """Reduces the rows of each segment; sharded rows give partial results."""
    rank = operation.rank(1)
    if index > 1 or rank is None:
        return None
    if shard.axis >= rank:
        return OpSharding([shard.axis, None, None], [shard.axis - rank + 1])
    return OpSharding([shard.axis, shard.axis, None], [_SEGMENTS[operation.type.removeprefix("UnsortedSegment")]])


_SPARSE = [f"SparseSegment{kind}{suffix}" for kind in ("Mean", "SqrtN", "Sum") for suffix in ("", "WithNumSegments")]
_SPARSE_GRADIENTS = [f"SparseSegment{kind}Grad" for kind in ("Mean", "SqrtN", "Sum")]


@rule(*(f"Segment{kind}" for kind in ("Max", "Mean", "Min", "Prod", "Sum")))
@rule(*_SPARSE, *_SPARSE_GRADIENTS, attributes="sparse_gradient")
def segments_of_whole_rows(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """Reduces whole rows per segment; any other axis may be sharded."""
    if index or not shard.axis:
        return None
    return OpSharding([shard.axis] + [None] * (len(operation.placements) - 1), [shard.axis])


@rule("SparseTensorDenseMatMul", attributes="adjoint_a adjoint_b")
def sparse_matmul(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """Shards the columns of the dense factor, which are those of the product."""
    columns = 0 if operation.attribute("adjoint_b") else 1
    if index != 3 or shard.axis != columns:
        return None
    return OpSharding([None, None, None, columns], [1])


@rule("LowerBound", "UpperBound")
def search(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """Shards the rows, or the values that are searched for in whole rows."""
    if shard.axis == 0:
        return OpSharding([0, 0], [0])
    return OpSharding([None, 1], [1]) if index == 1 else None


@rule("ScatterNd", attributes="bad_indices_policy")
def scatter_nd(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """Shards the updates, which gives partial sums, or an axis that the indices do not refer to."""
    rank = operation.rank(0)
    if index > 1 or rank is None:
        return None
    if shard.axis < rank - 1:
        return OpSharding([shard.axis, shard.axis, None], ["sum"])
    depth = operation.length(0, rank - 1)
    if index == 0 or depth is None:
        return None
    axis = shard.axis - (rank - 1) + depth
    return OpSharding([None, shard.axis, None], [axis], localized={2: axis})


@rule(*(f"TensorScatter{kind}" for kind in ("Add", "Max", "Min", "Sub", "Update")), attributes="bad_indices_policy")
def tensor_scatter(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """Shards an axis that the indices do not refer to."""
    rank = operation.rank(1)
    depth = None if rank is None else operation.length(1, rank - 1)
    if index == 1 or rank is None or depth is None:
        return None
    axis = shard.axis if index == 0 else shard.axis - (rank - 1) + depth
    if axis < depth or (index == 2 and shard.axis < rank - 1):
        return None
    return OpSharding([axis, None, axis - depth + rank - 1], [axis])


@rule("Bincount")
def bincount(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """Counts each number, or sums its weights; without weights the last input has no elements."""
    if index not in (0, 2):
        return None
    weights = operation.input_shapes[2]
    return OpSharding([shard.axis, None, None if weights == [0] else shard.axis], ["sum"])


@rule("DenseBincount", attributes="binary_output")
def dense_bincount(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """Counts each number; for a matrix, per row."""
    weights = operation.input_shapes[2]
    if index not in (0, 2) or weights is None:
        return None
    weights_axis = None if 0 in weights else shard.axis
    if operation.rank(0) not in (1, 2):
        return None
    if operation.rank(0) == 2:
        return OpSharding([0, None, weights_axis], [0]) if shard.axis == 0 else None
    return None if operation.attribute("binary_output") else OpSharding([0, None, weights_axis], ["sum"])
