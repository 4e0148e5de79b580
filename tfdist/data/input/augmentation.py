"""Augmentation: random crops and flips whose random numbers depend on (seed, epoch, example) only.

The random numbers of an epoch form a table with one row per example; the rows of a very large table are computed when
they are used. So an example is augmented in the same way on any replica, in any batch, and after a run is resumed. The
functions work on batches in a graph: on the device for arrays in memory, in the input pipeline for files.

Synopsis:

    >>> np.array_equal(table(5, 3, seed=1, epoch=0), table(9, 3, seed=1, epoch=0)[:5])
    True
    >>> parse("crop_flip").draws
    3
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdist.data.input import order
from tfdist.data.spec import DataSpec
from tfdist.errors import UnknownNameError

if TYPE_CHECKING:
    import tensorflow as tf

_STREAM = 1  # [seed, epoch, 1] seeds the augmentation of an epoch, and [seed, epoch] its order

# The fraction of the area, and the ratio of width to height, of a crop: Szegedy and others, Going Deeper with
# Convolutions, CVPR 2015.
CROPPED_AREA = (0.08, 1.0)
CROPPED_RATIO = (3 / 4, 4 / 3)
# With masks, a crop keeps a larger part of the picture, because the labels of pixels depend on their surroundings.
CROPPED_AREA_OF_MASKS = (0.25, 1.0)


@dataclass(frozen=True)
class Augmentation:
    """A random transformation of examples.

    Attributes:
        name: the name that users type.
        draws: the number of random numbers per example.
    """

    name: str
    draws: int
    _apply: Callable[..., Any]

    def __call__(self, spec: DataSpec, data: tuple[Any, Any], draws: tf.Tensor) -> tuple[Any, Any]:
        """The transformed examples (x, y); masks are transformed with their pictures.

        Args:
            spec: the spec of the dataset.
            data: x float32 `[b, H, W, C]` and y int32 `[b]`, `[b, H, W]` or, for autoencoding, x again.
            draws: float32 `[b, self.draws]` in [0, 1).
        """
        x, y = data
        if spec.task == "segmentation":
            return self._apply(x, y, draws)
        x, _ = self._apply(x, None, draws)
        return x, (x if spec.targets_are_inputs else y)


def parse(name: str) -> Augmentation | None:
    """The augmentation `name`, or `None` for "none".

    Raises:
        UnknownNameError: there is no such augmentation.
    """
    if name not in NAMES:
        raise UnknownNameError("augmentation", name, NAMES)
    return _AUGMENTATIONS.get(name)


def table(examples: int, draws: int, seed: int, epoch: int) -> np.ndarray:
    """The random numbers of an epoch, uniform in [0, 1): float32 `[examples, draws]`; row i belongs to example i."""
    return np.random.default_rng([seed, epoch, _STREAM]).random((examples, draws), np.float32)


def rows(examples: int, draws: int, seed: int, epoch: int) -> Callable[[np.ndarray], np.ndarray]:
    """A function that returns rows of `table`: float32 `[n, draws]` for the examples int `[n]`."""
    if order.is_computed(examples):
        return lambda indices: order.uniform(indices, draws, [seed, epoch, _STREAM])
    return table(examples, draws, seed, epoch).__getitem__


def _crop_flip(x: tf.Tensor, mask: tf.Tensor | None, draws: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor | None]:
    """Pads an eighth on each side, crops at random, and flips half of the examples left to right.

    He and others, Deep Residual Learning for Image Recognition, CVPR 2016, section 4.2, pad 32x32 pixels with four
    zeros on each side. A picture with a mask is padded with its own reflection, because zeros would have no labels.
    """
    import tensorflow as tf

    height, width = x.shape[1:3]
    down, right = height // 8, width // 8
    top = tf.cast(draws[:, 0] * (2 * down + 1), tf.int32)
    left = tf.cast(draws[:, 1] * (2 * right + 1), tf.int32)
    rows = top[:, tf.newaxis] - down + tf.range(height)
    columns = left[:, tf.newaxis] - right + tf.range(width)
    columns = tf.where(draws[:, 2:3] < 0.5, columns, columns[:, ::-1])

    first_rows = tf.range(tf.shape(x)[0])[:, tf.newaxis] * height
    lines = (first_rows + _reflected(rows, height))[:, :, tf.newaxis]
    pixels = lines * width + _reflected(columns, width)[:, tf.newaxis, :]

    def moved(pictures: tf.Tensor) -> tf.Tensor:
        # On CPUs this is twice as fast as `gather`, and also faster than cropping rows and columns separately.
        return tf.gather_nd(tf.reshape(pictures, [-1, *pictures.shape[3:]]), pixels[..., tf.newaxis])

    if mask is not None:
        return moved(x), moved(mask)
    inside = _within(rows, height)[:, :, tf.newaxis] & _within(columns, width)[:, tf.newaxis, :]
    return moved(x) * tf.cast(inside[..., tf.newaxis], x.dtype), None


def _within(indices: tf.Tensor, size: int) -> tf.Tensor:
    return (indices >= 0) & (indices < size)


def _reflected(indices: tf.Tensor, size: int) -> tf.Tensor:
    """The indices, reflected at 0 and `size - 1` if they are outside."""
    import tensorflow as tf

    return (size - 1) - tf.abs((size - 1) - tf.abs(indices))


def _resized_crop(x: tf.Tensor, mask: tf.Tensor | None, draws: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor | None]:
    """Cuts out a part of random size, shape and position, resizes it to full size, and flips half of the examples."""
    import tensorflow as tf

    size = x.shape[1:3]
    boxes = random_boxes(tf.shape(x)[1:3], draws, CROPPED_AREA if mask is None else CROPPED_AREA_OF_MASKS)
    return cut_out(x, boxes, size), None if mask is None else cut_out_mask(mask, boxes, size)


def random_boxes(picture_size: tf.Tensor, draws: tf.Tensor, area: tuple[float, float]) -> tf.Tensor:
    """Boxes of random area, ratio and position, half of them mirrored.

    Args:
        picture_size: int32 `[2]`, height and width in pixels.
        draws: float32 `[b, 5]` in [0, 1).
        area: the smallest and the largest fraction of the picture.

    Returns:
        float32 `[b, 4]`: top, left, bottom and right as fractions of the picture; a box with left > right is mirrored.
    """
    import tensorflow as tf

    fraction = area[0] + draws[:, 0] * (area[1] - area[0])
    low, high = np.log(CROPPED_RATIO).astype(np.float32)
    ratio = tf.exp(low + draws[:, 1] * (high - low)) * tf.cast(picture_size[0] / picture_size[1], tf.float32)
    height, width = tf.minimum(tf.sqrt(fraction / ratio), 1.0), tf.minimum(tf.sqrt(fraction * ratio), 1.0)
    top, left = draws[:, 2] * (1 - height), draws[:, 3] * (1 - width)
    sides = tf.stack([top, left, top + height, left + width], axis=1)
    return tf.where(draws[:, 4:5] < 0.5, sides, tf.gather(sides, [0, 3, 2, 1], axis=1))


def cut_out(pictures: tf.Tensor, boxes: tf.Tensor, size: Any) -> tf.Tensor:
    """The box of each picture, resized bilinearly: float32 `[b, *size, C]`."""
    import tensorflow as tf

    return tf.image.crop_and_resize(pictures, boxes, tf.range(tf.shape(boxes)[0]), size)


def cut_out_mask(masks: tf.Tensor, boxes: tf.Tensor, size: Any) -> tf.Tensor:
    """The box of each mask, resized with nearest neighbours: int32 `[b, *size]`."""
    import tensorflow as tf

    numbers = tf.cast(masks, tf.float32)[..., tf.newaxis]
    cut = tf.image.crop_and_resize(numbers, boxes, tf.range(tf.shape(boxes)[0]), size, method="nearest")
    return tf.cast(cut[..., 0], tf.int32)


@dataclass(frozen=True)
class Augmented:
    """A `Transform` that augments the examples of a dataset.

    Attributes:
        spec: the spec of the dataset.
        augmentation: the augmentation.
        seed: with the epoch, determines the random numbers.
        examples: the number of examples of the split.
    """

    spec: DataSpec
    augmentation: Augmentation
    seed: int
    examples: int

    def extras(self, epoch: int, indices: np.ndarray) -> tuple[np.ndarray, ...]:
        """The random numbers of each example, float32 `[n, draws]`."""
        return (rows(self.examples, self.augmentation.draws, self.seed, epoch)(indices),)

    def __call__(self, data: tuple[Any, Any], draws: tf.Tensor) -> tuple[Any, Any]:
        return self.augmentation(self.spec, data, draws)


RESIZED_CROP = Augmentation("resized_crop", 5, _resized_crop)
_AUGMENTATIONS = {
    augmentation.name: augmentation for augmentation in (Augmentation("crop_flip", 3, _crop_flip), RESIZED_CROP)
}
NAMES = ("none", *_AUGMENTATIONS)
