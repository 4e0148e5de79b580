"""Autoencoding: the model reconstructs its input; mean squared error, mean absolute error, reconstructions."""

from __future__ import annotations

from typing import Any

import keras

from tfdist import tasks
from tfdist.data.spec import DataSpec
from tfdist.tasks import _pictures

SHOWN = 8


def loss(spec: DataSpec) -> keras.losses.Loss:
    """The mean squared difference over pixels and channels; pixels are in [0, 1]."""
    del spec
    return keras.losses.MeanSquaredError()


def metrics(spec: DataSpec) -> list[Any]:
    """The mean absolute difference over pixels and channels."""
    del spec
    return ["mae"]


def show(run: tasks.Run) -> None:
    """Draws images and their reconstructions as `reconstructions.png`."""
    x, _ = run.examples(SHOWN)
    outputs = run.predict(x, x.shape[1:])
    if outputs is not None and run.strategy.world.is_chief:
        title = f"{run.model.name}, {run.source.spec.name}, {run.split}"
        path = run.file("reconstructions", "reconstructions.png")
        _pictures.grid(path, [("picture", list(x[..., :3])), ("reconstruction", list(outputs[..., :3]))], title)
