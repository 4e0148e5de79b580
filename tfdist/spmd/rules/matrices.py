"""Rules for linear algebra and Fourier transforms, which may be sharded along their batch axes."""

from __future__ import annotations

from tfdist.spmd.operation import Operation
from tfdist.spmd.placements import Shard
from tfdist.spmd.rules.registry import OpSharding, Rule, Sharding, rule


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
