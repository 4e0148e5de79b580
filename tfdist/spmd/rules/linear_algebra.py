"""Rules for linear algebra: products, decompositions, solutions of linear systems, and Fourier transforms.

A product that sums over a sharded axis gives partial sums. The others may be sharded along their batch axes.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfdist.spmd.placements import Shard
from tfdist.spmd.rules.registry import Operation, OpSharding, Rule, Sharding, rule


def contraction(labels: Sequence[Sequence[str]], output: Sequence[str], index: int, shard: Shard) -> OpSharding:
    """The sharding of a product, given a label per axis as in Einstein notation."""
    label = labels[index][shard.axis]
    shardings = [list(axes).index(label) if label in axes else None for axes in labels]
    return OpSharding(shardings, [list(output).index(label) if label in output else "sum"])


@rule("MatMul", attributes="transpose_a transpose_b grad_a grad_b")
def matmul(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """`[m, k] @ [k, n]`."""
    first = "km" if operation.attribute("transpose_a") else "mk"
    second = "nk" if operation.attribute("transpose_b") else "kn"
    return contraction([first, second], "mn", index, shard)


@rule("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", attributes="adj_x adj_y grad_x grad_y")
def batch_matmul(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """`[..., m, k] @ [..., k, n]`, with broadcasting of the batch axes."""
    rank = operation.output_rank()
    ranks = [operation.rank(0), operation.rank(1)]
    if rank is None or None in ranks:
        return None
    batch = [f"batch{axis}" for axis in range(rank - 2)]
    matrices = ["km" if operation.attribute("adj_x") else "mk", "nk" if operation.attribute("adj_y") else "kn"]
    labels = []
    for number in range(2):
        shape = operation.input_shapes[number]
        assert shape is not None
        batch_labels = batch[len(batch) + 2 - len(shape) :]
        for axis, length in enumerate(shape[:-2]):
            if length is None and not operation.is_sharded(number, shard, axis):
                # It may be 1 and be broadcast, which matters only next to the sharded axis.
                batch_labels[axis] = f"unknown{number}.{axis}"
            elif length == 1:
                batch_labels[axis] = f"broadcast{number}.{axis}"
        labels.append([*batch_labels, *matrices[number]])
    label = labels[index][shard.axis]
    other_shape, place = operation.input_shapes[1 - index], labels[index].index(label)
    if label.startswith("batch") and other_shape is not None:
        # The same axis of the other input, counted from the right.
        other = len(other_shape) - (len(labels[index]) - place)
        if other >= 0 and other_shape[other] is None and not operation.is_sharded(1 - index, shard, other):
            return None
    return contraction(labels, [*batch, "m", "n"], index, shard)


@rule("Einsum", attributes="N equation")
def einsum(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """Without diagonals; the axes of an ellipsis are broadcast, and those with a letter are not."""
    parts = operation.attribute("equation").replace(" ", "").split("->")
    ranks = [operation.rank(number) for number in range(len(operation.placements))]
    if len(parts) != 2 or None in ranks:
        return None
    inputs = parts[0].split(",")
    hidden = [(rank or 0) - len(part.replace("...", "")) for part, rank in zip(inputs, ranks, strict=True)]
    depth = max((count for part, count in zip(inputs, hidden, strict=True) if "..." in part), default=0)
    labels = [_labels(part, count, depth) for part, count in zip(inputs, hidden, strict=True)]
    output = _labels(parts[1], depth, depth)
    if any(len(set(axes)) < len(axes) for axes in [*labels, output]):
        return None
    label = labels[index][shard.axis]
    if label.startswith("batch"):
        for number, axes in enumerate(labels):
            axis = axes.index(label) if label in axes else None
            if axis is None:
                continue
            if operation.length(number, axis) == 1:
                axes[axis] = "broadcast"
            elif operation.length(number, axis) is None and not operation.is_sharded(number, shard, axis):
                return None
    return contraction(labels, output, index, shard)


def _labels(part: str, hidden: int, depth: int) -> list[str]:
    """A label for each axis; the `hidden` axes of an ellipsis are the last of `depth`."""
    before, dots, after = part.partition("...")
    return [*before, *(f"batch{axis}" for axis in range(depth - hidden, depth) if dots), *after]


def along_batch(core: int, inputs: int = 1) -> Rule:
    """The rule of an operation on the last `core` axes of its first `inputs` inputs, which share the other axes."""

    def sharding(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
        rank = operation.rank(index)
        if index >= inputs or rank is None or shard.axis >= rank - core:
            return None
        others: list[Sharding] = [None] * (len(operation.placements) - inputs)
        # An optional result that is not computed has the shape [0].
        outputs = [None if shape == [0] else shard.axis for shape in operation.output_shapes]
        return OpSharding([shard.axis] * inputs + others, outputs)

    return sharding


rule("Cholesky", "LogMatrixDeterminant", "MatrixDeterminant", "MatrixLogarithm", "MatrixSquareRoot", "Lu")(
    along_batch(2)
)
rule("MatrixInverse", attributes="adjoint")(along_batch(2))
rule("Eig", "SelfAdjointEigV2", attributes="compute_v")(along_batch(2))
rule("Svd", attributes="compute_uv full_matrices")(along_batch(2))
rule("Qr", attributes="full_matrices")(along_batch(2))
rule("MatrixBandPart", "MatrixDiagPart")(along_batch(2))
rule("MatrixDiag")(along_batch(1))
rule("MatrixDiagPartV3", attributes="align")(along_batch(2))
rule("MatrixSolveLs", attributes="fast")(along_batch(2, inputs=2))
rule("TridiagonalSolve", attributes="partial_pivoting perturb_singular")(along_batch(2, inputs=2))
rule("TridiagonalMatMul")(along_batch(2, inputs=4))
rule("Cross")(along_batch(1, inputs=2))

rule("FFT", "IFFT", "RFFT", "IRFFT")(along_batch(1))
rule("FFT2D", "IFFT2D", "RFFT2D", "IRFFT2D")(along_batch(2))
rule("FFT3D", "IFFT3D", "RFFT3D", "IRFFT3D")(along_batch(3))


@rule("MatrixDiagV3", attributes="align")
def diagonals(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """Matrices with the given diagonals."""
    rank = operation.output_rank()
    if index or rank is None or shard.axis >= rank - 2:
        return None
    return OpSharding([shard.axis, None, None, None, None], [shard.axis])


@rule("MatrixSetDiag")
@rule("MatrixSetDiagV3", attributes="align")
def set_diagonals(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """Matrices with one or more diagonals replaced."""
    rank = operation.rank(0)
    if index > 1 or rank is None or shard.axis >= rank - 2:
        return None
    return OpSharding([shard.axis, shard.axis, None][: len(operation.placements)], [shard.axis])


@rule("MatrixSolve", attributes="adjoint")
def solve(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """Shards the batch of systems, or the right-hand sides of each system."""
    rank = operation.rank(index)
    if rank is None or (index == 0 and shard.axis == rank - 1) or shard.axis == rank - 2:
        return None
    return OpSharding([None if shard.axis == rank - 1 else shard.axis, shard.axis], [shard.axis])


@rule("MatrixTriangularSolve", attributes="lower adjoint")
def triangular_solve(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """As `solve`, with broadcasting of the batch axes."""
    ranks, output_rank = [operation.rank(0), operation.rank(1)], operation.output_rank()
    rank, other_rank = ranks[index], ranks[1 - index]
    if rank is None or other_rank is None or output_rank is None:
        return None
    if shard.axis >= rank - 2:
        return OpSharding([None, shard.axis], [output_rank - 1]) if index == 1 and shard.axis == rank - 1 else None
    shardings: list[Sharding] = [shard.axis, shard.axis]
    axis = shard.axis + other_rank - rank
    length = operation.length(1 - index, axis) if axis >= 0 else 1
    if length is None and not operation.is_sharded(1 - index, shard, axis):
        return None
    shardings[1 - index] = None if length == 1 else axis
    return OpSharding(shardings, [shard.axis + output_rank - rank])
