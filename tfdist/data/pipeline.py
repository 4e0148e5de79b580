"""Batches as a `tf.data.Dataset`: what a feed of arrays gives, and the options of every pipeline."""

from __future__ import annotations

import tensorflow as tf

from tfdist.data.feed import ArrayFeed
from tfdist.world import World


def of_feed(feed: ArrayFeed, world: World, epoch: int, first_batch: int, deterministic: bool) -> tf.data.Dataset:
    """This rank's part of each global batch of a pass, from batch `first_batch` on; one gather a batch."""
    with tf.init_scope(), tf.device("CPU:0"):
        state = feed.start(epoch, first_batch)

    @tf.autograph.experimental.do_not_convert
    def gather(step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        data, _ = feed.batches.part(state, feed.batches.fetch(state, step), world.rank, world.world_size)
        return data

    steps = tf.data.Dataset.range(first_batch, feed.num_batches, output_type=tf.int32)
    batches = steps.map(gather, num_parallel_calls=tf.data.AUTOTUNE, deterministic=deterministic)
    return batches.prefetch(tf.data.AUTOTUNE)


def with_options(dataset: tf.data.Dataset, threads: int | None, deterministic: bool) -> tf.data.Dataset:
    """A pipeline with a private pool of `threads` threads, or TensorFlow's own."""
    options = tf.data.Options()
    options.deterministic = deterministic
    if threads is not None:
        options.threading.private_threadpool_size = threads
        options.threading.max_intra_op_parallelism = 1
    # The batches are this rank's part already: a tf.distribute strategy must not shard them again.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return dataset.with_options(options)
