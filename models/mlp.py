"""`mlp`: one hidden layer of 128 units, as in the published comparison of four ways to train on Fashion-MNIST."""

from __future__ import annotations

import keras

from tfdist.data.spec import DataSpec
from tfdist.models import _fit
from tfdist.models._training import Training
from tfdist.options import Count, Factor, Fraction

TASKS = ("classification",)
# Rate and batch of TensorFlow's quickstart for beginners.
TRAINING = Training("adam", learning_rate=1e-3, batch_size=32)


def build(spec: DataSpec, *, units: Count = 128, dropout: Fraction = 0.2, width: Factor = 1.0) -> keras.Model:
    """Flatten, dense `units` with ReLU, dropout, dense; 101,770 parameters on 28x28x1 with 10 classes.

    Input `[B, *spec.input_shape]`, any shape. Output: logits `[B, spec.classes]`, float32 under every dtype policy.

    Args:
        spec: the spec of the dataset.
        units: the width of the hidden layer.
        dropout: the fraction of hidden units that are dropped in training, in [0, 1).
        width: a factor on `units`.
    """
    return keras.Sequential(
        [
            keras.Input(spec.input_shape),
            keras.layers.Flatten(),
            keras.layers.Dense(_fit.scaled(units, width), activation="relu"),
            keras.layers.Dropout(dropout),
            keras.layers.Dense(spec.classes, dtype="float32", name="logits"),
        ],
        name="mlp",
    )
