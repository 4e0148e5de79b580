"""Input that costs nothing: a batch in memory that takes the place of all, to see what a dataset's own input costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tfdist.data.input import array_feed, order
from tfdist.data.input.source import Source
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
    found = array_feed.ArrayFeed(arrays, global_batch_size, lambda epoch: order.as_stored(examples))
    found.batches = RepeatedBatches(global_batch_size, found.batches.even, rows=len(batch[1]))
    return found


@dataclass(frozen=True)
class RepeatedBatches(array_feed.ArrayBatches):
    """Numbers of examples as they would be of all examples, in whose places are those of one batch, of `rows` rows."""

    rows: int = field(kw_only=True)

    def fetch(self, state: Any, step: tf.Tensor) -> tuple[tf.Tensor, ...]:
        numbers, *extras = super().fetch(state, step)
        return (numbers % self.rows, *extras)

    def gathered(self, arrays: Any, positions: Sequence[tf.Tensor]) -> Any:
        # `mpi_split` fetches its own share of the numbers itself.
        return super().gathered(arrays, [positions[0] % self.rows, *positions[1:]])
