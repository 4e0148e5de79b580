"""Pipelines as `tf.data.Dataset`s: their options, the order of an epoch range by range, and decoded examples.

    order of the epoch ──> rows of a range of steps, in NumPy, one range ahead ──> the rows of each step or example

Each graph is traced once, and gets the number of the epoch as an argument.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.input import order
from tfdist.data.input.decoding import Decoder

# `rows(epoch, begin, end)`: arrays with one row per example of the steps `begin` to `end - 1`.
Rows = Callable[[int, int, int], Sequence[np.ndarray]]

# How many examples' rows are computed together: this takes a few milliseconds and some hundred KB.
AT_ONCE = 1 << 16
# How many examples `all_examples` decodes into one pair of arrays.
_DECODED_TOGETHER = 64


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


def by_step(rows: Rows, specs: Sequence[tf.TensorSpec], length: int, steps: tuple[tf.Tensor, ...]) -> tf.data.Dataset:
    """The rows of each step, as a tuple of tensors `[length, ...]`; the last step may have fewer.

    Args:
        rows: returns `length` rows per step; the last step may have fewer.
        specs: the rows' types and shapes.
        length: at least 1.
        steps: the epoch, the first step, and the step after the last: int64 scalars.
    """

    def cut(*joined: tf.Tensor) -> tf.data.Dataset:
        begins = tf.data.Dataset.range(0, tf.shape(joined[0], tf.int64)[0], length)
        return begins.map(lambda begin: tuple(column[begin : begin + length] for column in joined))

    return _by_range(rows, specs, length, steps, AT_ONCE).flat_map(cut)


def _by_example(
    rows: Rows, specs: Sequence[tf.TensorSpec], length: int, steps: tuple[tf.Tensor, ...], at_once: int
) -> tf.data.Dataset:
    """As `by_step`, but the row of each example; `at_once` rows are computed together."""
    return _by_range(rows, specs, length, steps, at_once).flat_map(
        lambda *joined: tf.data.Dataset.from_tensor_slices(joined)
    )


def _by_range(
    rows: Rows, specs: Sequence[tf.TensorSpec], length: int, steps: tuple[tf.Tensor, ...], at_once: int
) -> tf.data.Dataset:
    epoch, begin, end = steps
    steps_at_once = max(1, at_once // length)

    @tf.autograph.experimental.do_not_convert
    def compute(first: tf.Tensor) -> tuple[tf.Tensor, ...]:
        last = tf.minimum(first + steps_at_once, end)
        columns = tf.numpy_function(
            lambda *numbers: rows(*map(int, numbers)), [epoch, first, last], [spec.dtype for spec in specs]
        )
        return tuple(tf.ensure_shape(column, spec.shape) for column, spec in zip(columns, specs, strict=True))

    return tf.data.Dataset.range(begin, end, steps_at_once).map(compute).prefetch(1)


class DecodedBatches:
    """Batches of examples that are decoded in parallel, for any epoch and from any batch on.

    Args:
        decoder: decodes the examples.
        parts_of: this rank's examples in each batch of an epoch.
        draws: the number of random numbers per example.
        draws_of: the random numbers of an epoch: float32 `[n, draws]` for the examples int `[n]`.
        deterministic: whether the batches come in order.
        read_ahead: how many examples are read ahead together, in the order in which they are stored; 0 for none.
    """

    def __init__(
        self,
        decoder: Decoder,
        parts_of: Callable[[int], order.Parts],
        draws: int = 0,
        draws_of: Callable[[int], Callable[[np.ndarray], np.ndarray]] | None = None,
        deterministic: bool = True,
        read_ahead: int = 0,
    ):
        self._decoder = decoder
        # An epoch's order and random numbers are drawn once, even if training alternates with reading another epoch.
        self._parts_of = functools.lru_cache(maxsize=2)(parts_of)
        self._draws_of = functools.lru_cache(maxsize=2)(draws_of) if draws_of else None
        self._specs = [tf.TensorSpec([None], order.index_type(len(decoder))), tf.TensorSpec([None, draws], tf.float32)]
        self._deterministic = deterministic
        self._read_ahead = read_ahead
        self._datasets: dict[int, Callable[..., tf.data.Dataset]] = {}

    def of_epoch(self, epoch: int, first_batch: int = 0, end_batch: int | None = None) -> tf.data.Dataset:
        """The batches from number `first_batch` on, up to but not including `end_batch`."""
        runs = self._parts_of(epoch).runs(first_batch)
        if end_batch is not None:
            runs = [(begin, min(end, end_batch), length) for begin, end, length in runs if begin < end_batch]
        datasets = [self._of_run(epoch, *run) for run in runs or [(0, 0, 1)]]
        return functools.reduce(tf.data.Dataset.concatenate, datasets).prefetch(tf.data.AUTOTUNE)

    def _of_run(self, epoch: int, begin: int, end: int, length: int) -> tf.data.Dataset:
        if length not in self._datasets:
            self._datasets[length] = self._make_datasets(length)
        with tf.init_scope(), tf.device("CPU:0"):
            return self._datasets[length](*(tf.constant(number, tf.int64) for number in (epoch, begin, end)))

    def _make_datasets(self, length: int) -> Callable[..., tf.data.Dataset]:
        """A graph for batches of `length` examples, of which the last may have fewer: `dataset(epoch, begin, end)`."""
        decoder, parallel = tf.autograph.experimental.do_not_convert(self._decoder.__call__), tf.data.AUTOTUNE
        at_once = min(self._read_ahead or AT_ONCE, AT_ONCE)

        @tf.function(autograph=False)
        def dataset(epoch: tf.Tensor, begin: tf.Tensor, end: tf.Tensor) -> tf.data.Dataset:
            examples = _by_example(self._rows, self._specs, max(length, 1), (epoch, begin, end), at_once)
            decoded = examples.map(decoder, num_parallel_calls=parallel, deterministic=self._deterministic)
            if length:
                return decoded.batch(length, num_parallel_calls=parallel, deterministic=self._deterministic)
            # A rank that has no part of a batch gets an empty batch.
            empty = tf.nest.map_structure(lambda spec: tf.zeros([0, *spec.shape], spec.dtype), decoded.element_spec)
            return tf.data.Dataset.from_tensors(empty).repeat(end - begin)

        return dataset

    def _rows(self, epoch: int, begin: int, end: int) -> Sequence[np.ndarray]:
        """The numbers of the examples of these batches, and their random numbers."""
        indices = self._parts_of(epoch).joined(begin, end).astype(self._specs[0].dtype.as_numpy_dtype, copy=False)
        if self._read_ahead:
            self._decoder.will_read(indices)
        if self._draws_of is None:
            return indices, np.zeros((len(indices), 0), np.float32)
        return indices, self._draws_of(epoch)(indices)


def all_examples(decoder: Decoder) -> Any:
    """All examples in stored order, as pairs of NumPy arrays of a few examples each."""
    stored = order.Parts(order.as_stored(len(decoder)), _DECODED_TOGETHER)
    return DecodedBatches(decoder, lambda epoch: stored).of_epoch(0).as_numpy_iterator()


def numbers_of_good(decoder: Decoder) -> np.ndarray:
    """The numbers of the examples that can be decoded, in order: int64 `[n]`."""

    @tf.autograph.experimental.do_not_convert
    def decode(index: tf.Tensor) -> tuple[tf.Tensor, ...]:
        x, y = decoder(index, tf.zeros(0))
        return index, tf.reduce_max(x), tf.reduce_max(y)  # TensorFlow would skip a computation without a result

    numbers = tf.data.Dataset.range(len(decoder))
    good = numbers.map(decode, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True).ignore_errors()
    return np.fromiter((index for index, _, _ in good.as_numpy_iterator()), np.int64)
