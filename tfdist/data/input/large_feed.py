"""Examples in an order that is too long for one tensor: of large arrays, or of the user's own reader by number."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.input import tf_datasets
from tfdist.data.input.array_feed import MakeDataset, OrderOf
from tfdist.data.input.arrays import Transform
from tfdist.data.input.batch_parts import length
from tfdist.data.input.division import Division
from tfdist.data.input.file_feed import FileFeed
from tfdist.errors import DataError
from tfdist.internals import keras_data
from tfdist.jobs.job_environment import cores
from tfdist.jobs.world import World


class LargeExamples:
    """Pipelines over examples that compute one range of the order at a time.

    Args:
        examples: a structure of tensors on the CPU, as `ArrayFeed` takes it; or a function that reads the examples with
            these numbers, int `[n]`, in a graph on the CPU.
        batch_size: the number of examples in a full global batch.
        order_of: the order of each pass.
        transform: turns the examples of a batch into those that a model sees; `None` leaves them as they are.
    """

    def __init__(self, examples: Any, batch_size: int, order_of: OrderOf, transform: Transform | None = None):
        self._examples_at = examples if callable(examples) else functools.partial(keras_data.gather, examples)
        self._order_of = functools.lru_cache(maxsize=2)(order_of)  # an order that is drawn is drawn once
        self._transform = transform
        self._datasets: dict[tuple[int, Division, bool], MakeDataset] = {}
        self.batch_size = batch_size
        self.examples = len(order_of(0))
        self.num_batches = -(-self.examples // batch_size)

    def feed(self, world: World, problem: Callable[[], DataError | None] = lambda: None) -> FileFeed:
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
            return tf_datasets.with_options(dataset, cores(), True)

        # A few batches are read faster than a pipeline starts.
        read_batch = functools.partial(self._batch, world.rank, division)
        return FileFeed(
            pipeline, lambda *batches: problem(), self.examples, self.batch_size, world, read_batch=read_batch
        )

    def dataset(
        self, index: int, division: Division, epoch: int, first_batch: int, deterministic: bool = True
    ) -> tf.data.Dataset:
        """Part `index` of each batch of a pass, from batch `first_batch` on."""
        key = (index, division, deterministic)
        with tf.init_scope(), tf.device("CPU:0"):
            if key not in self._datasets:
                self._datasets[key] = self._make_datasets(*key)
            steps = epoch, first_batch, self.num_batches
            return self._datasets[key](*(tf.constant(number, tf.int64) for number in steps))

    def _batch(self, index: int, division: Division, epoch: int, number: int) -> Any:
        """Part `index` of one batch, read without a pipeline."""
        with tf.init_scope(), tf.device("CPU:0"):
            rows = [tf.constant(column) for column in self._rows(epoch, number, number + 1)]
            return self._read(index, division, *rows)

    def _make_datasets(self, index: int, division: Division, deterministic: bool) -> MakeDataset:
        specs = [tf.TensorSpec([None, *row.shape[1:]], row.dtype) for row in self._rows(0, 0, 1)]

        @tf.function(autograph=False)
        def dataset(*steps: tf.Tensor) -> tf.data.Dataset:
            @tf.autograph.experimental.do_not_convert
            def read(*rows: tf.Tensor) -> Any:
                return self._read(index, division, *rows)

            batches = tf_datasets.by_step(self._rows, specs, self.batch_size, steps)
            return batches.map(read, num_parallel_calls=tf.data.AUTOTUNE, deterministic=deterministic).prefetch(
                tf.data.AUTOTUNE
            )

        return dataset

    def _read(self, index: int, division: Division, *rows: tf.Tensor) -> Any:
        begin, end = division.part(length(rows[0]), index)
        numbers, *extras = (column[begin:end] for column in rows)
        data = self._examples_at(numbers)
        return data if self._transform is None else self._transform(data, *extras)

    def _rows(self, epoch: int, begin: int, end: int) -> Sequence[np.ndarray]:
        """The numbers of the examples of these batches, and the transform's extras for each of them."""
        indices = self._order_of(epoch)[begin * self.batch_size : end * self.batch_size]
        return indices, *(() if self._transform is None else self._transform.extras(epoch, indices))
