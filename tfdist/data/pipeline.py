"""Arrays to batches: the one place that turns an order of examples into a `tf.data.Dataset`."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfdist.data.order import part
from tfdist.world import World


def to_tensors(x: np.ndarray, y: np.ndarray) -> tuple[tf.Tensor, tf.Tensor]:
    """Copies of x and y in the host's memory, where tf.data works, whatever device is the current one."""
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.constant(x), tf.constant(y)


def batches(x: tf.Tensor, y: tf.Tensor, order: np.ndarray, global_batch_size: int, world: World) -> tf.data.Dataset:
    """This rank's part of each global batch, one gather a batch.

    Args:
        x: `[N, ...]`.
        y: `[N]`.
        order: int32 `[N]`, the indices in the order of the epoch.
        global_batch_size: examples a step over all ranks.
        world: this process' place.

    Returns:
        A dataset of ceil(N / global_batch_size) pairs (x, y), in order.
    """
    examples = len(order)
    with tf.init_scope(), tf.device("CPU:0"):
        indices = tf.constant(order)

    def gather(batch: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        first = batch * global_batch_size
        size = tf.minimum(tf.constant(global_batch_size, tf.int64), examples - first)
        begin, end = part(size, world.rank, world.world_size)
        mine = indices[first + begin : first + end]
        return tf.gather(x, mine), tf.gather(y, mine)

    count = -(-examples // global_batch_size)
    dataset = tf.data.Dataset.range(count).map(gather, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    return dataset.prefetch(tf.data.AUTOTUNE).with_options(_options())


def _options() -> tf.data.Options:
    options = tf.data.Options()
    options.deterministic = True
    # The batches are this rank's part already: a tf.distribute strategy must not shard them again.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return options
