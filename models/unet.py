"""`unet`: a contracting and an expanding path with skip connections.

O. Ronneberger, P. Fischer and T. Brox, "U-Net: convolutional networks for biomedical image segmentation", MICCAI 2015.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import layers

from tfdist.data.spec import DataSpec
from tfdist.models import _fit
from tfdist.models._training import Training
from tfdist.options import Count, Factor, Fraction

TASKS = ("segmentation",)
# Rate and batch are tfdist's choice; the paper has SGD and a batch of one large image.
TRAINING = Training("adam", learning_rate=1e-3, batch_size=32)
LEVELS = 4


def build(spec: DataSpec, *, filters: Count = 64, dropout: Fraction = 0.5, width: Factor = 1.0) -> keras.Model:
    """Four levels of two 3x3 convolutions and a pool, a bottom, four levels of an up-convolution and two convolutions.

    31.0 million parameters with 64 filters. The paper's convolutions are unpadded, and its masks are smaller than the
    images. Here convolutions are padded, and the mask is as large as the image, for any size. As in the paper, there is
    dropout at the end of the contracting path and no batch normalization.

    Input `[B, H, W, C]`. Output: logits `[B, H, W, spec.classes]`, float32 under every dtype policy.

    Args:
        spec: the spec of the dataset.
        filters: the filters of the first level; each lower level has twice as many as the level above.
        dropout: the fraction of values that are dropped in the two lowest levels in training, in [0, 1).
        width: a factor on `filters`.

    Raises:
        UsageError: the examples are not images.
    """
    _fit.require_images("unet", spec)
    filters = _fit.scaled(filters, width)
    inputs = keras.Input(spec.input_shape)
    image, connections = _fit.padded(inputs, 2**LEVELS), []
    for level in range(LEVELS):
        image = _two_convolutions(image, filters * 2**level)
        if level == LEVELS - 1:
            image = layers.Dropout(dropout)(image)
        connections.append(image)
        image = layers.MaxPooling2D(2)(image)
    image = layers.Dropout(dropout)(_two_convolutions(image, filters * 2**LEVELS))
    for level in reversed(range(LEVELS)):
        image = layers.Conv2DTranspose(filters * 2**level, 2, strides=2, kernel_initializer="he_normal")(image)
        image = layers.Concatenate()([connections[level], image])
        image = _two_convolutions(image, filters * 2**level)
    logits = layers.Conv2D(spec.classes, 1, dtype="float32", name="logits")(image)
    return keras.Model(inputs, _fit.cropped(logits, spec), name="unet")


def _two_convolutions(image: Any, filters: int) -> Any:
    for _ in range(2):
        image = layers.Conv2D(filters, 3, padding="same", activation="relu", kernel_initializer="he_normal")(image)
    return image
