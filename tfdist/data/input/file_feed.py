"""Examples that each process reads in a pipeline of its own: those of its own part of each global batch."""

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

# What TensorFlow raises for files that it cannot read or decode, and for exceptions of Python functions in a pipeline.
_ERRORS_OF_EXAMPLES = (
    tf.errors.InvalidArgumentError,
    tf.errors.NotFoundError,
    tf.errors.DataLossError,
    tf.errors.UnknownError,
)


class FileFeed(Feed):
    """Batches of examples that a pipeline reads, one pipeline per pass: from files, by number, or from large arrays.

    Args:
        pipeline: `pipeline(epoch, first_batch, end_batch)`: this rank's parts of the global batches of a pass, up to
            batch `end_batch` or, if that is `None`, to the end.
        problem: `problem(epoch, first_batch, batches)`: the error that names a bad example of these batches, if any.
        examples: the number of examples per pass.
        batch_size: the number of examples in a full global batch.
        world: this process's place in the job.
        listing: returns a hash that identifies the files without reading them; `None` if the examples are not in files.
            Also an attribute.
        read_batch: `read_batch(epoch, number)`: this rank's part of one batch, for data where a few batches are read
            faster without a pipeline.
    """

    def __init__(
        self,
        pipeline: Callable[[int, int, int | None], tf.data.Dataset],
        problem: Callable[[int, int, int], DataError | None],
        examples: int,
        batch_size: int,
        world: World,
        listing: Callable[[], str] | None = None,
        read_batch: Callable[[int, int], Any] | None = None,
    ):
        self._pipeline = pipeline
        self._problem = problem
        self._read_batch = read_batch
        self.listing = listing
        self._epoch = 0
        self.examples = examples
        self.batch_size = batch_size
        self.num_batches = -(-examples // batch_size)
        if self.num_batches > tf.int32.max:
            raise UsageError(
                f"An epoch has {self.num_batches:,} batches, but steps are counted up to {tf.int32.max:,}",
                f"use a batch size of at least {-(-examples // tf.int32.max)}",
            )
        self.spec = tree.map_structure(_of_any_size, pipeline(0, 0, None).element_spec)
        self.batches: Any = (
            DatasetBatches(length_known=True)
            if world.world_size == 1
            else RankBatches(True, world.rank, Division.among_processes(world), examples, batch_size)
        )

    def start(self, epoch: int, first_batch: int) -> Any:
        self.begin(epoch)
        return self.range(epoch, first_batch, None)

    def begin(self, epoch: int) -> None:
        """Notes which pass is read, for the errors that name its examples."""
        self._epoch = epoch

    def range(self, epoch: int, first_batch: int, end_batch: int | None) -> Any:
        """An iterator over some batches of a pass; no other batches are read."""
        if end_batch is None or self._read_batch is None:
            return iter(self._pipeline(epoch, first_batch, end_batch))
        return (self._read_batch(epoch, number) for number in range(first_batch, min(end_batch, self.num_batches)))

    def parts(self, epoch: int, first_batch: int, replicas: Sequence[int], division: Division) -> tf.data.Dataset:
        """As `ArrayFeed.parts`; the extras are empty."""
        self.begin(epoch)

        def cut(step: tf.Tensor, batch: Any) -> tf.data.Dataset:
            fetched = self.batches.fetch(iter([batch]), tf.cast(step, tf.int32))
            parts = [self.batches.part(None, fetched, index, division)[0] for index in replicas]
            datasets = [tf.data.Dataset.from_tensors((part, ())) for part in parts]
            return functools.reduce(tf.data.Dataset.concatenate, datasets)

        with tf.init_scope(), tf.device("CPU:0"):
            steps = tf.data.Dataset.range(first_batch, self.num_batches)
            batches = self._pipeline(epoch, first_batch, None)
            return tf.data.Dataset.zip(steps, batches).flat_map(tf.autograph.experimental.do_not_convert(cut))

    def first(self, count: int) -> list[Any]:
        if isinstance(self.batches, RankBatches):
            raise UsageError(*ONLY_PARTS)
        self.begin(0)
        return list(self.range(0, 0, min(count, self.num_batches)))  # without an end, more would be read ahead

    @contextlib.contextmanager
    def naming_bad_examples(self, first_batch: int, batches: int) -> Iterator[None]:
        try:
            yield
        except _ERRORS_OF_EXAMPLES as error:
            problem = self._problem(self._epoch, first_batch, batches)
            if problem is None:
                raise
            raise problem from error


def _of_any_size(spec: Any) -> Any:
    return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype) if isinstance(spec, tf.TensorSpec) else spec


@dataclass(frozen=True)
class RankBatches(DatasetBatches):
    """`DatasetBatches` whose iterator has only the part of this rank's replicas; a batch is that part and its size.

    Attributes:
        rank: the rank of this process.
        processes: how a batch is divided among the processes.
        examples: the number of examples per pass.
        batch_size: the number of examples in a full global batch.
    """

    rank: int
    processes: Division
    examples: int
    batch_size: int
    in_parts: ClassVar[bool] = True

    def fetch(self, state: Any, step: tf.Tensor) -> Any:
        full_batches, rest = divmod(self.examples, self.batch_size)
        return next(state), tf.where(step < full_batches, self.batch_size, rest)

    def part(self, state: Any, batch: Any, index: int, division: Division) -> tuple[Any, Any]:
        del state
        if division.speeds != self.processes.speeds:
            raise UsageError(
                "The strategy has other `speeds` than the world that these data were divided for",
                "pass `world=strategy.world` to `feed`",
            )
        data, size = batch
        first, _ = self.processes.part(size, self.rank)
        begin, end = division.part(size, index)
        part = tree.map_structure(lambda tensor: at_least_one(tensor[begin - first : end - first]), data)
        return part, (end - begin) / size

    def lengths_of_parts(self, state: Any, batch: Any, division: Division) -> list[Any]:
        del state
        return batch_parts.rows(batch[1], division)

    def local_examples(self, state: Any, batch: Any, division: Division) -> Any:
        del state, division
        return batch[0]
