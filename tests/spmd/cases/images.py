"""Operations on pictures."""

from __future__ import annotations

import numpy as np

from tests.spmd.one_operation import Case, between, real, whole


def _unit(*shape: int) -> np.ndarray:
    return between(0, 1, *shape, dtype=np.float32)


def _resized() -> list[Case]:
    found = []
    for attributes in ({}, {"align_corners": True}, {"half_pixel_centers": True}):
        found += [
            Case("ResizeBilinear", (real(7, 4, 4, 3), [6, 3]), "0", attributes),
            Case("ResizeBicubic", (real(7, 4, 4, 3), [6, 3]), "0", attributes),
            Case("ResizeNearestNeighbor", (real(7, 4, 4, 3), [6, 3]), "0", attributes),
            Case("ResizeBilinearGrad", (_unit(7, 6, 3, 3), real(7, 4, 4, 3)), "", attributes),
            Case("ResizeBicubicGrad", (_unit(7, 6, 3, 3), real(7, 4, 4, 3)), "", attributes),
            Case("ResizeNearestNeighborGrad", (real(7, 6, 3, 3), [4, 4]), "0", attributes),
        ]
    return [
        *found,
        Case("ResizeArea", (real(7, 4, 4, 3), [6, 3]), "0"),
        Case("ScaleAndTranslate", (real(7, 4, 4, 3), [5, 5], [1.5, 1.2], [0.1, 0.2]), "0"),
        Case("ScaleAndTranslateGrad", (_unit(7, 5, 5, 3), _unit(7, 4, 4, 3), [1.5, 1.2], [0.1, 0.2]), ""),
    ]


def _changed() -> list[Case]:
    affine = np.array([[1.0, 0.1, 0.2, 0.0, 1.1, 0.3, 0.0, 0.0]], np.float32)
    per_row = affine + 0.1 * _unit(7, 8)
    crop = ([3, 3],)
    boxes, rows = _unit(14, 4), whole(0, 7, 14)
    return [
        Case(
            "ImageProjectiveTransformV3", (real(7, 4, 4, 3), per_row, [4, 4], 0.5), "0 0", {"interpolation": "BILINEAR"}
        ),
        Case(
            "ImageProjectiveTransformV3", (real(7, 4, 4, 3), affine, [5, 4], 0.5), "0 -", {"interpolation": "NEAREST"}
        ),
        Case("ImageProjectiveTransformV2", (real(7, 4, 4, 3), per_row, [4, 4]), "0 0", {"interpolation": "BILINEAR"}),
        Case("AdjustContrastv2", (real(7, 7, 4, 4, 3, dtype=np.float32), 1.5), "01"),
        Case("AdjustContrastv2", (real(7, 14, 3, dtype=np.float32), 1.5), "-"),
        Case("AdjustHue", (_unit(7, 14, 7, 3), 0.2), "012"),
        Case("AdjustSaturation", (_unit(7, 14, 7, 3), 0.2), "012"),
        Case("RGBToHSV", (_unit(7, 14, 3),), "01"),
        Case("HSVToRGB", (_unit(7, 14, 3),), "01"),
        Case("CropAndResize", (real(7, 4, 4, 3), boxes, rows, *crop), "- 0 0"),
        Case("CropAndResizeGradImage", (_unit(14, 3, 3, 3), boxes, rows, [7, 4, 4, 3]), "0 0 0", {"T": np.float64}),
        Case("CropAndResizeGradBoxes", (_unit(14, 3, 3, 3), real(7, 4, 4, 3), boxes, rows), "0 - 0 0"),
        Case("DrawBoundingBoxes", (_unit(7, 6, 6, 3), _unit(7, 2, 4)), "0 0"),
        Case("DrawBoundingBoxesV2", (_unit(7, 6, 6, 3), _unit(7, 2, 4), [[0.5, 0.2, 0.3]]), "0 0"),
    ]


CASES = [*_resized(), *_changed()]
