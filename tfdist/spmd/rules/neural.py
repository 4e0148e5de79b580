"""Rules for operations of layers and on images `[batch, height, width, channels]`.

A batch normalization whose option asks for the statistics of each replica's examples is traced as calls of functions,
which each replica calls on its shard. It is the only part of a step that differs from that of one device:

    moments(x)                      the mean over the replicas of the moments of their shards
    normalized(x, gamma, beta)      each shard normalized by its own moments
    gradient(x, gamma, upstream)    the gradient of each shard, and the sums over the replicas for gamma and beta
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist.spmd.placements import Shard
from tfdist.spmd.rules.linear_algebra import along_batch
from tfdist.spmd.rules.registry import Operation, OpSharding, Rule, Sharding, rule

PER_REPLICA_PREFIX = "tfdist_per_replica_"  # of the names of the functions
_PER_REPLICA = {
    "moments": OpSharding([0], ["sum", "sum"], mean=True),
    "normalized": OpSharding([0, None, None], [0]),
    "gradient": OpSharding([0, None, 0], [0, "sum", "sum"]),
}


def per_replica_sharding(operation: tf.Operation) -> OpSharding | None:
    """The sharding of a call that each replica makes on its rows; `None` for all other operations."""
    if operation.type not in ("PartitionedCall", "StatefulPartitionedCall"):
        return None
    called = operation.get_attr("f").name
    return next((sharding for name, sharding in _PER_REPLICA.items() if f"{PER_REPLICA_PREFIX}{name}_" in called), None)


def by_row(inputs: Sequence[Sharding], outputs: Sequence[Sharding | str], localized: Sequence[int] = ()) -> Rule:
    """The rule of an operation that processes each row of its batch independently; `localized` inputs are shapes."""

    def sharding(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
        if shard.axis != 0 or inputs[index] != 0:
            return None
        # The first entry of a shape is the number of rows, even if the shape is unknown.
        return OpSharding(inputs, outputs, localized=dict.fromkeys(localized, 0))

    return sharding


_CONVOLUTION = "strides padding dilations data_format explicit_paddings use_cudnn_on_gpu"
_POOLING = "ksize strides padding data_format explicit_paddings"
_RESIZING = "align_corners half_pixel_centers"

rule("Conv2D", "Conv3D", "DepthwiseConv2dNative", attributes=_CONVOLUTION)(by_row([0, None], [0]))
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

rule("ResizeBilinear", "ResizeBicubic", "ResizeArea", "ResizeNearestNeighbor", attributes=_RESIZING)(
    by_row([0, None], [0])
)
rule("ResizeBilinearGrad", "ResizeBicubicGrad", attributes=_RESIZING)(by_row([0, 0], [0]))
rule("ResizeNearestNeighborGrad", attributes=_RESIZING)(by_row([0, None], [0]))
rule("ScaleAndTranslate", attributes="kernel_type antialias")(by_row([0, None, None, None], [0]))
rule("ScaleAndTranslateGrad", attributes="kernel_type antialias")(by_row([0, 0, None, None], [0]))
rule("DepthToSpace", "SpaceToDepth", attributes="block_size data_format")(by_row([0], [0]))
rule("ExtractImagePatches", attributes="ksizes strides rates padding")(by_row([0], [0]))
rule("ExtractVolumePatches", attributes="ksizes strides padding")(by_row([0], [0]))
rule("DrawBoundingBoxes")(by_row([0, 0], [0]))
rule("DrawBoundingBoxesV2")(by_row([0, 0, None], [0]))
# The boxes are sharded; the images, which the boxes refer to by index, are whole.
rule("CropAndResize", attributes="method extrapolation_value")(by_row([None, 0, 0, None], [0]))
rule("CropAndResizeGradImage", attributes="method")(by_row([0, 0, 0, None], ["sum"]))
rule("CropAndResizeGradBoxes", attributes="method")(by_row([0, None, 0, 0], [0]))
rule("RGBToHSV", "HSVToRGB", "AdjustHue", "AdjustSaturation")(along_batch(1))
rule("AdjustContrastv2")(along_batch(3))


@rule("Conv", attributes=f"{_CONVOLUTION} groups batch_dims")
def convolution(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """With one batch axis."""
    if index or shard.axis or operation.attribute("batch_dims") != 1:
        return None
    return OpSharding([0, None], [0])


@rule(
    "Conv2DBackpropInput",
    "Conv3DBackpropInputV2",
    "DepthwiseConv2dNativeBackpropInput",
    attributes=_CONVOLUTION,
)
def convolution_gradient(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """The shape of the input is given; it must include the batch, and not only height and width."""
    lengths, rank = operation.input_shapes[0], operation.rank(2)
    if index != 2 or shard.axis or rank is None or lengths != [rank]:
        return None
    return OpSharding([None, None, 0], [0], localized={0: 0})


_WITH_ARGMAX = "ksize strides padding include_batch_in_index"


@rule("MaxPoolWithArgmax", attributes=_WITH_ARGMAX)
@rule("MaxPoolGradWithArgmax", attributes=_WITH_ARGMAX)
def max_pool_with_argmax(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """The returned positions must count within each row."""
    if shard.axis or operation.attribute("include_batch_in_index"):
        return None
    return OpSharding([0] * len(operation.placements), [0] * len(operation.output_shapes))


_NORMALIZATION = "epsilon exponential_avg_factor data_format is_training"


@rule("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3", attributes=_NORMALIZATION)
def batch_normalization(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """In inference, with given means and variances."""
    if index or shard.axis or operation.attribute("is_training"):
        return None
    return OpSharding([0, None, None, None, None], [0] + [None] * (len(operation.output_shapes) - 1))


@rule("FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3", attributes=_NORMALIZATION)
def batch_normalization_gradient(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """In inference; the gradients of scale and offset are sums over the rows."""
    if index > 1 or shard.axis or operation.attribute("is_training"):
        return None
    return OpSharding([0, 0] + [None] * (len(operation.placements) - 2), [0, "sum", "sum", None, None])


@rule("SoftmaxCrossEntropyWithLogits")
def cross_entropy(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """Logits and targets must have the same number of rows, because a single row of either would be broadcast."""
    if shard.axis or operation.rank(0) != 2 or operation.rank(1) != 2:
        return None
    if operation.length(0, 0) != operation.length(1, 0):
        return None
    return OpSharding([0, 0], [0, 0])


@rule("BiasAdd", attributes="data_format")
def bias_add(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """Shards any axis but that of the channels."""
    if index != 0 or _channels(operation, 0) in (None, shard.axis):
        return None
    return OpSharding([shard.axis, None], [shard.axis])


@rule("BiasAddGrad", attributes="data_format")
def bias_add_gradient(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """The sum over all axes but that of the channels."""
    return None if _channels(operation, index) in (None, shard.axis) else OpSharding([shard.axis], ["sum"])


def _channels(operation: Operation, index: int) -> int | None:
    rank = operation.rank(index)
    if operation.attribute("data_format") == "NCHW":
        return 1
    return None if rank is None else rank - 1


@rule("ImageProjectiveTransformV2", "ImageProjectiveTransformV3", attributes="interpolation fill_mode")
def projective_transform(operation: Operation, index: int, shard: Shard) -> OpSharding | None:
    """With one transformation per image, or one for all."""
    count = operation.length(1, 0)
    if index > 1 or shard.axis != 0 or (count is None and not operation.is_sharded(1, shard, 0)):
        return None
    others = [None] * (len(operation.placements) - 2)
    return OpSharding([0, None if count == 1 else 0, *others], [0])
