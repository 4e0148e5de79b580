"""Helpers of the models: refused datasets, scaled widths, and images of any size."""

from __future__ import annotations

from typing import Any

import keras

from tfdist.data.spec import DataSpec
from tfdist.errors import UsageError


def require_images(model: str, spec: DataSpec, smallest: int = 1) -> None:
    """Refuses examples that are not images `[H, W, C]`, or have a side below `smallest` pixels.

    Raises:
        UsageError: the examples do not fit.
    """
    if len(spec.input_shape) != 3:
        raise UsageError(
            f"The model `{model}` takes images `(height, width, channels)`, dataset `{spec.name}` has "
            f"examples of shape `{spec.input_shape}`",
            "use `--model mlp`, which takes any shape",
        )
    if min(spec.input_shape[:2]) < smallest:
        raise UsageError(
            f"The model `{model}` takes images of {smallest}x{smallest} pixels or more, dataset `{spec.name}` has "
            f"examples of shape `{spec.input_shape}`",
            "use `--model cnn`, which takes small images",
        )


def scaled(units: int, width: float) -> int:
    """`units` times `width`, rounded, and at least one."""
    return max(1, round(units * width))


def padding(spec: DataSpec, kernel: int) -> str:
    """The padding for Keras: "valid" if that leaves at least one pixel, else "same".

    Args:
        spec: the spec of the dataset.
        kernel: the side of the kernels of two convolutions, each followed by a pooling of 2x2.
    """
    side = min(spec.input_shape[:2])
    for _ in range(2):
        side = (side - kernel + 1) // 2
    return "valid" if side >= 1 else "same"


def padded(image: Any, multiple: int) -> Any:
    """`image` `[B, H, W, C]` with zeros at the bottom and the right, until both sides are multiples of `multiple`."""
    bottom, right = (-size % multiple for size in image.shape[1:3])
    return keras.layers.ZeroPadding2D(((0, bottom), (0, right)), name="padded")(image) if bottom or right else image


def cropped(image: Any, spec: DataSpec) -> Any:
    """`image` `[B, H', W', C]` without the padding of `padded`: as high and wide as the examples."""
    bottom, right = (size - own for size, own in zip(image.shape[1:3], spec.input_shape, strict=False))
    if not (bottom or right):
        return image
    return keras.layers.Cropping2D(((0, bottom), (0, right)), dtype="float32", name="cropped")(image)
