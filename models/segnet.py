"""`segnet`: VGG's convolutions, and a decoder that unpools with the positions of the encoder's maxima.

V. Badrinarayanan, A. Kendall and R. Cipolla, "SegNet: a deep convolutional encoder-decoder architecture for image
segmentation", IEEE Transactions on Pattern Analysis and Machine Intelligence, 2017.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import layers, ops

from tfdist.data.spec import DataSpec
from tfdist.models import _fit
from tfdist.models._training import Training
from tfdist.options import Factor

TASKS = ("segmentation",)
# Rate and batch of the recipe `camvid-segnet`; the paper has SGD and a batch of 12.
TRAINING = Training("adam", learning_rate=1e-3, batch_size=8)
# The filters of the encoder's convolutions, by group, as in `vgg16`.
GROUPS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


def build(spec: DataSpec, *, synchronized: bool = False, width: Factor = 1.0) -> keras.Model:
    """Thirteen 3x3 convolutions with batch normalization and five pools, and the same in reverse with unpooling.

    29.4 million parameters on 3 channels. Images whose sides are not multiples of 32 are padded with zeros, and the
    outputs are cropped. The paper starts from the weights of VGG16 on ImageNet; here they are random.

    Input `[B, H, W, C]`. Output: logits `[B, H, W, spec.classes]`, float32 under every dtype policy.

    Args:
        spec: the spec of the dataset.
        synchronized: batch normalizations use the statistics of the global batch, not of a replica's part.
        width: a factor on the number of filters.

    Raises:
        UsageError: the examples are not images.
    """
    _fit.require_images("segnet", spec)
    groups = [[_fit.scaled(filters, width) for filters in group] for group in GROUPS]
    inputs = keras.Input(spec.input_shape)
    image, positions = _fit.padded(inputs, 2 ** len(GROUPS)), []
    for group in groups:
        for filters in group:
            image = _convolution(image, filters, synchronized)
        image, maxima = max_pool(image)
        positions.append(maxima)
    for number in reversed(range(len(groups))):
        image = unpool(image, positions.pop())
        # The last convolution of a group has as many filters as the preceding group of the encoder.
        last = [groups[number - 1][-1]] if number else []
        for filters in [*groups[number][1:], *last]:
            image = _convolution(image, filters, synchronized)
    logits = layers.Conv2D(spec.classes, 3, padding="same", dtype="float32", name="logits")(image)
    return keras.Model(inputs, _fit.cropped(logits, spec), name="segnet")


def max_pool(image: Any) -> tuple[Any, Any]:
    """Computes the maxima of 2x2 windows and their positions.

    Args:
        image: `[B, H, W, C]`, H and W even.

    Returns:
        Maxima `[B, H/2, W/2, C]`, and their positions `[B, H/2, W/2, C, 4]` with the image's dtype, one-hot over the
        pixels of the window, row by row; among equal pixels, the first position.
    """
    height, width, channels = image.shape[1:]
    windows = ops.reshape(image, (-1, height // 2, 2, width // 2, 2, channels))
    windows = ops.transpose(windows, (0, 1, 3, 5, 2, 4))
    windows = ops.reshape(windows, (-1, height // 2, width // 2, channels, 4))
    positions = ops.one_hot(ops.argmax(windows, axis=-1), 4, dtype=image.dtype)
    return ops.sum(windows * positions, axis=-1), positions


def unpool(image: Any, positions: Any) -> Any:
    """Puts each value of `image` `[B, H, W, C]` at its position in a window of 2x2 zeros; returns `[B, 2H, 2W, C]`."""
    height, width, channels = image.shape[1:]
    windows = ops.expand_dims(image, -1) * positions
    windows = ops.reshape(windows, (-1, height, width, channels, 2, 2))
    windows = ops.transpose(windows, (0, 1, 4, 2, 5, 3))
    return ops.reshape(windows, (-1, 2 * height, 2 * width, channels))


def _convolution(image: Any, filters: int, synchronized: bool) -> Any:
    image = layers.Conv2D(filters, 3, padding="same", kernel_initializer="he_normal")(image)
    image = layers.BatchNormalization(momentum=0.9, synchronized=synchronized)(image)
    return layers.ReLU()(image)
