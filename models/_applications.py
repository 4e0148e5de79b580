"""Builds a model of `keras.applications` with a width factor, float32 logits and synchronized batch normalization."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from tfdist.data.spec import DataSpec
from tfdist.models import _fit


def adapted(
    application: Callable[..., keras.Model], spec: DataSpec, *, width: float, synchronized: bool = False
) -> keras.Model:
    """Builds the model with new weights.

    Args:
        application: a function such as `keras.applications.ResNet50`.
        spec: the spec of the dataset, with the shape of its images and its classes.
        width: a factor on the filters of convolutions and the units of hidden dense layers.
        synchronized: whether batch normalizations use the statistics of the global batch.
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
