"""Segmentation, one class per pixel: cross-entropy, pixel accuracy, mean intersection over union, example masks."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from tfdist import tasks
from tfdist.data.spec import DataSpec
from tfdist.tasks import _pictures, _targets
from tfdist.tasks._targets import loss

__all__ = ["loss", "metrics", "show"]

SHOWN = 6


def metrics(spec: DataSpec) -> list[Any]:
    """Pixel accuracy and mean intersection over union, over all labelled pixels.

    The mean leaves out the ignored class and, as in Keras, classes that occur in no mask and no prediction.
    """
    classes = [number for number in range(spec.classes) if number != spec.ignored_class]
    mean_iou = keras.metrics.IoU(
        spec.classes, classes, ignore_class=spec.ignored_class, sparse_y_pred=False, name="mean_iou"
    )
    return [*_targets.metrics(spec), mean_iou]


def show(run: tasks.Run) -> None:
    """Draws images, their masks and the predicted masks as `masks.png`; unlabelled pixels are black."""
    spec = run.source.spec
    x, y = run.examples(SHOWN)
    logits = run.predict(x, (*y.shape[1:], spec.classes))
    if logits is None or not run.strategy.world.is_chief:
        return
    predicted = np.argmax(logits, axis=-1)

    def coloured(masks: np.ndarray) -> list[np.ndarray]:
        return [_pictures.colours(mask, spec.classes, spec.ignored_class) for mask in masks]

    columns = [("picture", list(x[..., :3])), ("mask", coloured(y)), ("predicted", coloured(predicted))]
    title = f"{run.model.name}, {spec.name}, {run.split}"
    _pictures.grid(run.file("masks", "masks.png"), columns, title)
