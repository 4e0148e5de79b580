"""The number of examples in the batch that Keras trains on, by which a process's gradient is weighted in the mean.

Keras passes each batch to the model's `train_step`. The number of its examples is the length of the first axis of its
first tensor, as everywhere in Keras. In a custom training loop it is unknown which tensors are the batch.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist.internals import keras_patches


@dataclass(frozen=True)
class Batch:
    """A batch of a Keras training step.

    Attributes:
        examples: the number of examples, int64; `None` if the batch has no tensor with axes.
        optimizer: the model's optimizer, or `None`.
    """

    examples: tf.Tensor | None
    optimizer: Any


class _ThreadState(threading.local):
    batch: Batch | None = None


_thread = _ThreadState()


@functools.cache
def install() -> None:
    """Makes `current` available in the training steps of Keras' own loop from now on."""
    keras_patches.around_steps(_with_batch)


def current() -> Batch | None:
    """Returns the batch of the training step that runs or is traced; `None` outside of training steps."""
    return _thread.batch


def examples() -> tf.Tensor | None:
    """Returns the number of examples (int64) of `current`; `None` if it is unknown."""
    return None if _thread.batch is None else _thread.batch.examples


def _with_batch(model: Any, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    if step != model.train_step:
        return step

    @functools.wraps(step)
    def with_batch(data: Any) -> Any:
        previous, _thread.batch = _thread.batch, Batch(_length(data), getattr(model, "optimizer", None))
        try:
            return step(data)
        finally:
            _thread.batch = previous

    return with_batch


def _length(data: Any) -> tf.Tensor | None:
    for tensor in keras.tree.flatten(data):
        if isinstance(tensor, tf.RaggedTensor):
            return tensor.nrows(tf.int64)
        if isinstance(tensor, tf.SparseTensor):
            return tensor.dense_shape[0]
        if hasattr(tensor, "shape") and tf.TensorShape(tensor.shape).rank != 0:
            return tf.shape(tensor, tf.int64)[0]
    return None
