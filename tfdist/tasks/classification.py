"""Classification, one class per example: cross-entropy, accuracy, a confusion matrix."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from tfdist import tasks
from tfdist.data.spec import DataSpec
from tfdist.tasks import _pictures, _targets

# More examples would not visibly change the figure.
SHOWN = 10_000


def loss(spec: DataSpec) -> keras.losses.Loss:
    """Cross-entropy, in nats."""
    return _targets.cross_entropy(spec)


def metrics(spec: DataSpec) -> list[Any]:
    """The fraction of correctly predicted examples."""
    return [_targets.accuracy(spec)]


def show(run: tasks.Run) -> None:
    """Draws the confusion matrix as `confusion_matrix.png`."""
    spec = run.source.spec
    x, y = run.examples(SHOWN)
    logits = run.predict(x, (spec.classes,))
    if logits is None or not run.strategy.world.is_chief:
        return
    matrix = np.zeros((spec.classes, spec.classes), np.int64)
    np.add.at(matrix, (y, np.argmax(logits, axis=-1)), 1)
    title = f"{run.model.name}, {spec.name}: {len(y):,} {run.split} examples, {np.trace(matrix) / len(y):.1%} correct"
    _pictures.confusion(run.file("confusion_matrix", "confusion_matrix.png"), matrix, spec.class_names, title)
