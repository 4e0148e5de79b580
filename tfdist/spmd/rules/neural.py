"""Layers' operations: convolutions, pooling, normalization, softmax, losses per row."""

from __future__ import annotations

from collections.abc import Sequence

from tfdist.spmd.operation import Operation
from tfdist.spmd.placements import Shard
from tfdist.spmd.rules.registry import Cut, Local, Rule, rule

_CONVOLUTION = "strides padding dilations data_format explicit_paddings use_cudnn_on_gpu"
_POOLING = "ksize strides padding data_format explicit_paddings"


def by_row(inputs: Sequence[Cut], outputs: Sequence[Cut | str], localized: Sequence[int] = ()) -> Rule:
    """The rule of an operation that treats each row of its batch by itself; `localized` inputs are shapes."""

    def local(operation: Operation, index: int, shard: Shard) -> Local | None:
        if shard.axis != 0 or inputs[index] != 0:
            return None
        # A shape that is not known has an entry for the rows all the same.
        return Local(inputs, outputs, localized=dict.fromkeys(localized, 0))

    return local


rule("Conv2D", "Conv3D", "DepthwiseConv2dNative", attributes=_CONVOLUTION)(by_row([0, None], [0]))


@rule("Conv", attributes=f"{_CONVOLUTION} groups batch_dims")
def convolution(operation: Operation, index: int, shard: Shard) -> Local | None:
    """With one batch axis."""
    if index or shard.axis or operation.attribute("batch_dims") != 1:
        return None
    return Local([0, None], [0])


@rule(
    "Conv2DBackpropInput",
    "Conv3DBackpropInputV2",
    "DepthwiseConv2dNativeBackpropInput",
    attributes=_CONVOLUTION,
)
def convolution_gradient(operation: Operation, index: int, shard: Shard) -> Local | None:
    """Of the input, whose shape is given; that of a picture alone says nothing of rows."""
    lengths, rank = operation.input_shapes[0], operation.rank(2)
    if index != 2 or shard.axis or rank is None or lengths != [rank]:
        return None
    return Local([None, None, 0], [0], localized={0: 0})


rule(
    "Conv2DBackpropFilter",
    "Conv3DBackpropFilterV2",
    "DepthwiseConv2dNativeBackpropFilter",
    attributes=_CONVOLUTION,
)(by_row([0, None, 0], ["sum"]))
rule("AvgPool", "AvgPool3D", "MaxPool", "MaxPool3D", attributes=_POOLING)(by_row([0], [0]))
rule("MaxPoolGrad", "MaxPoolGradGrad", "MaxPool3DGrad", "MaxPool3DGradGrad", attributes=_POOLING)(
    by_row([0, 0, 0], [0])
)
rule("MaxPoolV2", attributes="padding data_format")(by_row([0, None, None], [0]))
rule("MaxPoolGradV2", attributes="padding data_format")(by_row([0, 0, 0, None, None], [0]))
rule("AvgPoolGrad", "AvgPool3DGrad", attributes=_POOLING)(by_row([None, 0], [0], localized=[0]))
rule("LRN", attributes="depth_radius bias alpha beta")(by_row([0], [0]))
rule("LRNGrad", attributes="depth_radius bias alpha beta")(by_row([0, 0, 0], [0]))
rule("SparseSoftmaxCrossEntropyWithLogits")(by_row([0, 0], [0, 0]))
rule("InTopK", attributes="k")(by_row([0, 0], [0]))
rule("InTopKV2")(by_row([0, 0, None], [0]))
rule("Dilation2D", attributes="strides rates padding")(by_row([0, None], [0]))
rule("Dilation2DBackpropInput", attributes="strides rates padding")(by_row([0, None, 0], [0]))
rule("Dilation2DBackpropFilter", attributes="strides rates padding")(by_row([0, None, 0], ["sum"]))


_WITH_ARGMAX = "ksize strides padding include_batch_in_index"


@rule("MaxPoolWithArgmax", attributes=_WITH_ARGMAX)
@rule("MaxPoolGradWithArgmax", attributes=_WITH_ARGMAX)
def max_pool_with_argmax(operation: Operation, index: int, shard: Shard) -> Local | None:
    """With places that are counted in each row."""
    del index
    if shard.axis or operation.attribute("include_batch_in_index"):
        return None
    return Local([0] * len(operation.placements), [0] * len(operation.output_shapes))


_NORMALIZATION = "epsilon exponential_avg_factor data_format is_training"


@rule("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3", attributes=_NORMALIZATION)
def batch_normalization(operation: Operation, index: int, shard: Shard) -> Local | None:
    """By given means and variances, not by those of the batch."""
    if index or shard.axis or operation.attribute("is_training"):
        return None
    return Local([0, None, None, None, None], [0] + [None] * (len(operation.output_shapes) - 1))


@rule("FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3", attributes=_NORMALIZATION)
def batch_normalization_gradient(operation: Operation, index: int, shard: Shard) -> Local | None:
    """Of a normalization by given means and variances; of scale and offset, it is a sum over the rows."""
    if index > 1 or shard.axis or operation.attribute("is_training"):
        return None
    return Local([0, 0] + [None] * (len(operation.placements) - 2), [0, "sum", "sum", None, None])


@rule("SoftmaxCrossEntropyWithLogits")
def cross_entropy(operation: Operation, index: int, shard: Shard) -> Local | None:
    """Of rows of logits and as many rows of targets; one row, or one column, of either is broadcast."""
    del index
    if shard.axis or operation.rank(0) != 2 or operation.rank(1) != 2:
        return None
    if operation.length(0, 0) != operation.length(1, 0):
        return None
    return Local([0, 0], [0, 0])


@rule("BiasAdd", attributes="data_format")
def bias_add(operation: Operation, index: int, shard: Shard) -> Local | None:
    """Along any axis but that of the features."""
    if index != 0 or _features(operation, 0) in (None, shard.axis):
        return None
    return Local([shard.axis, None], [shard.axis])


@rule("BiasAddV1")
def bias_add_last(operation: Operation, index: int, shard: Shard) -> Local | None:
    """Along any axis but the last."""
    return (
        None if index != 0 or operation.rank(0) in (None, shard.axis + 1) else Local([shard.axis, None], [shard.axis])
    )


@rule("BiasAddGrad", attributes="data_format")
def bias_add_gradient(operation: Operation, index: int, shard: Shard) -> Local | None:
    """The sum over all axes but that of the features."""
    return None if _features(operation, index) in (None, shard.axis) else Local([shard.axis], ["sum"])


def _features(operation: Operation, index: int) -> int | None:
    rank = operation.rank(index)
    if operation.attribute("data_format") == "NCHW":
        return 1
    return None if rank is None else rank - 1


@rule("Softmax", "LogSoftmax")
def softmax(operation: Operation, index: int, shard: Shard) -> Local | None:
    """Along the last axis."""
    return None if operation.rank(index) in (None, shard.axis + 1) else Local([shard.axis], [shard.axis])
