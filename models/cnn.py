"""`cnn`: two convolutions and two dense layers, the usual small network for MNIST."""

from __future__ import annotations

import keras

from tfdist.data.spec import DataSpec
from tfdist.models import _fit
from tfdist.models._training import Training
from tfdist.options import Factor

TASKS = ("classification",)
# Rate and batch of the recipe `fashion_mnist-cnn`; Keras' usual rate of Adam.
TRAINING = Training("adam", learning_rate=1e-3, batch_size=128)


def build(spec: DataSpec, *, width: Factor = 1.0) -> keras.Model:
    """Conv 32 3x3 ReLU, pool 2, conv 64 3x3 ReLU, pool 2, dense 128 ReLU, dense.

    225,034 parameters on 28x28x1 with 10 classes. Convolutions are unpadded; for smaller images (below 10 pixels),
    convolutions and pools pad.

    Input `[B, H, W, C]`. Output: logits `[B, spec.classes]`, float32 under every dtype policy.

    Args:
        spec: the spec of the dataset.
        width: a factor on the number of filters and hidden units.

    Raises:
        UsageError: the examples are not images.
    """
    _fit.require_images("cnn", spec)
    padding = _fit.padding(spec, kernel=3)
    return keras.Sequential(
        [
            keras.Input(spec.input_shape),
            keras.layers.Conv2D(_fit.scaled(32, width), 3, padding=padding, activation="relu"),
            keras.layers.MaxPooling2D(2, padding=padding),
            keras.layers.Conv2D(_fit.scaled(64, width), 3, padding=padding, activation="relu"),
            keras.layers.MaxPooling2D(2, padding=padding),
            keras.layers.Flatten(),
            keras.layers.Dense(_fit.scaled(128, width), activation="relu"),
            keras.layers.Dense(spec.classes, dtype="float32", name="logits"),
        ],
        name="cnn",
    )
