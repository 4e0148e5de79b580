"""Pipelines (`tf.data`) in which each process reads its own part of each global batch: from files, or by number.

    order of the epoch ──> rows of a range of steps, in NumPy, one range ahead ──> the rows of each step or example

Each graph is traced once, and gets the number of the epoch as an argument.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from tfdist.data.input import batch_parts, order
from tfdist.data.input.arrays import Transform
from tfdist.data.input.dataset_feed import DatasetBatches
from tfdist.data.input.division import Division
from tfdist.data.input.feed import ONLY_PARTS, Feed, graph_function
from tfdist.errors import TfdistError, UsageError
from tfdist.internals import keras_data
from tfdist.internals.keras import tree
from tfdist.jobs.job_environment import cores
from tfdist.jobs.world import World

# What TensorFlow raises for files that it cannot read or decode, and for exceptions of Python functions in a pipeline.
_ERRORS_OF_EXAMPLES = (
    tf.errors.InvalidArgumentError,
    tf.errors.NotFoundError,
    tf.errors.DataLossError,
    tf.errors.UnknownError,
)

# `rows(epoch, begin, end)`: arrays with one row per example of the steps `begin` to `end - 1`.
Rows = Callable[[int, int, int], Sequence[np.ndarray]]

# How many examples' rows are computed together: this takes a few milliseconds and some hundred KB.
AT_ONCE = 1 << 16


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
        problem: Callable[[int, int, int], TfdistError | None],
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
        self.spec = tree.map_structure(batch_parts.of_any_size, pipeline(0, 0, None).element_spec)
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

    def naming_bad_examples(self, first_batch: int, batches: int) -> contextlib.AbstractContextManager[Any]:
        return explained(lambda: self._problem(self._epoch, first_batch, batches), _ERRORS_OF_EXAMPLES)


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
        if division.speeds != self.processes.speeds:
            raise UsageError(
                "The strategy has other `speeds` than the world that these data were divided for",
                "pass `world=strategy.world` to `feed`",
            )
        data, size = batch
        first, _ = self.processes.part(size, self.rank)
        begin, end = division.part(size, index)
        part = tree.map_structure(lambda tensor: batch_parts.at_least_one(tensor[begin - first : end - first]), data)
        return part, (end - begin) / size

    def lengths_of_parts(self, state: Any, batch: Any, division: Division) -> list[Any]:
        return batch_parts.rows(batch[1], division)

    def local_examples(self, state: Any, batch: Any, division: Division) -> Any:
        return batch[0]


class LargeExamples:
    """Pipelines over examples in an order that is too long for one tensor, of which they compute one range at a time.

    Args:
        examples: a structure of tensors on the CPU, as `ArrayFeed` takes it; or a function that reads the examples with
            these numbers, int `[n]`, in a graph on the CPU.
        batch_size: the number of examples in a full global batch.
        order_of: the order of each pass.
        transform: turns the examples of a batch into those that a model sees; `None` leaves them as they are.
    """

    def __init__(self, examples: Any, batch_size: int, order_of: order.OrderOf, transform: Transform | None = None):
        self._examples_at = examples if callable(examples) else functools.partial(keras_data.gather, examples)
        self._order_of = functools.lru_cache(maxsize=2)(order_of)  # an order that is drawn is drawn once
        self._transform = transform
        self._dataset_of_part = functools.cache(self._make_dataset_of_part)
        self.batch_size = batch_size
        self.examples = len(order_of(0))
        self.num_batches = -(-self.examples // batch_size)

    def feed(self, world: World, problem: Callable[[], TfdistError | None] = lambda: None) -> FileFeed:
        """The batches as a feed, of which each process reads the parts of its replicas.

        Args:
            world: this process's place in the job.
            problem: returns the error of an example that was read, if there was any.
        """
        division = Division.among_processes(world)

        def pipeline(epoch: int, first_batch: int, end_batch: int | None) -> tf.data.Dataset:
            assert end_batch is None
            dataset = self.dataset(world.rank, division, epoch, first_batch)
            # A pool of its own, so that the operations of the model need not wait for reading.
            return with_options(dataset, cores(), True)

        # A few batches are read faster than a pipeline starts.
        read_batch = functools.partial(self._batch, world.rank, division)
        return FileFeed(
            pipeline, lambda *batches: problem(), self.examples, self.batch_size, world, read_batch=read_batch
        )

    def dataset(
        self, index: int, division: Division, epoch: int, first_batch: int, deterministic: bool = True
    ) -> tf.data.Dataset:
        """Part `index` of each batch of a pass, from batch `first_batch` on."""
        with tf.init_scope(), tf.device("CPU:0"):
            steps = (tf.constant(number, tf.int64) for number in (epoch, first_batch, self.num_batches))
            return self._dataset_of_part(index, division, deterministic)(*steps)

    def _batch(self, index: int, division: Division, epoch: int, number: int) -> Any:
        """Part `index` of one batch, read without a pipeline."""
        with tf.init_scope(), tf.device("CPU:0"):
            rows = [tf.constant(column) for column in self._rows(epoch, number, number + 1)]
            return self._read(index, division, *rows)

    def _make_dataset_of_part(
        self, index: int, division: Division, deterministic: bool
    ) -> Callable[..., tf.data.Dataset]:
        specs = [tf.TensorSpec([None, *row.shape[1:]], row.dtype) for row in self._rows(0, 0, 1)]

        def dataset(*steps: tf.Tensor) -> tf.data.Dataset:
            def cut(*rows: tf.Tensor) -> tf.data.Dataset:
                begins = tf.data.Dataset.range(0, tf.shape(rows[0], tf.int64)[0], self.batch_size)
                return begins.map(lambda begin: tuple(column[begin : begin + self.batch_size] for column in rows))

            read = tf.autograph.experimental.do_not_convert(functools.partial(self._read, index, division))
            batches = by_range(self._rows, specs, self.batch_size, steps).flat_map(cut)
            examples = batches.map(read, num_parallel_calls=tf.data.AUTOTUNE, deterministic=deterministic)
            return examples.prefetch(tf.data.AUTOTUNE)

        return graph_function(dataset)

    def _read(self, index: int, division: Division, *rows: tf.Tensor) -> Any:
        begin, end = division.part(batch_parts.length(rows[0]), index)
        numbers, *extras = (column[begin:end] for column in rows)
        data = self._examples_at(numbers)
        return data if self._transform is None else self._transform(data, *extras)

    def _rows(self, epoch: int, begin: int, end: int) -> Sequence[np.ndarray]:
        """The numbers of the examples of these batches, and the transform's extras for each of them."""
        indices = self._order_of(epoch)[begin * self.batch_size : end * self.batch_size]
        return indices, *(() if self._transform is None else self._transform.extras(epoch, indices))


@contextlib.contextmanager
def explained(
    explain: Callable[[], TfdistError | None], errors: tuple[type[Exception], ...] = (tf.errors.OpError,)
) -> Iterator[None]:
    """Replaces one of these errors by the error that `explain` returns, which names the bad example."""
    try:
        yield
    except errors as error:
        explanation = explain()
        if explanation is None:
            raise
        raise explanation from error


def with_options(dataset: tf.data.Dataset, threads: int | None, deterministic: bool) -> tf.data.Dataset:
    """Sets the options of a pipeline, which runs on a private pool of `threads` threads, or on TensorFlow's."""
    options = tf.data.Options()
    options.deterministic = deterministic
    # These pipelines need no optimization; to rewrite one, TensorFlow copies the arrays at each start.
    options.experimental_optimization.apply_default_optimizations = False
    if threads is not None:
        options.threading.private_threadpool_size = threads
        options.threading.max_intra_op_parallelism = 1
    # The batches are this rank's part already: a tf.distribute strategy must not shard them again.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return dataset.with_options(options)


def by_range(
    rows: Rows, specs: Sequence[tf.TensorSpec], length: int, steps: Sequence[tf.Tensor], at_once: int = 0
) -> tf.data.Dataset:
    """The rows of a few steps together, as a tuple of tensors; the next few are computed ahead, in NumPy.

    Args:
        rows: returns `length` rows per step; the last step may have fewer.
        specs: the rows' types and shapes.
        length: at least 1.
        steps: the epoch, the first step, and the step after the last: int64 scalars.
        at_once: the largest number of rows that are computed together, at most `AT_ONCE`, which is the default.
    """
    epoch, begin, end = steps
    steps_at_once = max(1, min(at_once or AT_ONCE, AT_ONCE) // length)

    @tf.autograph.experimental.do_not_convert
    def compute(first: tf.Tensor) -> tuple[tf.Tensor, ...]:
        last = tf.minimum(first + steps_at_once, end)
        columns = tf.numpy_function(
            lambda *numbers: rows(*map(int, numbers)), [epoch, first, last], [spec.dtype for spec in specs]
        )
        return tuple(tf.ensure_shape(column, spec.shape) for column, spec in zip(columns, specs, strict=True))

    return tf.data.Dataset.range(begin, end, steps_at_once).map(compute).prefetch(1)
