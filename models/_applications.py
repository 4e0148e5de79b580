"""A model of `keras.applications` at another width, with float32 logits, and with synchronized normalizations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from tfdist.data.spec import DataSpec
from tfdist.models import _fit


def adapted(
    application: Callable[..., keras.Model], spec: DataSpec, *, width: float, synchronized: bool = False
) -> keras.Model:
    """The same layers, with new weights.

    Args:
        application: such as `keras.applications.ResNet50`.
        spec: the spec of the dataset: the shape of its images and its classes.
        width: a factor on the filters of convolutions and the units of hidden dense layers.
        synchronized: whether batch normalizations take their statistics from the whole global batch.
    """
    original = application(weights=None, input_shape=spec.input_shape, classes=spec.classes, classifier_activation=None)
    logits = original.layers[-1].name

    def adapt(layer: keras.layers.Layer) -> keras.layers.Layer:
        config: dict[str, Any] = layer.get_config()
        if layer.name == logits:
            config["dtype"] = "float32"
        else:
            for size in {"filters", "units"} & config.keys():
                config[size] = _fit.scaled(config[size], width)
        if isinstance(layer, keras.layers.BatchNormalization):
            config["synchronized"] = synchronized
        return type(layer).from_config(config)

    return keras.models.clone_model(original, clone_function=adapt)
