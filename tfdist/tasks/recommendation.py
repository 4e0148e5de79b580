"""Recommendation: cross-entropy over all items, recall among the ten best, and recommendations for some users."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tfdist import files, tasks
from tfdist.data.spec import PADDING, UNKNOWN, DataSpec
from tfdist.tasks._targets import loss

__all__ = ["best", "loss", "metrics", "show"]

RECOMMENDED, SHOWN = 10, 20


def metrics(spec: DataSpec) -> list[Any]:
    """The metric "recall_at_10": the fraction of users whose next item is among the ten with the largest logits.

    Each user has one next item, so that recall is a mean over the users. Items that the user already has are not left
    out.
    """
    del spec
    return [keras.metrics.SparseTopKCategoricalAccuracy(RECOMMENDED, name=f"recall_at_{RECOMMENDED}")]


def show(run: tasks.Run) -> None:
    """Writes the items of some users, ten recommendations, and the next item, as `recommendations.txt`."""
    spec = run.source.spec
    x, y = run.examples(SHOWN)
    logits = run.predict(x, (spec.classes,))
    if logits is None or not run.strategy.world.is_chief:
        return
    lines = {"items": [row[row != PADDING] for row in x], "recommended": best(logits, x), "next item": y[:, None]}
    blocks = (
        "".join(f"{name:<12} {_names(items, spec)}\n" for name, items in zip(lines, rows, strict=True))
        for rows in zip(*lines.values(), strict=True)
    )
    files.write_text(run.file("recommendations", "recommendations.txt"), "\n".join(blocks))


def best(logits: np.ndarray, items: np.ndarray, count: int = RECOMMENDED) -> list[np.ndarray]:
    """The items with the largest logits, the largest first, without those that a user already has.

    Args:
        logits: `[N, classes]`.
        items: the items of each user, int `[N, length]`, padded with 0.
        count: the number of items per user, if there are as many others.
    """
    logits = np.array(logits, np.float64)
    np.put_along_axis(logits, items.astype(np.int64), -np.inf, axis=1)
    logits[:, [PADDING, UNKNOWN]] = -np.inf
    order = np.argsort(-logits, axis=1, kind="stable")[:, :count]
    return [row[np.isfinite(logits[user, row])] for user, row in enumerate(order)]


def _names(items: Sequence[int], spec: DataSpec) -> str:
    return " ".join(spec.vocabulary[item] if spec.vocabulary else str(item) for item in items)
