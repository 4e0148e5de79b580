"""Classification, one class per example: cross-entropy, accuracy, a confusion matrix."""

from __future__ import annotations

import numpy as np

from tfdist import tasks
from tfdist.tasks import _pictures
from tfdist.tasks._targets import loss, metrics

__all__ = ["loss", "metrics", "show"]

# More examples would not visibly change the figure.
SHOWN = 10_000


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
