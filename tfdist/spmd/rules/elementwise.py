"""Rules for elementwise operations with broadcasting, among them operations on strings."""

from __future__ import annotations

from tfdist.spmd.placements import Shard
from tfdist.spmd.rules.registry import Operation, OpSharding, Sharding, rule

_UNARY = """
    Abs Acos Acosh Asin Asinh Atan Atanh BesselI0 BesselI0e BesselI1 BesselI1e BesselJ0 BesselJ1 BesselK0
    BesselK0e BesselK1 BesselK1e BesselY0 BesselY1 Ceil ComplexAbs Conj Cos Cosh Dawsn Digamma Elu Erf Erfc
    Erfinv Exp Expint Expm1 Floor FresnelCos FresnelSin Imag Inv Invert IsFinite IsInf IsNan Lgamma Log Log1p
    LogicalNot Ndtri Neg OnesLike PopulationCount Real Reciprocal Relu Relu6 Rint Round Rsqrt Selu Sigmoid Sign
    Sin Sinh Softplus Softsign Spence Sqrt Square Tan Tanh ZerosLike
"""
_OF_SEVERAL_INPUTS = """
    Add AddN AddV2 Atan2 Betainc BitwiseAnd BitwiseOr BitwiseXor ClipByValue Complex Div DivNoNan EluGrad
    FloorDiv FloorMod Greater GreaterEqual Igamma Igammac IgammaGradA InvGrad LeftShift Less LessEqual
    LogicalAnd LogicalOr Maximum Minimum Mod Mul MulNoNan NextAfter Polygamma Pow RandomGammaGrad RealDiv ReciprocalGrad
    Relu6Grad ReluGrad RightShift RsqrtGrad SelectV2 SeluGrad SigmoidGrad SoftplusGrad SoftsignGrad SqrtGrad
    SquaredDifference Sub TanhGrad TruncateDiv TruncateMod Xdivy Xlog1py Xlogy Zeta
"""


@rule(*_UNARY.split(), *_OF_SEVERAL_INPUTS.split(), attributes="N")
@rule("Cast", attributes="Truncate")
@rule("CheckNumerics", attributes="message")
@rule("CheckNumericsV2", attributes="message")
@rule("Equal", "NotEqual", "ApproximateEqual", attributes="incompatible_shape_error tolerance")
@rule("LeakyRelu", "LeakyReluGrad", attributes="alpha")
@rule("Bucketize", attributes="boundaries")
@rule("FakeQuantWithMinMaxArgs", "FakeQuantWithMinMaxArgsGradient", attributes="min max num_bits narrow_range")
@rule("Angle", "Bitcast")
@rule("StringStrip", "StringToNumber", "RegexFullMatch", "DecodeBase64")
@rule("StringLower", "StringUpper", attributes="encoding")
@rule("StringLength", "Substr", attributes="unit")
@rule("StringToHashBucket", "StringToHashBucketFast", attributes="num_buckets")
@rule("StringToHashBucketStrong", attributes="num_buckets key")
@rule("StaticRegexFullMatch", attributes="pattern")
@rule("StaticRegexReplace", attributes="pattern rewrite replace_global")
@rule("RegexReplace", attributes="replace_global")
@rule("StringJoin", attributes="N separator")
@rule("EncodeBase64", attributes="pad")
@rule("AsString", attributes="precision scientific shortest width fill")
@rule(
    "UnicodeTranscode", attributes="input_encoding output_encoding errors replacement_char replace_control_characters"
)
def elementwise(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """Shards all inputs along the leading input's axis; those of length 1 there, or without the axis, stay whole."""
    if operation.output_dtypes[0].name == "variant":  # lists of tensors
        return OpSharding([shard.axis] * len(operation.placements), [shard.axis])
    ranks = [operation.rank(n) for n in range(len(operation.placements))]
    rank = operation.output_rank()
    if rank is None or None in ranks or not _keeps_elements(operation):
        return None
    axis = shard.axis + rank - (ranks[index] or 0)
    shardings: list[Sharding] = []
    for other, other_rank in enumerate(ranks):
        other_axis = axis - (rank - (other_rank or 0))
        if other_axis < 0 or operation.length(other, other_axis) == 1:
            shardings.append(None)
        elif _same_length(operation, index, shard, other, other_axis):
            shardings.append(other_axis)
        else:
            return None
    return OpSharding(shardings, [axis])


def _keeps_elements(operation: Operation) -> bool:
    """Whether the output has one element per position; `Bitcast` may merge some, and `Equal` may return a scalar."""
    if operation.type.endswith("Grad") and len({operation.rank(n) for n in range(len(operation.placements))}) > 1:
        return False  # these do not broadcast, and their kernels compare only the numbers of elements
    if operation.type == "Bitcast":
        return operation.input_dtypes[0].size == operation.output_dtypes[0].size
    return operation.type not in ("Equal", "NotEqual") or operation.attribute("incompatible_shape_error")


def _same_length(operation: Operation, index: int, shard: Shard, other: int, axis: int) -> bool:
    """Whether an axis whose length is not 1 is known to be as long as the leading input's."""
    if operation.is_sharded(other, shard, axis):
        return True  # an axis of length 1 is never sharded
    length = operation.length(other, axis)
    return length is not None and operation.length(index, shard.axis) in (length, None)


@rule("LookupTableFindV2")
def look_up(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """Shards the keys, if keys and values are scalars."""
    if index != 1 or operation.rank(1) is None or operation.rank(1) != operation.output_rank():
        return None
    return OpSharding([None, shard.axis, None], [shard.axis])


@rule("Select")
def select(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """The condition has the shape of the values, or is a scalar, or has one entry per row."""
    ranks = [operation.rank(n) for n in range(3)]
    if None in ranks or ranks[1] != ranks[2] or ranks[0] not in (0, 1, ranks[1]):
        return None
    whole_condition = not ranks[0] or (ranks[0] == 1 and shard.axis)
    return OpSharding([None if whole_condition else shard.axis] + [shard.axis] * 2, [shard.axis])


_QUANTIZATION = "num_bits narrow_range"


@rule("FakeQuantWithMinMaxVars", attributes=_QUANTIZATION)
def quantized(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """All elements have the same range."""
    return None if index else OpSharding([shard.axis, None, None], [shard.axis])


@rule("FakeQuantWithMinMaxVarsGradient", attributes=_QUANTIZATION)
def quantized_gradient(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """The gradients of the range are sums over all elements."""
    return None if index > 1 else OpSharding([shard.axis, shard.axis, None, None], [shard.axis, "sum", "sum"])


@rule("FakeQuantWithMinMaxVarsPerChannel", attributes=_QUANTIZATION)
def quantized_by_channel(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """Each entry of the last axis has a range."""
    rank = operation.rank(0)
    if rank is None:
        return None
    axis = rank - 1 if index else shard.axis
    range_axis = 0 if axis == rank - 1 else None
    return OpSharding([axis, range_axis, range_axis], [axis])


@rule("FakeQuantWithMinMaxVarsPerChannelGradient", attributes=_QUANTIZATION)
def quantized_by_channel_gradient(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """Shards any axis but the last; the gradients of the ranges are sums over it."""
    if index > 1 or operation.rank(0) in (None, shard.axis + 1):
        return None
    return OpSharding([shard.axis, shard.axis, None, None], [shard.axis, "sum", "sum"])
