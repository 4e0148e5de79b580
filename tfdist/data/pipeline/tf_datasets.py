"""Batches as a `tf.data.Dataset`: of a feed of arrays, of files; and the options of every pipeline."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.cluster.world import World
from tfdist.data.pipeline.array_feed import ArrayFeed
from tfdist.data.pipeline.decoding import Decoder

# Examples decoded into one piece.
_AT_ONCE = 64


def of_feed(feed: ArrayFeed, world: World, epoch: int, first_batch: int, deterministic: bool) -> tf.data.Dataset:
    """This rank's part of each global batch of a pass, from batch `first_batch` on; one gather a batch."""
    with tf.init_scope(), tf.device("CPU:0"):
        _, positions = feed.start(epoch, first_batch)
        dataset = feed.datasets(world.rank, world.world_size, deterministic)
        return dataset(tf.constant(first_batch, tf.int64), *positions)


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


def of_examples(decoder: Decoder, batches: list[np.ndarray], table: np.ndarray, deterministic: bool) -> tf.data.Dataset:
    """Batches of examples that are decoded in parallel.

    Args:
        decoder: makes the examples.
        batches: the numbers of the examples of each batch, int32 `[b]`.
        table: the random numbers of all examples, float32 `[N, draws]`.
        deterministic: whether the batches come in order.
    """
    datasets = [_of_run(decoder, run, table, deterministic) for run in _runs(batches) or [[]]]
    return functools.reduce(tf.data.Dataset.concatenate, datasets).prefetch(tf.data.AUTOTUNE)


def all_examples(decoder: Decoder) -> Any:
    """All examples in stored order, as pairs of NumPy arrays of a few examples each."""
    numbers = np.arange(len(decoder), dtype=np.int32)
    batches = np.split(numbers, range(_AT_ONCE, len(numbers), _AT_ONCE))
    return of_examples(decoder, batches, np.zeros((len(numbers), 0), np.float32), True).as_numpy_iterator()


def numbers_of_good(decoder: Decoder) -> list[int]:
    """The numbers of the examples that can be decoded, in order."""

    @tf.autograph.experimental.do_not_convert
    def decode(index: tf.Tensor) -> tuple[tf.Tensor, ...]:
        x, y = decoder(index, tf.zeros(0))
        return index, tf.reduce_max(x), tf.reduce_max(y)  # what is not asked for is not computed

    numbers = tf.data.Dataset.range(len(decoder), output_type=tf.int32)
    good = numbers.map(decode, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True).ignore_errors()
    return [int(index) for index, _, _ in good.as_numpy_iterator()]


def _runs(batches: list[np.ndarray]) -> list[list[np.ndarray]]:
    """Batches that follow each other and are of one length, or shorter at the end: few runs keep all cores decoding."""
    runs: list[list[np.ndarray]] = []
    for batch in batches:
        goes_on = runs and len(runs[-1][-1]) == len(runs[-1][0]) and 0 < len(batch) <= len(runs[-1][0])
        if goes_on or (runs and not len(batch) and not len(runs[-1][0])):
            runs[-1].append(batch)
        else:
            runs.append([batch])
    return runs


def _of_run(decoder: Decoder, batches: list[np.ndarray], table: np.ndarray, deterministic: bool) -> tf.data.Dataset:
    indices = np.concatenate(batches) if batches else np.zeros(0, np.int32)
    length = len(batches[0]) if batches else 1
    with tf.init_scope(), tf.device("CPU:0"):
        return decoder.datasets(length, table.shape[1], deterministic)(indices, table[indices], len(batches))
