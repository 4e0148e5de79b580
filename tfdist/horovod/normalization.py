"""Batch normalization over the batches of all processes, for Keras 3."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.groups import horovod as engine
from tfdist.groups import opaque
from tfdist.horovod import operations, reduction
from tfdist.internals import keras as keras_internals


@keras.saving.register_keras_serializable(package="tfdist.horovod")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """A `keras.layers.BatchNormalization` that uses the mean and variance of the global batch in training.

    Args:
        fused: must be `False` or `None`, as in Horovod; Keras 3 has no such argument.
        options: options of `keras.layers.BatchNormalization`.

    Raises:
        UsageError: `fused` is true.
    """

    def __init__(self, fused: bool | None = False, **options: Any):
        if fused:
            raise UsageError("SyncBatchNormalization does not support `fused=True`", "remove `fused`")
        super().__init__(**options)

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        """Returns the mean and the variance of each channel over all processes."""
        if engine.load().size() == 1:
            return super()._moments(inputs, mask)
        axes = keras_internals.reduction_axes(self)
        valid = tf.ones_like(inputs)
        if mask is not None:
            valid = tf.cast(tf.broadcast_to(tf.cast(mask, "bool")[..., tf.newaxis], tf.shape(inputs)), inputs.dtype)
        x = tf.math.multiply_no_nan(inputs, valid)
        local = tf.stack([tf.reduce_sum(terms, axes) for terms in (x, tf.square(x), valid)])
        total, squares, count = tf.unstack(_sum_over_processes(local, operations.next_name(type(self).__name__)))
        mean = tf.math.divide_no_nan(total, count)
        return mean, tf.maximum(tf.math.divide_no_nan(squares, count) - tf.square(mean), 0.0)


def _sum_over_processes(local: tf.Tensor, name: str) -> tf.Tensor:
    """Returns the sums over the processes; the processes' gradients are weighted like those of their losses."""
    batch = reduction.current_batch()
    examples = batch.examples if reduction.averages_by_examples(batch.optimizer, default=True) else None

    @tf.custom_gradient
    def summed(local: tf.Tensor) -> Any:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            weight = tf.cast(1 if examples is None else examples, upstream.dtype)
            return tf.math.divide_no_nan(_all_reduced(upstream * weight, f"{name}.gradient"), weight)

        return _all_reduced(local, name), gradient

    return summed(local)


def _all_reduced(tensor: tf.Tensor, name: str) -> tf.Tensor:
    hvd = engine.load()
    with operations.named("the moments of `SyncBatchNormalization`"):
        return hvd.allreduce(opaque(tensor), op=hvd.Sum, name=name, ignore_name_scope=True)
