"""Examples that are decoded from files, as global batches: each process decodes its own parts of them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import tensorflow as tf

from tfdist.data.input import batch_parts
from tfdist.data.input.batch_parts import at_least_one
from tfdist.data.input.dataset_feed import DatasetBatches
from tfdist.data.input.division import Division
from tfdist.data.input.feed import ONLY_PARTS, Feed
from tfdist.errors import DataError, UsageError
from tfdist.internals.keras import tree
from tfdist.jobs.world import World

# What TensorFlow makes of files that it cannot read or decode, and of exceptions of Python functions in a pipeline.
_OF_EXAMPLES = (
    tf.errors.InvalidArgumentError,
    tf.errors.NotFoundError,
    tf.errors.DataLossError,
    tf.errors.UnknownError,
)


class FileFeed(Feed):
    """Batches that are decoded from files, a pipeline a pass.

    Args:
        pipeline: `pipeline(epoch, first_batch, end_batch)`: this rank's parts of the global batches of a pass, up to
            batch `end_batch` or, if that is `None`, to the end.
        problem: `problem(epoch, first_batch, batches)`: what is wrong with the files of these batches, if anything.
        examples: examples in a pass.
        batch_size: examples in a full global batch.
        world: this process' place.
        listing: a hash that tells the files from others without reading them; `None` if the examples are not in files.
            Also an attribute.
    """

    def __init__(
        self,
        pipeline: Callable[[int, int, int | None], tf.data.Dataset],
        problem: Callable[[int, int, int], DataError | None],
        examples: int,
        batch_size: int,
        world: World,
        listing: Callable[[], str] | None = None,
    ):
        self._pipeline = pipeline
        self.listing = listing
        self._problem = problem
        self._epoch = 0
        self.examples = examples
        self.batch_size = batch_size
        self.num_batches = -(-examples // batch_size)
        if self.num_batches > tf.int32.max:
            raise UsageError(
                f"An epoch has {self.num_batches:,} batches, and steps are counted up to {tf.int32.max:,}",
                f"use a batch size of at least {-(-examples // tf.int32.max)}",
            )
        self.spec = tree.map_structure(_of_any_size, pipeline(0, 0, None).element_spec)
        alone = world.world_size == 1
        self.batches: Any = (
            DatasetBatches(length_known=True)
            if alone
            else RankBatches(True, world.rank, Division.among_processes(world), examples, batch_size)
        )

    def start(self, epoch: int, first_batch: int) -> Any:
        self.begin(epoch)
        return self.range(epoch, first_batch, None)

    def begin(self, epoch: int) -> None:
        """Notes the number of a pass that is read elsewhere."""
        self._epoch = epoch

    def range(self, epoch: int, first_batch: int, end_batch: int | None) -> Any:
        """An iterator over some batches of a pass; no others are read."""
        return iter(self._pipeline(epoch, first_batch, end_batch))

    def parts(self, epoch: int, first_batch: int, replicas: Sequence[int], division: Division) -> tf.data.Dataset:
        """The parts of these `replicas`, from batch `first_batch` of a pass on, batch by batch."""

        def cut(step: tf.Tensor, batch: Any) -> tf.data.Dataset:
            fetched = self.batches.fetch(iter([batch]), tf.cast(step, tf.int32))
            parts = [self.batches.part(None, fetched, index, division)[0] for index in replicas]
            datasets = [tf.data.Dataset.from_tensors(part) for part in parts]
            return functools.reduce(tf.data.Dataset.concatenate, datasets)

        with tf.init_scope(), tf.device("CPU:0"):
            steps = tf.data.Dataset.range(first_batch, self.num_batches)
            batches = self._pipeline(epoch, first_batch, None)
            return tf.data.Dataset.zip(steps, batches).flat_map(tf.autograph.experimental.do_not_convert(cut))

    def first(self, count: int) -> list[Any]:
        if isinstance(self.batches, RankBatches):
            raise UsageError(*ONLY_PARTS)
        self.begin(0)
        return list(self.range(0, 0, min(count, self.num_batches)))  # others would be read ahead

    @contextlib.contextmanager
    def naming_bad_examples(self, first_batch: int, batches: int) -> Iterator[None]:
        try:
            yield
        except _OF_EXAMPLES as error:
            problem = self._problem(self._epoch, first_batch, batches)
            if problem is None:
                raise
            raise problem from error


def _of_any_size(spec: Any) -> Any:
    return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype) if isinstance(spec, tf.TensorSpec) else spec


@dataclass(frozen=True)
class RankBatches(DatasetBatches):
    """The iterator has only what the replicas of this rank take of a global batch."""

    rank: int
    processes: Division
    examples: int
    batch_size: int
    in_parts: ClassVar[bool] = True

    def lengths_of_parts(self, state: Any, batch: Any, division: Division) -> list[Any]:
        del state
        return batch_parts.rows(batch[1], division)

    def mine(self, state: Any, batch: Any, division: Division) -> Any:
        del state, division
        return batch[0]

    def fetch(self, state: Any, step: tf.Tensor) -> Any:
        whole, rest = divmod(self.examples, self.batch_size)
        return next(state), tf.where(step < whole, self.batch_size, rest)

    def part(self, state: Any, batch: Any, index: int, division: Division) -> tuple[Any, Any]:
        del state
        if division.speeds != self.processes.speeds:
            raise UsageError(
                "The strategy has other `speeds` than the world that these data were divided for",
                "pass `world=strategy.world` to `feed`",
            )
        mine, size = batch
        of_rank, _ = self.processes.part(size, self.rank)
        begin, end = division.part(size, index)
        part = tree.map_structure(lambda tensor: at_least_one(tensor[begin - of_rank : end - of_rank]), mine)
        return part, (end - begin) / size
