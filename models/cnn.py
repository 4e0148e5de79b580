"""`cnn`: two convolutions and two dense layers, the usual small network for MNIST."""

from __future__ import annotations

import keras

from tfdist.data.spec import DataSpec
from tfdist.models._images import padding as padding_for


def build(spec: DataSpec) -> keras.Model:
    """Conv 32 3x3 ReLU, pool 2, conv 64 3x3 ReLU, pool 2, dense 128 ReLU, dense.

    225,034 parameters on 28x28x1 with 10 classes. Convolutions are unpadded; where the image is too small for
    that (under 10 pixels), convolutions and pools pad.

    Input `[B, H, W, C]`. Output: logits `[B, spec.classes]`, always float32, so that a loss with
    `from_logits=True` is right under a mixed dtype policy too.

    Raises:
        UsageError: the examples are not images.
    """
    padding = padding_for("cnn", spec, kernel=3)
    return keras.Sequential(
        [
            keras.Input(spec.input_shape),
            keras.layers.Conv2D(32, 3, padding=padding, activation="relu"),
            keras.layers.MaxPooling2D(2, padding=padding),
            keras.layers.Conv2D(64, 3, padding=padding, activation="relu"),
            keras.layers.MaxPooling2D(2, padding=padding),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(spec.classes, dtype="float32", name="logits"),
        ],
        name="cnn",
    )
