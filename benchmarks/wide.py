"""A dense model of 6.6 million parameters, 784-2048-2048-512-10, whose steps mostly wait for gradients."""

from __future__ import annotations

from typing import Any


def build(spec: Any) -> Any:
    """Builds the model for `tfdist.models.build("benchmarks.wide:build", spec)`."""
    from keras import Input, Sequential, layers

    hidden = [layers.Dense(units, activation="relu") for units in (2048, 2048, 512)]
    return Sequential([Input(spec.input_shape), layers.Flatten(), *hidden, layers.Dense(spec.classes)])
