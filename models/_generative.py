"""Random draws of generative models: new ones in each training step, the same ones in each evaluation.

Losses of evaluations can then be compared with each other, and an evaluation leaves the draws of the training as they
are. All draws are made for the global batch, so that they do not depend on the number of replicas.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

_EVALUATION_SEED = 0


@keras.saving.register_keras_serializable("tfdist")
class Noise(keras.layers.Layer):
    """Independent draws from the standard normal distribution, float32 `[B, *shape]`, for inputs `[B, ...]`.

    Args:
        shape: the shape of the draws for one example; by default that of an input.
        **options: the options of every Keras layer.
    """

    def __init__(self, shape: tuple[int, ...] | None = None, **options: Any):
        super().__init__(**options)
        self.shape = shape if shape is None else tuple(shape)
        self.generator = keras.random.SeedGenerator()

    def call(self, values: Any, training: bool = False) -> Any:
        shape = ops.shape(values) if self.shape is None else (ops.shape(values)[0], *self.shape)
        seed = self.generator if training else _EVALUATION_SEED
        return keras.random.normal(shape, dtype="float32", seed=seed)

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"shape": self.shape}
