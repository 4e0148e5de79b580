"""Input that costs nothing, to measure what a dataset's own input costs: one batch in memory in place of all others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tfdist.data.input import array_feed, order
from tfdist.data.input.source import Source
from tfdist.errors import UsageError


def feed(source: Source, split: str, global_batch_size: int, **options: Any) -> array_feed.ArrayFeed:
    """Passes of the same length as those of `source.feed`, in which every batch has the examples of its first batch.

    Args:
        source: the dataset; each process reads one global batch of it.
        split: "train", "validation" or "test".
        global_batch_size: the number of examples per step over all ranks.
        **options: the other arguments of `Source.feed`, except `world`.

    Raises:
        UsageError: the batches have different widths, so that one batch cannot replace the others.
    """
    if source.bucketed:
        raise UsageError(
            f"The batches of `{source.spec.name}` have different widths, but a batch that is repeated has only one",
            "load the dataset without `buckets`",
        )
    replaced = source.feed(split, global_batch_size, **options)
    (batch,) = replaced.first(1)
    arrays, examples = array_feed.tensors(*batch), replaced.examples
    repeated = array_feed.ArrayFeed(arrays, global_batch_size, lambda epoch: order.as_stored(examples))
    repeated.batches = RepeatedBatches(global_batch_size, repeated.batches.even, rows=len(batch[1]))
    return repeated


@dataclass(frozen=True)
class RepeatedBatches(array_feed.ArrayBatches):
    """`ArrayBatches` of arrays with only `rows` examples, which repeat.

    The state still has the numbers of all examples, since `mpi_split` divides those among the processes.
    """

    rows: int = field(kw_only=True)

    def fetch(self, state: Any, step: tf.Tensor) -> tuple[tf.Tensor, ...]:
        numbers, *extras = super().fetch(state, step)
        return (numbers % self.rows, *extras)

    def gathered(self, arrays: Any, positions: Sequence[tf.Tensor]) -> Any:
        # `mpi_split` does not call `fetch`.
        return super().gathered(arrays, [positions[0] % self.rows, *positions[1:]])
