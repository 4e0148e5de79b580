"""Keras' `BatchNormalization` with the statistics of each replica's examples; written for Keras 3.15.1.

What the layer computes of several examples together is traced as calls of functions, which the partitioner computes on
each replica's part (`tfdist.spmd.per_replica`). `tests/contract/test_batch_norm.py` fails when Keras' layer changes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras import ops
from keras.src import backend


@contextlib.contextmanager
def of_each_replica(prefix: str) -> Iterator[None]:
    """In this context layers that are not `synchronized` are traced so, in training, without masks and renorm.

    The names of the functions are `prefix` and "moments", "normalized", "gradient".
    """
    original = keras.layers.BatchNormalization.call

    @functools.wraps(original)
    def call(layer: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        left_out = layer.synchronized or layer.renorm or mask is not None
        if not training or not layer.trainable or left_out:
            return original(layer, inputs, training=training, mask=mask)
        return _called(layer, inputs, prefix)

    keras.layers.BatchNormalization.call = call
    try:
        yield
    finally:
        keras.layers.BatchNormalization.call = original


def _called(layer: Any, inputs: Any, prefix: str) -> Any:
    """What the layer's own `call` computes in training."""
    x = ops.cast(inputs, backend.result_type(inputs.dtype, "float32"))
    channels = x.shape[layer.axis]
    gamma = ops.cast(layer.gamma, x.dtype) if layer.scale else tf.ones([channels], x.dtype)
    beta = ops.cast(layer.beta, x.dtype) if layer.center else tf.zeros([channels], x.dtype)
    functions = _Functions(x.shape.rank, layer.axis % x.shape.rank, channels, layer.epsilon, x.dtype, prefix)
    mean, variance = functions.moments(x)
    for moving, value in ((layer.moving_mean, mean), (layer.moving_variance, variance)):
        moving.assign(ops.cast(moving, x.dtype) * layer.momentum + value * (1.0 - layer.momentum))
    outputs = functions.normalized(x, gamma, beta)
    outputs.set_shape(inputs.shape)
    return ops.cast(outputs, layer.compute_dtype)


class _Functions:
    """The functions of a layer, of any number of rows.

    Args:
        rank: of its inputs.
        axis: of their channels.
        channels: how many there are.
        epsilon: is added to the variance.
        dtype: of the inputs.
        prefix: of the names of the functions.
    """

    def __init__(self, rank: int, axis: int, channels: int, epsilon: float, dtype: tf.DType, prefix: str):
        self._axes = [one for one in range(rank) if one != axis]
        self._along = [channels if one == axis else 1 for one in range(rank)]
        self._epsilon = epsilon
        rows = tf.TensorSpec([channels if one == axis else None for one in range(rank)], dtype)
        of_channels = tf.TensorSpec([channels], dtype)
        self.moments = _named(f"{prefix}moments", self._moments, rows)
        self._forward = _named(f"{prefix}normalized", self._normalized, rows, of_channels, of_channels)
        self._backward = _named(f"{prefix}gradient", self._gradient, rows, of_channels, rows)

    def normalized(self, x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor) -> tf.Tensor:
        """`x`, normalized over the examples."""

        @tf.custom_gradient
        def differentiable(x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor) -> Any:
            return self._forward(x, gamma, beta), lambda upstream: self._backward(x, gamma, upstream)

        return differentiable(x, gamma, beta)

    def _moments(self, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.nn.moments(x, self._axes)

    def _centered(self, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The inputs less their mean, and the reciprocal of their deviation, which broadcasts to them."""
        mean, variance = tf.nn.moments(x, self._axes, keepdims=True)
        return x - mean, tf.math.rsqrt(variance + self._epsilon)

    def _normalized(self, x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor) -> tf.Tensor:
        centered, scale = self._centered(x)
        return centered * (scale * tf.reshape(gamma, self._along)) + tf.reshape(beta, self._along)

    def _gradient(self, x: tf.Tensor, gamma: tf.Tensor, upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """The gradients of `_normalized` (Ioffe and Szegedy, arXiv:1502.03167, section 3)."""
        centered, scale = self._centered(x)
        unit = centered * scale
        of_unit = upstream * tf.reshape(gamma, self._along)
        mean = tf.reduce_mean(of_unit, self._axes, keepdims=True)
        along = tf.reduce_mean(of_unit * unit, self._axes, keepdims=True)
        of_x = scale * (of_unit - mean - unit * along)
        return of_x, tf.reduce_sum(upstream * unit, self._axes), tf.reduce_sum(upstream, self._axes)


def _named(name: str, function: Callable[..., Any], *signature: tf.TensorSpec) -> Any:
    def called(*arguments: tf.Tensor) -> Any:
        return function(*arguments)

    called.__name__ = name
    return tf.function(called, input_signature=signature, autograph=False)
