"""Linear algebra and Fourier transforms: of each matrix, or vector, of the last axes, along the axes before them."""

from __future__ import annotations

from tfdist.spmd.operation import Operation
from tfdist.spmd.placements import Shard
from tfdist.spmd.rules.registry import Cut, Local, Rule, rule


def along_batch(own: int, inputs: int = 1) -> Rule:
    """The rule of an operation on the last `own` axes of its first `inputs` inputs, whose other axes are the same."""

    def local(operation: Operation, index: int, shard: Shard) -> Local | None:
        rank = operation.rank(index)
        if index >= inputs or rank is None or shard.axis >= rank - own:
            return None
        rest: list[Cut] = [None] * (len(operation.placements) - inputs)
        outputs = [None if shape == [0] else shard.axis for shape in operation.output_shapes]  # an unwanted result
        return Local([shard.axis] * inputs + rest, outputs)

    return local


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
def diagonals(operation: Operation, index: int, shard: Shard) -> Local | None:
    """Matrices of given diagonals."""
    rank = operation.output_rank()
    if index or rank is None or shard.axis >= rank - 2:
        return None
    return Local([shard.axis, None, None, None, None], [shard.axis])


@rule("MatrixSetDiag")
@rule("MatrixSetDiagV3", attributes="align")
def set_diagonals(operation: Operation, index: int, shard: Shard) -> Local | None:
    """Matrices with other diagonals, of which a matrix has one or several."""
    rank = operation.rank(0)
    if index > 1 or rank is None or shard.axis >= rank - 2:
        return None
    return Local([shard.axis, shard.axis, None][: len(operation.placements)], [shard.axis])


@rule("MatrixSolve", attributes="adjoint")
def solve(operation: Operation, index: int, shard: Shard) -> Local | None:
    """Systems of equations: each by itself, and for each of their right sides."""
    rank = operation.rank(index)
    if rank is None or (index == 0 and shard.axis == rank - 1) or shard.axis == rank - 2:
        return None
    return Local([None if shard.axis == rank - 1 else shard.axis, shard.axis], [shard.axis])


@rule("MatrixTriangularSolve", attributes="lower adjoint")
def triangular_solve(operation: Operation, index: int, shard: Shard) -> Local | None:
    """As `solve`, with broadcasting of the axes before the matrices."""
    ranks, rank = [operation.rank(0), operation.rank(1)], operation.output_rank()
    own, other = ranks[index], ranks[1 - index]
    if own is None or other is None or rank is None:
        return None
    if shard.axis >= own - 2:
        return Local([None, shard.axis], [rank - 1]) if index == 1 and shard.axis == own - 1 else None
    cuts: list[Cut] = [shard.axis, shard.axis]
    axis = shard.axis + other - own
    length = operation.length(1 - index, axis) if axis >= 0 else 1
    if length is None and not operation.is_cut(1 - index, shard, axis):
        return None
    cuts[1 - index] = None if length == 1 else axis
    return Local(cuts, [shard.axis + rank - own])
