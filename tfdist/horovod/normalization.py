"""Batch normalization over the batches of all processes, for Keras 3."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.groups import horovod as engine
from tfdist.groups import opaque
from tfdist.horovod import batches, names, operations
from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_patches


@keras.saving.register_keras_serializable(package="tfdist.horovod")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """`keras.layers.BatchNormalization`, whose mean and variance in training are those of the joined batch.

    Args:
        fused: accepted as `False` or `None`, as in Horovod; Keras 3 has no such argument.
        options: those of `keras.layers.BatchNormalization`.

    Raises:
        UsageError: `fused` is true.
    """

    def __init__(self, fused: bool | None = False, **options: Any):
        if fused:
            raise UsageError("SyncBatchNormalization does not support `fused=True`", "leave `fused` out")
        super().__init__(**options)

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        """The mean and the variance of each channel over all processes."""
        if engine.load().size() == 1:
            return super()._moments(inputs, mask)
        axes = keras_internals.reduction_axes(self)
        valid = tf.ones_like(inputs)
        if mask is not None:
            valid = tf.cast(tf.broadcast_to(tf.cast(mask, "bool")[..., tf.newaxis], tf.shape(inputs)), inputs.dtype)
        x = tf.math.multiply_no_nan(inputs, valid)
        local = tf.stack([tf.reduce_sum(one, axes) for one in (x, tf.square(x), valid)])
        total, squares, count = tf.unstack(_sum_over_processes(local, names.next_name(type(self).__name__)))
        mean = tf.math.divide_no_nan(total, count)
        return mean, tf.maximum(tf.math.divide_no_nan(squares, count) - tf.square(mean), 0.0)


def _sum_over_processes(local: tf.Tensor, name: str) -> tf.Tensor:
    """The sums over the processes; what their losses say of them counts as the gradients of these losses do."""
    batch = batches.current()
    around = None if batch is None or batch.optimizer is None else keras_patches.around_apply(batch.optimizer)
    examples = batch.examples if batch is not None and getattr(around, "weighs", True) else None

    @tf.custom_gradient
    def summed(local: tf.Tensor) -> Any:
        def gradient(given: tf.Tensor) -> tf.Tensor:
            weight = tf.cast(1 if examples is None else examples, given.dtype)
            return tf.math.divide_no_nan(_all_reduced(given * weight, f"{name}.gradient"), weight)

        return _all_reduced(local, name), gradient

    return summed(local)


def _all_reduced(tensor: tf.Tensor, name: str) -> tf.Tensor:
    hvd = engine.load()
    with operations.named("the moments of `SyncBatchNormalization`"):
        return hvd.allreduce(opaque(tensor), op=hvd.Sum, name=name, ignore_name_scope=True)
