"""Products of matrices and of tensors: a cut row or column stays; a cut axis that is summed over gives terms."""

from __future__ import annotations

from collections.abc import Sequence

from tfdist.spmd.operation import Operation
from tfdist.spmd.placements import Shard
from tfdist.spmd.rules.registry import Local, rule


def contraction(labels: Sequence[Sequence[str]], output: Sequence[str], index: int, shard: Shard) -> Local:
    """The rule for a product, given a label per axis, as in Einstein's notation."""
    label = labels[index][shard.axis]
    cuts = [list(one).index(label) if label in one else None for one in labels]
    return Local(cuts, [list(output).index(label) if label in output else "sum"])


@rule("MatMul", attributes="transpose_a transpose_b grad_a grad_b")
def matmul(operation: Operation, index: int, shard: Shard) -> Local | None:
    """`[m, k] @ [k, n]`."""
    first = "km" if operation.attribute("transpose_a") else "mk"
    second = "nk" if operation.attribute("transpose_b") else "kn"
    return contraction([first, second], "mn", index, shard)


@rule("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", attributes="adj_x adj_y grad_x grad_y")
def batch_matmul(operation: Operation, index: int, shard: Shard) -> Local | None:
    """`[..., m, k] @ [..., k, n]`, with broadcasting of the axes before."""
    rank = operation.output_rank()
    ranks = [operation.rank(0), operation.rank(1)]
    if rank is None or None in ranks:
        return None
    batch = [f"batch{axis}" for axis in range(rank - 2)]
    ends = ["km" if operation.attribute("adj_x") else "mk", "nk" if operation.attribute("adj_y") else "kn"]
    labels = []
    for one in range(2):
        shape = operation.input_shapes[one]
        assert shape is not None
        own = batch[len(batch) + 2 - len(shape) :]
        for axis, length in enumerate(shape[:-2]):
            if length is None and not operation.is_cut(one, shard, axis):
                # It may be 1 and be broadcast, which matters only beside the cut axis.
                own[axis] = f"unknown{one}.{axis}"
            elif length == 1:
                own[axis] = f"broadcast{one}.{axis}"
        labels.append([*own, *ends[one]])
    label = labels[index][shard.axis]
    other_shape, place = operation.input_shapes[1 - index], labels[index].index(label)
    if label.startswith("batch") and other_shape is not None:
        # The same axis of the other input, counted from the right.
        other = len(other_shape) - (len(labels[index]) - place)
        if other >= 0 and other_shape[other] is None and not operation.is_cut(1 - index, shard, other):
            return None
    return contraction(labels, [*batch, "m", "n"], index, shard)


@rule("Einsum", attributes="N equation")
def einsum(operation: Operation, index: int, shard: Shard) -> Local | None:
    """Without diagonals; the axes of an ellipsis are broadcast, those with a letter are not."""
    parts = operation.attribute("equation").replace(" ", "").split("->")
    ranks = [operation.rank(one) for one in range(len(operation.placements))]
    if len(parts) != 2 or None in ranks:
        return None
    inputs = parts[0].split(",")
    hidden = [(rank or 0) - len(one.replace("...", "")) for one, rank in zip(inputs, ranks, strict=True)]
    depth = max((count for one, count in zip(inputs, hidden, strict=True) if "..." in one), default=0)
    labels = [_letters(one, count, depth) for one, count in zip(inputs, hidden, strict=True)]
    output = _letters(parts[1], depth, depth)
    if any(len(set(one)) < len(one) for one in [*labels, output]):
        return None
    label = labels[index][shard.axis]
    if label.startswith("batch"):
        for one, of in enumerate(labels):
            axis = of.index(label) if label in of else None
            if axis is not None and operation.length(one, axis) == 1:
                of[axis] = "broadcast"
            elif axis is not None and operation.length(one, axis) is None and not operation.is_cut(one, shard, axis):
                return None
    return contraction(labels, output, index, shard)


def _letters(part: str, hidden: int, depth: int) -> list[str]:
    """A label for each axis; the `hidden` axes of an ellipsis are the last of `depth`."""
    before, dots, after = part.partition("...")
    return [*before, *(f"batch{axis}" for axis in range(depth - hidden, depth) if dots), *after]
