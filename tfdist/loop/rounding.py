"""How coarsely the layers of a model compute."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.internals import keras as keras_internals


def coarsest(strategy: Any, model: Any) -> float:
    """The machine epsilon of the coarsest type that layers compute in."""
    types = {str(layer.compute_dtype) for layer in keras_internals.all_layers(model)} | {"float32"}
    found = [_epsilon_of(tf.as_dtype(name).as_numpy_dtype) for name in types if "float" in name]
    on_gpu = any("GPU" in device for device in strategy.devices)
    if on_gpu and tf.config.experimental.tensor_float_32_execution_enabled():
        found.append(2.0**-10)  # of TensorFloat-32
    return max(found)


def _epsilon_of(kind: type) -> float:
    """The distance from 1 to the next number; NumPy's `finfo` does not know bfloat16."""
    one, two = kind(1), kind(2)
    return float(np.nextafter(one, two) - one)
