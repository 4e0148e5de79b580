"""Input that costs nothing: a batch in memory that takes the place of all, to see what a dataset's own input costs."""

from __future__ import annotations

from typing import Any

import numpy as np

from tfdist.data.pipeline import array_feed, order
from tfdist.data.pipeline.source import Source
from tfdist.errors import UsageError


def feed(source: Source, split: str, global_batch_size: int, **options: Any) -> array_feed.ArrayFeed:
    """Passes of as many examples as those of `source.feed`, in which each batch has those of its first global batch.

    Args:
        source: the dataset, of which one batch is read, by each process as a whole.
        split: "train", "validation" or "test".
        global_batch_size: examples per step, over all ranks.
        **options: as `Source.feed` takes them, but for `world`.

    Raises:
        UsageError: the batches have different widths, of which none can stand for the others.
    """
    if source.bucketed:
        raise UsageError(
            f"The batches of `{source.spec.name}` have different widths, and a batch that is repeated has only one",
            "load the dataset without `buckets`",
        )
    replaced = source.feed(split, global_batch_size, **options)
    (batch,) = replaced.first(1)
    arrays, examples = array_feed.tensors(*batch), replaced.examples
    rows, dtype = len(batch[1]), order.index_type(examples)
    in_turn = order.Order(examples, lambda begin, end: np.arange(begin, end, dtype=dtype) % rows)
    return array_feed.ArrayFeed(arrays, global_batch_size, lambda epoch: in_turn)
