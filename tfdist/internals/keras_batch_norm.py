"""Keras' `BatchNormalization` with the statistics of each replica's examples; written for Keras 3.15.1.

What the layer computes over several examples is traced as calls of functions, which the partitioner runs on each
replica's shard (`tfdist.spmd.rules.neural`). `tests/contract/test_batch_norm.py` fails when Keras' layer changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras import ops
from keras.src import backend

from tfdist.internals.patching import surrounded


@contextlib.contextmanager
def per_replica(prefix: str) -> Iterator[None]:
    """Within this context layers that are not `synchronized` are traced this way in training.

    Layers with `renorm`, and calls with a mask, are left out. The names of the functions are `prefix` and "moments",
    "normalized", "gradient".
    """

    def call(original: Any, layer: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        left_out = layer.synchronized or layer.renorm or mask is not None
        if not training or not layer.trainable or left_out:
            return original(layer, inputs, training=training, mask=mask)
        return _called(layer, inputs, prefix)

    with surrounded(keras.layers.BatchNormalization, "call", call):
        yield


def _called(layer: Any, inputs: Any, prefix: str) -> Any:
    """Computes what the layer's own `call` computes in training."""
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
    """The functions of a layer, for any number of rows.

    Args:
        rank: the rank of its inputs.
        axis: the axis of their channels.
        channels: the number of channels.
        epsilon: the constant that is added to the variance.
        dtype: the dtype of the inputs.
        prefix: the prefix of the names of the functions.
    """

    def __init__(self, rank: int, axis: int, channels: int, epsilon: float, dtype: tf.DType, prefix: str):
        self._axes = [n for n in range(rank) if n != axis]
        self._broadcast_shape = [channels if n == axis else 1 for n in range(rank)]
        self._epsilon = epsilon
        rows = tf.TensorSpec([channels if n == axis else None for n in range(rank)], dtype)
        per_channel = tf.TensorSpec([channels], dtype)
        self.moments = _named(f"{prefix}moments", self._moments, rows)
        self._forward = _named(f"{prefix}normalized", self._normalized, rows, per_channel, per_channel)
        self._backward = _named(f"{prefix}gradient", self._gradient, rows, per_channel, rows)

    def normalized(self, x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor) -> tf.Tensor:
        """Normalizes `x` over its examples; differentiable."""

        @tf.custom_gradient
        def differentiable(x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor) -> Any:
            return self._forward(x, gamma, beta), lambda upstream: self._backward(x, gamma, upstream)

        return differentiable(x, gamma, beta)

    def _moments(self, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.nn.moments(x, self._axes)

    def _centered(self, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The inputs minus their mean, and the reciprocal of their standard deviation, which broadcasts to them."""
        mean, variance = tf.nn.moments(x, self._axes, keepdims=True)
        return x - mean, tf.math.rsqrt(variance + self._epsilon)

    def _normalized(self, x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor) -> tf.Tensor:
        centered, scale = self._centered(x)
        return centered * (scale * tf.reshape(gamma, self._broadcast_shape)) + tf.reshape(beta, self._broadcast_shape)

    def _gradient(self, x: tf.Tensor, gamma: tf.Tensor, upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """The gradients of `_normalized` (Ioffe and Szegedy, arXiv:1502.03167, section 3)."""
        centered, scale = self._centered(x)
        unit = centered * scale
        unit_gradient = upstream * tf.reshape(gamma, self._broadcast_shape)
        mean = tf.reduce_mean(unit_gradient, self._axes, keepdims=True)
        projection = tf.reduce_mean(unit_gradient * unit, self._axes, keepdims=True)
        x_gradient = scale * (unit_gradient - mean - unit * projection)
        return x_gradient, tf.reduce_sum(upstream * unit, self._axes), tf.reduce_sum(upstream, self._axes)


def _named(name: str, function: Callable[..., Any], *signature: tf.TensorSpec) -> Any:
    def called(*arguments: tf.Tensor) -> Any:
        return function(*arguments)

    called.__name__ = name
    return tf.function(called, input_signature=signature, autograph=False)
