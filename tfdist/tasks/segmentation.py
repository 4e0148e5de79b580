"""One class a pixel: cross-entropy, pixel accuracy and mean intersection over union, masks beside pictures."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from tfdist import tasks
from tfdist.data.spec import DataSpec
from tfdist.tasks import _pictures, _targets

SHOWN = 6


def loss(spec: DataSpec) -> keras.losses.Loss:
    """Cross-entropy, a mean over all pixels that are labelled, in nats."""
    return _targets.cross_entropy(spec)


def metrics(spec: DataSpec) -> list[Any]:
    """Over all pixels that are labelled: the share that is right; the mean over the classes of what both masks share.

    A class that is in no mask and no prediction is left out of the mean, as Keras does; so is the ignored one.
    """
    counted = [number for number in range(spec.classes) if number != spec.ignored_class]
    mean_iou = keras.metrics.IoU(
        spec.classes, counted, ignore_class=spec.ignored_class, sparse_y_pred=False, name="mean_iou"
    )
    return [_targets.accuracy(spec), mean_iou]


def show(run: tasks.Run) -> None:
    """Pictures, their masks and the predicted ones side by side, as `masks.png`; black is not labelled."""
    spec = run.source.spec
    x, y = run.examples(SHOWN)
    predicted = np.argmax(run.strategy.predict(run.model, x, batch_size=run.batch_size, verbose=0), axis=-1)
    if not run.strategy.world.is_chief:
        return

    def coloured(masks: np.ndarray) -> list[np.ndarray]:
        return [_pictures.colours(mask, spec.classes, spec.ignored_class) for mask in masks]

    columns = [("picture", list(x[..., :3])), ("mask", coloured(y)), ("predicted", coloured(predicted))]
    title = f"{run.model.name}, {spec.name}, {run.split}"
    _pictures.grid(run.file("masks", "masks.png"), columns, title)
