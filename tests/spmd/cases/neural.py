"""Layers' operations."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.spmd.one_operation import Case, real, whole

_SAME = {"strides": [1, 1, 1, 1], "padding": "SAME"}
_FORMATS: list[dict[str, Any]] = [
    _SAME,
    {"strides": [1, 2, 2, 1], "padding": "VALID"},
    {"strides": [1, 2, 1, 1], "padding": "EXPLICIT", "explicit_paddings": [0, 0, 1, 2, 0, 1, 0, 0]},
    {"strides": [1, 1, 1, 1], "padding": "VALID", "dilations": [1, 2, 2, 1]},
]


def _window(length: int, side: int, stride: int, dilation: int, padding: str, explicit: list[int]) -> int:
    reach = (side - 1) * dilation + 1
    if padding == "SAME":
        return -(-length // stride)
    return (length + sum(explicit) - reach) // stride + 1


def _convolutions() -> list[Case]:
    found = []
    for attributes in _FORMATS:
        explicit = attributes.get("explicit_paddings", [0] * 8)
        height, width = (
            _window(6, 3, attributes["strides"][axis], attributes.get("dilations", [1] * 4)[axis],
                    attributes["padding"], explicit[2 * axis : 2 * axis + 2])
            for axis in (1, 2)
        )  # fmt: skip
        gradient = real(7, height, width, 2)
        images, weights = real(7, 6, 6, 3), real(3, 3, 3, 2)
        found += [
            Case("Conv2D", (images, weights), "0 -", attributes),
        ]
        if "dilations" not in attributes:  # CPUs do not compute it
            found += [
                Case("Conv2DBackpropInput", ([7, 6, 6, 3], weights, gradient), "- 0", attributes),
                Case("Conv2DBackpropFilter", (images, [3, 3, 3, 2], gradient), "0 0", attributes),
            ]
        if attributes["strides"][1] == attributes["strides"][2] and "dilations" not in attributes:
            deep = real(7, height, width, 6)
            found += [
                Case("DepthwiseConv2dNative", (images, weights), "0 -", attributes),
                Case("DepthwiseConv2dNativeBackpropInput", ([7, 6, 6, 3], weights, deep), "- 0", attributes),
                Case("DepthwiseConv2dNativeBackpropFilter", (images, [3, 3, 3, 2], deep), "0 0", attributes),
            ]
    volume = {"strides": [1, 1, 2, 1, 1], "padding": "SAME"}
    return [
        *found,
        Case("Conv2D", (real(7, 7, 7, 7), real(3, 3, 7, 2)), "0 -", _SAME),
        Case("Conv2DBackpropInput", ([6, 6], real(3, 3, 3, 2), real(7, 6, 6, 2)), "", _SAME),
        Case(
            "Conv2DBackpropFilter",
            (real(7, 6, 6, 3, dtype=np.float16), [3, 3, 3, 2], real(7, 6, 6, 2, dtype=np.float16)),
            "0 0",
            _SAME,
            digits=0.1,  # on one device the sums are made in half precision
        ),
        Case("Conv3D", (real(7, 2, 4, 3, 2), real(2, 2, 2, 2, 3)), "0 -", volume),
        Case("Conv3DBackpropInputV2", ([7, 2, 4, 3, 2], real(2, 2, 2, 2, 3), real(7, 2, 2, 3, 3)), "- 0", volume),
        Case("Conv3DBackpropFilterV2", (real(7, 2, 4, 3, 2), [2, 2, 2, 2, 3], real(7, 2, 2, 3, 3)), "0 0", volume),
        Case("Conv", (real(7, 6, 6, 3), real(3, 3, 3, 2)), "0 -", _SAME),
        Case("Dilation2D", (real(7, 6, 6, 3), real(2, 2, 3)), "0 -", _SAME | {"rates": [1, 2, 2, 1]}),
        Case(
            "Dilation2DBackpropInput",
            (real(7, 6, 6, 3), real(2, 2, 3), real(7, 6, 6, 3)),
            "0 - 0",
            _SAME | {"rates": [1] * 4},
        ),
        Case(
            "Dilation2DBackpropFilter",
            (real(7, 6, 6, 3), real(2, 2, 3), real(7, 6, 6, 3)),
            "0 - 0",
            _SAME | {"rates": [1] * 4},
        ),
    ]


def _pooling() -> list[Case]:
    flat = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "VALID"}
    deep = {"ksize": [1, 2, 2, 2, 1], "strides": [1, 1, 2, 1, 1], "padding": "SAME"}
    images, small = real(7, 6, 6, 3), real(7, 3, 3, 3)
    volumes = real(7, 2, 4, 3, 2, dtype=np.float32)
    halved = real(7, 2, 2, 3, 2, dtype=np.float32)
    channels = {"ksize": [1, 1, 1, 3], "strides": [1, 1, 1, 3], "padding": "VALID"}
    explicit = flat | {"padding": "EXPLICIT", "explicit_paddings": [0, 0, 1, 1, 0, 0, 0, 0]}
    return [
        Case("AvgPool", (images,), "0", flat),
        Case("AvgPool", (images,), "0", flat | {"padding": "SAME", "ksize": [1, 3, 3, 1]}),
        Case("AvgPoolGrad", ([7, 6, 6, 3], small), "0", flat),
        Case("MaxPool", (images,), "0", flat),
        Case("MaxPool", (images,), "0", channels),
        Case("MaxPool", (images,), "0", explicit),
        Case("MaxPoolGrad", (images, small, small), "", flat),
        Case("MaxPoolGradGrad", (images, small, images), "", flat),
        Case("MaxPoolV2", (images, [1, 2, 2, 1], [1, 2, 2, 1]), "0", {"padding": "VALID"}),
        Case("MaxPoolGradV2", (images, small, small, [1, 2, 2, 1], [1, 2, 2, 1]), "", {"padding": "VALID"}),
        Case("MaxPoolWithArgmax", (images,), "0", flat),
        Case("MaxPoolWithArgmax", (images,), "-", flat | {"include_batch_in_index": True}),
        Case("MaxPoolGradWithArgmax", (images, small, whole(0, 108, 7, 3, 3, 3, dtype=np.int64)), "", flat),
        Case("MaxPool3DGrad", (volumes, halved, halved), "", deep),
        Case("MaxPool3DGradGrad", (volumes, halved, volumes), "", deep),
        Case("AvgPool3D", (volumes,), "0", deep),
        Case("AvgPool3DGrad", ([7, 2, 4, 3, 2], halved), "0", deep),
        Case("MaxPool3D", (volumes,), "0", deep),
        Case(
            "ExtractImagePatches",
            (images,),
            "0",
            {"ksizes": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "rates": [1, 1, 1, 1], "padding": "SAME"},
        ),
        Case(
            "ExtractVolumePatches",
            (volumes,),
            "0",
            {"ksizes": [1, 2, 2, 2, 1], "strides": [1, 1, 1, 1, 1], "padding": "SAME"},
        ),
        Case("LRN", (real(7, 2, 2, 7, dtype=np.float32),), "0", {"depth_radius": 2}),
        Case("LRNGrad", tuple(real(7, 2, 2, 7, dtype=np.float32) for _ in range(3)), "", {"depth_radius": 2}),
    ]


def _losses() -> list[Case]:
    return [
        Case("SparseSoftmaxCrossEntropyWithLogits", (real(7, 5), whole(0, 5, 7)), "0 0"),
        Case("SparseSoftmaxCrossEntropyWithLogits", (real(7, 14, dtype=np.float16), whole(0, 5, 7)), "0 0"),
        Case("SoftmaxCrossEntropyWithLogits", (real(7, 5), real(7, 5)), "0 0"),
        Case("SoftmaxCrossEntropyWithLogits", (real(7, 5), real(1, 5)), "- -"),
        Case("SoftmaxCrossEntropyWithLogits", (real(14, 7), real(14, 1)), "0 0"),
        Case("SoftmaxCrossEntropyWithLogits", (real(7, 5), real()), "- -"),
        Case("InTopK", (real(7, 5, dtype=np.float32), whole(0, 5, 7)), "0 0", {"k": 2}),
        Case("InTopKV2", (real(7, 5, dtype=np.float32), whole(0, 5, 7), 2), "0 0"),
        Case("BiasAdd", (real(7, 14, 7), real(7)), "01 -"),
        Case("BiasAdd", (real(7, 7, 14), real(7)), "02 -", {"data_format": "NCHW"}),
        Case("BiasAddV1", (real(7, 14, 7), real(7)), "01 -"),
        Case("BiasAddGrad", (real(7, 14, 7),), "01"),
        Case("BiasAddGrad", (real(7, 7, 14),), "02", {"data_format": "NCHW"}),
        Case("BiasAddGrad", (real(70, 2, dtype=np.float16) * 50,), "0"),
        Case("DepthToSpace", (real(7, 2, 2, 8),), "0", {"block_size": 2}),
        Case("SpaceToDepth", (real(7, 4, 4, 3),), "0", {"block_size": 2}),
    ]


def _normalization() -> list[Case]:
    def given(*shape: int) -> np.ndarray:
        return real(*shape, dtype=np.float32)

    row = (given(3), given(3), given(3), abs(given(3)) + 1)
    found = []
    for kind, gradient in (
        ("FusedBatchNorm", "FusedBatchNormGrad"),
        ("FusedBatchNormV2", "FusedBatchNormGradV2"),
        ("FusedBatchNormV3", "FusedBatchNormGradV3"),
    ):
        kept = (given(3), given(3), abs(given(3)) + 1, *([np.zeros(3, np.float32)] if kind.endswith("V3") else []))
        rest = " -" * len(kept)
        for training, local in ((False, "0"), (True, "-")):
            attributes = {"is_training": training}
            given_to = (given(7, 2, 2, 3), given(7, 2, 2, 3))
            found.append(Case(kind, (given(7, 2, 2, 3), *row), f"{local} - - - -", attributes, digits=1e-5))
            found.append(Case(gradient, (*given_to, *kept), f"{local} {local}{rest}", attributes, digits=1e-5))
    return found


CASES = [*_convolutions(), *_pooling(), *_losses(), *_normalization()]
