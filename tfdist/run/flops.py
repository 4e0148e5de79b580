"""The FLOPs of a training step, known before TensorFlow starts and fixes its threads.

On a CPU, a step with few FLOPs is faster with one thread per operation than with all cores: waking the other threads
takes longer than the work. Measured on four cores: `mlp` at batch 32 takes 0.48 ms per step on one thread and 0.78 ms
on four; `cnn` at batch 128 takes 33 ms on one and 17 ms on four.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdist import models
from tfdist.internals import keras as keras_internals

# Between `mlp` at batch 128 (78 million) and `lenet` at batch 32 (92 million), where both settings take the same time.
SMALL_STEP_OPERATIONS = 85_000_000


def step_is_small(model: str, spec: Any, batch_size: int, options: Mapping[str, Any] | None = None) -> bool:
    """Whether a training step of the model named `model` is faster on one thread of a CPU than on all."""
    return step_operations(model, spec, batch_size, options) < SMALL_STEP_OPERATIONS


def step_operations(model: str, spec: Any, batch_size: int, options: Mapping[str, Any] | None = None) -> float:
    """FLOPs of the matrix products of a training step: one forward pass, and a backward pass that counts as two.

    Infinite if unknown: for a model whose layers are not all built and connected, such as a subclassed one.
    """
    with tf.Graph().as_default():  # variables in a graph of its own do not start TensorFlow's devices
        built = models.build(model, spec, **options or {})
        layers = [layer for layer in keras_internals.all_layers(built) if not isinstance(layer, keras.Model)]
        known = all(layer.built and keras_internals.is_connected(layer) for layer in layers)
        length = 1 if spec.vocabulary_size == 0 else spec.input_shape[0]
        forward = sum(_operations(layer, length) for layer in layers) if known else math.inf
    keras.backend.clear_session()  # so that the names of the layers are free again
    return 3 * batch_size * forward


def _operations(layer: Any, length: int) -> int:
    """Forward FLOPs per example: 2 x kernel size x output positions.

    A recurrent layer computes a state at each of the `length` positions of its input, even if it returns only one.
    """
    kernels = [weight for weight in layer.trainable_weights if len(weight.shape) >= 2]
    if not kernels or isinstance(layer, keras.layers.Embedding):  # looked up, not multiplied
        return 0
    output = keras.tree.flatten(layer.output)[0]
    recurrent = isinstance(layer, keras.layers.RNN | keras.layers.Bidirectional)
    positions = length if recurrent else math.prod(size or length for size in output.shape[1:-1])
    return sum(2 * math.prod(kernel.shape) * positions for kernel in kernels)
