"""Operations on pictures `[batch, height, width, channels]`, which treat each picture, or each pixel, by itself."""

from __future__ import annotations

from tfdist.spmd.operation import Operation
from tfdist.spmd.placements import Shard
from tfdist.spmd.rules.matrices import along_batch
from tfdist.spmd.rules.neural import by_row
from tfdist.spmd.rules.registry import Local, rule

_RESIZING = "align_corners half_pixel_centers"

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
# The boxes of pictures are cut; the pictures that they name are whole.
rule("CropAndResize", attributes="method extrapolation_value")(by_row([None, 0, 0, None], [0]))
rule("CropAndResizeGradImage", attributes="method")(by_row([0, 0, 0, None], ["sum"]))
rule("CropAndResizeGradBoxes", attributes="method")(by_row([0, None, 0, 0], [0]))
rule("RGBToHSV", "HSVToRGB", "AdjustHue", "AdjustSaturation")(along_batch(1))
rule("AdjustContrastv2")(along_batch(3))


@rule("ImageProjectiveTransformV2", "ImageProjectiveTransformV3", attributes="interpolation fill_mode")
def projective_transform(operation: Operation, index: int, shard: Shard) -> Local | None:
    """By a transformation for each picture, or by one for all."""
    count = operation.length(1, 0)
    if index > 1 or shard.axis != 0 or (count is None and not operation.is_cut(1, shard, 0)):
        return None
    rest = [None] * (len(operation.placements) - 2)
    return Local([0, None if count == 1 else 0, *rest], [0])
