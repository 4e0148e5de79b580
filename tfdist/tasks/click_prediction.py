"""Click prediction: binary cross-entropy, the area under the ROC curve, and how the predictions are calibrated."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from tfdist import tasks
from tfdist.data.spec import DataSpec
from tfdist.tasks import _pictures

# Examples in the picture, and groups of examples with similar predictions.
SHOWN, GROUPS = 100_000, 10


def loss(spec: DataSpec) -> keras.losses.Loss:
    """The mean binary cross-entropy of the logits `[B, 1]`, in nats."""
    del spec
    return keras.losses.BinaryCrossentropy(from_logits=True)


def metrics(spec: DataSpec) -> list[Any]:
    """The metric "auc": the area under the ROC curve, from 0.5 for guesses to 1, from 200 thresholds."""
    del spec
    return [keras.metrics.AUC(from_logits=True, name="auc")]


def show(run: tasks.Run) -> None:
    """Draws the fraction of clicks over the predicted probability as `calibration.png`."""
    x, y = run.examples(SHOWN)
    logits = run.predict(x, (1,))
    if logits is None or not run.strategy.world.is_chief:
        return
    predicted = 1 / (1 + np.exp(-logits[:, 0].astype(np.float64)))
    # Groups of the same size, in the order of their predictions.
    groups = np.array_split(np.argsort(predicted, kind="stable"), min(GROUPS, len(y)))
    points = np.array([(predicted[group].mean(), y[group].mean()) for group in groups])
    title = f"{run.model.name}, {run.source.spec.name}: {len(y):,} {run.split} examples, {y.mean():.1%} clicks"
    _pictures.calibration(run.file("calibration", "calibration.png"), points, title)
