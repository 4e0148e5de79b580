"""Losses of Keras that divide by something else than the number of examples, in steps whose gradients are averaged.

The gradients of processes count by their numbers of examples, n of N (`tfdist.horovod.reduction`). That is right for a
mean over the examples. The gradient of another loss is multiplied by a factor first; its value stays that of the
process.

    loss of a process                                   factor
    a mean over d valid entries, of D in all processes  (d / D) / (n / N)
    a weighted mean, the sum of whose weights is d      the same
    a sum, of which the plain mean is meant             (1 / processes) / (n / N)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.groups import horovod as engine
from tfdist.groups import opaque
from tfdist.horovod import batches, names, operations
from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_patches


@functools.cache
def install() -> None:
    """From now on the losses of Keras obey this module in training steps with an optimizer that averages."""
    keras_patches.around("reduce_weighted_values", _reduced)


def _reduced(
    original: Callable[..., Any],
    values: Any,
    sample_weight: Any = None,
    mask: Any = None,
    reduction: str | None = "sum_over_batch_size",
    dtype: Any = None,
) -> Any:
    loss = original(values, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=dtype)
    batch = batches.current()
    if batch is None or batch.examples is None or loss.shape.rank != 0 or not _averages(batch.optimizer):
        return loss
    divisor = _divisor(loss, sample_weight, mask, reduction)
    return loss if divisor is None else _times_gradient(loss, _factor(batch, divisor))


def _averages(optimizer: Any) -> bool:
    around = None if optimizer is None else keras_patches.around_apply(optimizer)
    return bool(getattr(around, "weighs", False))


def _divisor(loss: Any, sample_weight: Any, mask: Any, reduction: str | None) -> Any:
    """What a loss is divided by, 1 for a sum; `None` if that is the number of its values."""
    if reduction == "sum":
        return tf.ones([], tf.float64)
    if reduction == "mean_with_sample_weight":
        weight = keras_internals.apply_mask(sample_weight, mask, dtype=loss.dtype, reduction=reduction)
        return None if weight is None else tf.reduce_sum(tf.cast(weight, tf.float64))
    if mask is not None and reduction in ("mean", "sum_over_batch_size"):
        return tf.reduce_sum(tf.cast(mask, tf.float64))
    return None


def _factor(batch: batches.Batch, divisor: Any) -> tf.Tensor:
    hvd = engine.load()
    examples = tf.cast(batch.examples, tf.float64)
    follows = [tf.convert_to_tensor(keras_internals.iterations(batch.optimizer))]  # the update of the step before
    with operations.named("the divisor of a loss"), tf.device("CPU:0"), tf.control_dependencies(follows):
        sent = opaque(tf.stop_gradient(tf.stack([divisor, examples])))
        of_all = hvd.allreduce(sent, op=hvd.Sum, name=names.next_name("tfdist.divisor"), ignore_name_scope=True)
        return tf.math.divide_no_nan(divisor * of_all[1], of_all[0] * examples)


@tf.custom_gradient
def _times_gradient(value: Any, factor: Any) -> Any:
    return tf.identity(value), lambda given: (given * tf.cast(factor, given.dtype), None)
