"""Batches of decoded examples as a `tf.data.Dataset`, and the options of every pipeline."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.input import order, ranges
from tfdist.data.input.decoding import Decoder

# Examples decoded into one piece.
_AT_ONCE = 64


def with_options(dataset: tf.data.Dataset, threads: int | None, deterministic: bool) -> tf.data.Dataset:
    """A pipeline with a private pool of `threads` threads, or TensorFlow's own."""
    options = tf.data.Options()
    options.deterministic = deterministic
    # These pipelines are written as they shall run; to rewrite one, TensorFlow copies the arrays at each start.
    options.experimental_optimization.apply_default_optimizations = False
    if threads is not None:
        options.threading.private_threadpool_size = threads
        options.threading.max_intra_op_parallelism = 1
    # The batches are this rank's part already: a tf.distribute strategy must not shard them again.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return dataset.with_options(options)


class DecodedBatches:
    """Batches of examples that are decoded in parallel, in any epoch from any batch on.

    Args:
        decoder: makes the examples.
        parts_of: this rank's examples in each batch of an epoch.
        draws: the number of random numbers per example.
        draws_of: the random numbers of an epoch: float32 `[n, draws]` for the examples int `[n]`.
        deterministic: whether the batches come in order.
        read_ahead: so many examples are read ahead together, in the order in which they are stored; 0 reads none ahead.
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
        # What is drawn is drawn once per epoch; training and a look at another epoch may alternate.
        self._parts_of = functools.lru_cache(maxsize=2)(parts_of)
        self._draws_of = functools.lru_cache(maxsize=2)(draws_of) if draws_of else None
        self._specs = [tf.TensorSpec([None], order.index_type(len(decoder))), tf.TensorSpec([None, draws], tf.float32)]
        self._deterministic = deterministic
        self._read_ahead = read_ahead
        self._datasets: dict[int, Callable[..., tf.data.Dataset]] = {}

    def of_epoch(self, epoch: int, first_batch: int = 0, end_batch: int | None = None) -> tf.data.Dataset:
        """The batches from number `first_batch` on, before `end_batch` if given."""
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
        """A function, traced once for all epochs, for batches of `length` examples of which the last may have fewer."""
        decoder, parallel = tf.autograph.experimental.do_not_convert(self._decoder.__call__), tf.data.AUTOTUNE
        at_once = min(self._read_ahead or ranges.AT_ONCE, ranges.AT_ONCE)

        @tf.function(autograph=False)
        def dataset(epoch: tf.Tensor, begin: tf.Tensor, end: tf.Tensor) -> tf.data.Dataset:
            examples = ranges.by_example(self._rows, self._specs, max(length, 1), (epoch, begin, end), at_once)
            decoded = examples.map(decoder, num_parallel_calls=parallel, deterministic=self._deterministic)
            if length:
                return decoded.batch(length, num_parallel_calls=parallel, deterministic=self._deterministic)
            # A rank may have no part of a batch; its batch then has no examples.
            nothing = tf.nest.map_structure(lambda spec: tf.zeros([0, *spec.shape], spec.dtype), decoded.element_spec)
            return tf.data.Dataset.from_tensors(nothing).repeat(end - begin)

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
    stored = order.Parts(order.as_stored(len(decoder)), _AT_ONCE)
    return DecodedBatches(decoder, lambda epoch: stored).of_epoch(0).as_numpy_iterator()


def numbers_of_good(decoder: Decoder) -> np.ndarray:
    """The numbers of the examples that can be decoded, in order: int64 `[n]`."""

    @tf.autograph.experimental.do_not_convert
    def decode(index: tf.Tensor) -> tuple[tf.Tensor, ...]:
        x, y = decoder(index, tf.zeros(0))
        return index, tf.reduce_max(x), tf.reduce_max(y)  # what is not asked for is not computed

    numbers = tf.data.Dataset.range(len(decoder))
    good = numbers.map(decode, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True).ignore_errors()
    return np.fromiter((index for index, _, _ in good.as_numpy_iterator()), np.int64)
