"""Segmentation, one class per pixel: cross-entropy, pixel accuracy, mean intersection over union, example masks."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from tfdist import tasks
from tfdist.data.spec import DataSpec
from tfdist.tasks import _pictures, _targets

SHOWN = 6


def loss(spec: DataSpec) -> keras.losses.Loss:
    """Cross-entropy, as a mean over all labelled pixels, in nats."""
    return _targets.cross_entropy(spec)


def metrics(spec: DataSpec) -> list[Any]:
    """Pixel accuracy, and mean intersection over union of the classes, over all labelled pixels.

    A class that occurs in no mask and no prediction is left out of the mean, as in Keras; so is the ignored class.
    """
    counted = [number for number in range(spec.classes) if number != spec.ignored_class]
    mean_iou = keras.metrics.IoU(
        spec.classes, counted, ignore_class=spec.ignored_class, sparse_y_pred=False, name="mean_iou"
    )
    return [_targets.accuracy(spec), mean_iou]


def show(run: tasks.Run) -> None:
    """Writes images, their masks and the predicted masks side by side, as `masks.png`; black is unlabelled."""
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
