"""`verify` on data as `fit` takes them."""

from __future__ import annotations

from typing import Any

import keras

from tfdist.data.input import adapters
from tfdist.data.input.passes import DataPasses
from tfdist.interface.strategy import Strategy
from tfdist.loop import outer_loop, programs
from tfdist.verification import bounds, comparison
from tfdist.verification.bounds import BoundReport
from tfdist.verification.report import Report


def verify(
    strategy: Strategy,
    model: keras.Model,
    x: Any,
    y: Any = None,
    batch_size: int | None = None,
    sample_weight: Any = None,
    class_weight: Any = None,
    steps: int = comparison.STEPS,
) -> Report | BoundReport:
    """Compares the first `steps` global batches on one device and on `strategy`; see `tfdist.verification.comparison`.

    A strategy that differs by design is held to its bound; see `tfdist.verification.bounds`.
    """
    if strategy.bound is None:
        comparison.require_as_one_device(strategy)
    outer_loop.check(strategy, model, "verify")
    feed = outer_loop.feed_of(
        strategy, adapters.request(x, y, sample_weight, class_weight=class_weight, batch_size=batch_size, shuffle=False)
    )
    programs.build(strategy, model, "train", feed)
    with DataPasses(feed, steps):
        if strategy.bound is not None:
            return bounds.verify(strategy, model, feed, steps)
        return comparison.verify(strategy, model, feed.first(steps))
