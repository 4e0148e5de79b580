"""Layers' operations: convolutions, pooling, softmax, losses per row, resized pictures."""

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


rule("Conv", "Conv2D", "Conv3D", "DepthwiseConv2dNative", attributes=_CONVOLUTION)(by_row([0, None], [0]))
rule(
    "Conv2DBackpropInput",
    "Conv3DBackpropInputV2",
    "DepthwiseConv2dNativeBackpropInput",
    attributes=_CONVOLUTION,
)(by_row([None, None, 0], [0], localized=[0]))
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
rule("AvgPoolGrad", "AvgPool3DGrad", attributes=_POOLING)(by_row([None, 0], [0], localized=[0]))
rule("LRN", attributes="depth_radius bias alpha beta")(by_row([0], [0]))
rule("LRNGrad", attributes="depth_radius bias alpha beta")(by_row([0, 0, 0], [0]))
rule("SparseSoftmaxCrossEntropyWithLogits", "SoftmaxCrossEntropyWithLogits")(by_row([0, 0], [0, 0]))
rule("InTopK", attributes="k")(by_row([0, 0], [0]))
rule("InTopKV2")(by_row([0, 0, None], [0]))
rule(
    "ResizeBilinear",
    "ResizeBicubic",
    "ResizeArea",
    "ResizeNearestNeighbor",
    attributes="align_corners half_pixel_centers",
)(by_row([0, None], [0]))
rule("ResizeBilinearGrad", "ResizeBicubicGrad", attributes="align_corners half_pixel_centers")(by_row([0, 0], [0]))
rule("ResizeNearestNeighborGrad", attributes="align_corners half_pixel_centers")(by_row([0, None], [0]))
rule("DepthToSpace", "SpaceToDepth", attributes="block_size data_format")(by_row([0], [0]))


@rule("BiasAdd", attributes="data_format")
def bias_add(operation: Operation, index: int, shard: Shard) -> Local | None:
    """Along any axis but that of the features."""
    if index != 0 or shard.axis == _features(operation, 0):
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
    return None if shard.axis == _features(operation, index) else Local([shard.axis], ["sum"])


def _features(operation: Operation, index: int) -> int:
    rank = operation.rank(index)
    if operation.attribute("data_format") == "NCHW":
        return 1
    return -1 if rank is None else rank - 1


@rule("Softmax", "LogSoftmax")
def softmax(operation: Operation, index: int, shard: Shard) -> Local | None:
    """Along the last axis."""
    return None if operation.rank(index) in (None, shard.axis + 1) else Local([shard.axis], [shard.axis])
