"""What a step computes of a process' part of a global batch, where each process trains by itself.

A process that trains apart (`local_sgd`, `gossip`, `mpi_split`) takes Keras' own step on its part of each batch: what
is a mean over the examples is the mean of its part. Its share is its fraction of the examples of the global batch; the
shares of all processes add up to 1. In three places it counts:

| what | value in each process |
|---|---|
| a loss with Keras' reduction "sum" | its sum / share, as that of the global batch: weights are averaged later |
| a number that a step gives to a `Mean` metric | its value, with the weight share: all processes count one step |
| a number that a step returns in its logs | its value * share, so that the sum over the processes is a mean |
"""

from __future__ import annotations

import contextlib
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfdist.internals import keras_patches

# A float of 1.0, or a float64 scalar tensor where it varies.
Share: TypeAlias = float | tf.Tensor
_MEAN = "sum_over_batch_size"  # Keras' default reduction


def of_share(share: Share) -> contextlib.AbstractContextManager[None]:
    """The context of a step on a part of a global batch with this share of its examples."""
    if _is_whole(share):
        return contextlib.nullcontext()

    def reduce_values(original: Any, values: Any, sample_weight: Any = None, reduction: Any = _MEAN) -> Any:
        value = original(values, sample_weight, reduction)
        is_sum = reduction == "sum" and tuple(values.shape) not in ((), (0,))
        return tf.math.divide_no_nan(value, tf.cast(share, value.dtype)) if is_sum else value

    def update_mean(original: Any, metric: Any, values: Any, sample_weight: Any = None) -> Any:
        values = keras.ops.convert_to_tensor(values)
        if len(values.shape) == 0 and sample_weight is None:
            sample_weight = share
        return original(metric, values, sample_weight)

    return keras_patches.replaced({"reduce_values": reduce_values, "mean_update_state": update_mean})


def weighed(share: Share, logs: Any) -> Any:
    """What a step on such a part returns in its logs, as float32."""
    numbers = tf.nest.map_structure(lambda one: tf.cast(keras.ops.convert_to_tensor(one), tf.float32), logs)
    if _is_whole(share):
        return numbers
    return tf.nest.map_structure(lambda one: tf.math.multiply_no_nan(one, tf.cast(share, one.dtype)), numbers)


def _is_whole(share: Share) -> bool:
    return isinstance(share, float) and share == 1.0
