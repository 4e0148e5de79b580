"""Generation: the model learns the distribution of the pictures; its own loss, samples at the end."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from tfdist import tasks
from tfdist.data.spec import DataSpec
from tfdist.tasks import _pictures

SHOWN = 64


def loss(spec: DataSpec) -> keras.losses.Loss | None:
    """No loss: a generative model adds its loss, or has a `train_step`."""
    del spec
    return None


def metrics(spec: DataSpec) -> list[Any]:
    """No metrics besides those of the model."""
    del spec
    return []


def show(run: tasks.Run) -> None:
    """Draws pictures of the dataset, and pictures that the model generates, as `samples.png`."""
    generate = getattr(run.model, "generate", None)
    if not callable(generate):
        run.skipped = (
            "The samples are left out: they need a model with a method `generate(count, seed)` that returns pictures, "
            f"which `{run.model.name}` does not have"
        )
        return
    x, _ = run.examples(SHOWN)
    with run.strategy.whole_state(run.model):
        if not run.strategy.world.is_chief:
            return
        pictures = np.asarray(generate(SHOWN, run.seed))
    if run.fits(pictures, x.shape[1:]):
        panels = [(f"pictures ({run.split})", x[..., :3]), ("samples", pictures[..., :3])]
        title = f"{run.model.name}, {run.source.spec.name}"
        _pictures.mosaics(run.file("samples", "samples.png"), panels, title)
