"""Operations that compute each element of their output from the elements at the same place, with broadcasting."""

from __future__ import annotations

from tfdist.spmd.operation import Operation
from tfdist.spmd.placements import Shard
from tfdist.spmd.rules.registry import Cut, Local, rule

_OF_ONE = """
    Abs Acos Acosh Asin Asinh Atan Atanh BesselI0 BesselI0e BesselI1 BesselI1e BesselJ0 BesselJ1 BesselK0
    BesselK0e BesselK1 BesselK1e BesselY0 BesselY1 Ceil ComplexAbs Conj Cos Cosh Dawsn Digamma Elu Erf Erfc
    Erfinv Exp Expint Expm1 Floor FresnelCos FresnelSin Imag Inv Invert IsFinite IsInf IsNan Lgamma Log Log1p
    LogicalNot Ndtri Neg OnesLike PopulationCount Real Reciprocal Relu Relu6 Rint Round Rsqrt Selu Sigmoid Sign
    Sin Sinh Softplus Softsign Spence Sqrt Square Tan Tanh ZerosLike
"""
_OF_SEVERAL = """
    Add AddN AddV2 Atan2 Betainc BitwiseAnd BitwiseOr BitwiseXor ClipByValue Complex Div DivNoNan EluGrad
    FloorDiv FloorMod Greater GreaterEqual Igamma Igammac IgammaGradA InvGrad LeftShift Less LessEqual
    LogicalAnd LogicalOr Maximum Minimum Mod Mul MulNoNan NextAfter Polygamma Pow RandomGammaGrad RealDiv ReciprocalGrad
    Relu6Grad ReluGrad RightShift RsqrtGrad SelectV2 SeluGrad SigmoidGrad SoftplusGrad SoftsignGrad SqrtGrad
    SquaredDifference Sub TanhGrad TruncateDiv TruncateMod Xdivy Xlog1py Xlogy Zeta
"""


@rule(*_OF_ONE.split(), *_OF_SEVERAL.split(), attributes="N")
@rule("Cast", attributes="Truncate")
@rule("CheckNumerics", attributes="message")
@rule("CheckNumericsV2", attributes="message")
@rule("Equal", "NotEqual", "ApproximateEqual", attributes="incompatible_shape_error tolerance")
@rule("LeakyRelu", "LeakyReluGrad", attributes="alpha")
@rule("Bucketize", attributes="boundaries")
@rule("FakeQuantWithMinMaxArgs", "FakeQuantWithMinMaxArgsGradient", attributes="min max num_bits narrow_range")
@rule("Angle", "Bitcast")
def elementwise(operation: Operation, index: int, shard: Shard) -> Local | None:
    """The leading input's axis in the output; inputs of length 1 there, or without that axis, stay whole."""
    if operation.output_dtypes[0].name == "variant":  # lists of tensors
        return Local([shard.axis] * len(operation.placements), [shard.axis])
    ranks = [operation.rank(one) for one in range(len(operation.placements))]
    rank = operation.output_rank()
    if rank is None or None in ranks or not _keeps_elements(operation):
        return None
    axis = shard.axis + rank - (ranks[index] or 0)
    cuts: list[Cut] = []
    for other, other_rank in enumerate(ranks):
        other_axis = axis - (rank - (other_rank or 0))
        if other_axis < 0 or operation.length(other, other_axis) == 1:
            cuts.append(None)
        elif _same_length(operation, index, shard, other, other_axis):
            cuts.append(other_axis)
        else:
            return None
    return Local(cuts, [axis])


def _keeps_elements(operation: Operation) -> bool:
    """Whether the output has one element at each place; `Bitcast` may join them, `Equal` may give one for all."""
    if operation.type.endswith("Grad") and len({operation.rank(one) for one in range(len(operation.placements))}) > 1:
        return False  # they do not broadcast, and their kernels compare numbers of elements only
    if operation.type == "Bitcast":
        return operation.input_dtypes[0].size == operation.output_dtypes[0].size
    return operation.type not in ("Equal", "NotEqual") or operation.attribute("incompatible_shape_error")


def _same_length(operation: Operation, index: int, shard: Shard, other: int, axis: int) -> bool:
    """Whether an axis, not of length 1, is surely as long as the leading input's."""
    if operation.is_cut(other, shard, axis):
        return True  # no axis of length 1 is cut
    length = operation.length(other, axis)
    return length is not None and operation.length(index, shard.axis) in (length, None)


@rule("Select")
def select(operation: Operation, index: int, shard: Shard) -> Local | None:
    """`Select` with a condition of the same shape as the values, or a scalar one, or one for each row."""
    ranks = [operation.rank(one) for one in range(3)]
    if None in ranks or ranks[1] != ranks[2] or ranks[0] not in (0, 1, ranks[1]):
        return None
    of_rows = ranks[0] == 1
    del index
    return Local([None if not ranks[0] or (of_rows and shard.axis) else shard.axis] + [shard.axis] * 2, [shard.axis])


_QUANTIZATION = "num_bits narrow_range"


@rule("FakeQuantWithMinMaxVars", attributes=_QUANTIZATION)
def quantized(operation: Operation, index: int, shard: Shard) -> Local | None:
    """With one range for all elements."""
    del operation
    return None if index else Local([shard.axis, None, None], [shard.axis])


@rule("FakeQuantWithMinMaxVarsGradient", attributes=_QUANTIZATION)
def quantized_gradient(operation: Operation, index: int, shard: Shard) -> Local | None:
    """Of the elements; those of the range are sums over all elements."""
    del operation
    return None if index > 1 else Local([shard.axis, shard.axis, None, None], [shard.axis, "sum", "sum"])


@rule("FakeQuantWithMinMaxVarsPerChannel", attributes=_QUANTIZATION)
def quantized_by_channel(operation: Operation, index: int, shard: Shard) -> Local | None:
    """With a range for each entry of the last axis."""
    rank = operation.rank(0)
    if rank is None:
        return None
    axis = rank - 1 if index else shard.axis
    of_range = 0 if axis == rank - 1 else None
    return Local([axis, of_range, of_range], [axis])


@rule("FakeQuantWithMinMaxVarsPerChannelGradient", attributes=_QUANTIZATION)
def quantized_by_channel_gradient(operation: Operation, index: int, shard: Shard) -> Local | None:
    """Along axes other than the last, over which the gradients of the ranges are sums."""
    if index > 1 or operation.rank(0) in (None, shard.axis + 1):
        return None
    return Local([shard.axis, shard.axis, None, None], [shard.axis, "sum", "sum"])
