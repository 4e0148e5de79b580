"""Examples by their numbers, in an order that is too long to be drawn: arrays, or the user's own reader."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.input import ranges, tf_datasets
from tfdist.data.input.array_feed import OrderOf
from tfdist.data.input.batch_parts import length
from tfdist.data.input.division import Division
from tfdist.data.input.file_feed import FileFeed
from tfdist.data.input.transforms import Transform
from tfdist.errors import DataError
from tfdist.internals import keras_data
from tfdist.jobs.job_environment import cores
from tfdist.jobs.world import World


class LargePasses:
    """Passes over examples as pipelines, which know a range of the order at a time.

    Args:
        examples: a structure of tensors on the CPU, as `ArrayFeed` takes it; or what reads the examples with these
            numbers, int `[n]`, in a graph on the CPU.
        batch_size: examples in a full global batch.
        order_of: the order of each pass.
        transform: what is done to a batch, if anything.
    """

    def __init__(self, examples: Any, batch_size: int, order_of: OrderOf, transform: Transform | None = None):
        self._examples_at = examples if callable(examples) else functools.partial(keras_data.gather, examples)
        self._order_of = functools.lru_cache(maxsize=2)(order_of)  # one that is drawn is drawn once
        self._transform = transform
        self._datasets: dict[tuple[int, Division, bool], Callable[..., tf.data.Dataset]] = {}
        self.batch_size = batch_size
        self.examples = len(order_of(0))
        self.num_batches = -(-self.examples // batch_size)

    def dataset(
        self, index: int, division: Division, epoch: int, first_batch: int, deterministic: bool = True
    ) -> tf.data.Dataset:
        """Part `index` of each batch of a pass, from batch `first_batch` on."""
        asked = (index, division, deterministic)
        with tf.init_scope(), tf.device("CPU:0"):
            if asked not in self._datasets:
                self._datasets[asked] = self._make_datasets(*asked)
            steps = epoch, first_batch, self.num_batches
            return self._datasets[asked](*(tf.constant(number, tf.int64) for number in steps))

    def batch(self, index: int, division: Division, epoch: int, number: int) -> Any:
        """Part `index` of one batch, read now."""
        with tf.init_scope(), tf.device("CPU:0"):
            rows = [tf.constant(of_each) for of_each in self._rows(epoch, number, number + 1)]
            return self._read(index, division, *rows)

    def _make_datasets(self, index: int, division: Division, deterministic: bool) -> Callable[..., tf.data.Dataset]:
        specs = [tf.TensorSpec([None, *row.shape[1:]], row.dtype) for row in self._rows(0, 0, 1)]

        @tf.function(autograph=False)
        def dataset(*steps: tf.Tensor) -> tf.data.Dataset:
            @tf.autograph.experimental.do_not_convert
            def read(*rows: tf.Tensor) -> Any:
                return self._read(index, division, *rows)

            batches = ranges.by_step(self._rows, specs, self.batch_size, steps)
            return batches.map(read, num_parallel_calls=tf.data.AUTOTUNE, deterministic=deterministic).prefetch(
                tf.data.AUTOTUNE
            )

        return dataset

    def _read(self, index: int, division: Division, *rows: tf.Tensor) -> Any:
        begin, end = division.part(length(rows[0]), index)
        numbers, *extras = (of_each[begin:end] for of_each in rows)
        data = self._examples_at(numbers)
        return data if self._transform is None else self._transform(data, *extras)

    def _rows(self, epoch: int, begin: int, end: int) -> Sequence[np.ndarray]:
        """The numbers of the examples of these batches, and what `transform` must know of each."""
        indices = self._order_of(epoch)[begin * self.batch_size : end * self.batch_size]
        return indices, *(() if self._transform is None else self._transform.extras(epoch, indices))


class LargeFeed(FileFeed):
    """The batches of `passes`, of which each process reads the parts of its replicas.

    Args:
        passes: reads the examples.
        world: this process' place.
        problem: what was wrong with examples that were read, if anything.
    """

    def __init__(self, passes: LargePasses, world: World, problem: Callable[[], DataError | None] = lambda: None):
        def pipeline(epoch: int, first_batch: int, end_batch: int | None) -> tf.data.Dataset:
            assert end_batch is None
            dataset = passes.dataset(world.rank, Division.among_processes(world), epoch, first_batch)
            # The model's operations shall not wait behind reading, however few threads they have.
            return tf_datasets.with_options(dataset, cores(), True)

        super().__init__(pipeline, lambda *batches: problem(), passes.examples, passes.batch_size, world)
        self._batch = functools.partial(passes.batch, world.rank, Division.among_processes(world))

    def range(self, epoch: int, first_batch: int, end_batch: int | None) -> Any:
        if end_batch is None:
            return super().range(epoch, first_batch, None)
        # To start a pipeline takes longer than to read a few batches.
        return (self._batch(epoch, number) for number in range(first_batch, min(end_batch, self.num_batches)))


class LargeArrayFeed(LargeFeed):
    """Arrays of so many examples that `ArrayFeed` would draw an order too long for it.

    Args:
        arrays: as for `ArrayFeed`, on the CPU; also an attribute.
        batch_size: as for `ArrayFeed`, as `order_of` and `transform`.
        order_of: the order of each pass.
        transform: what is done to a batch, if anything.
    """

    def __init__(self, arrays: Any, batch_size: int, order_of: OrderOf, transform: Transform | None = None):
        self.arrays = arrays
        super().__init__(LargePasses(arrays, batch_size, order_of, transform), World())
