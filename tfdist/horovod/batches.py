"""How many examples the batch has that Keras trains on: the weight of a process' gradient in the mean over all.

Keras passes each batch to the model's `train_step`. The number of its examples is the length of the first axis of its
first tensor, as everywhere in Keras. In a loop written by hand nothing says which tensors are the batch.
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
    """A batch that a step of Keras' trains on.

    Attributes:
        examples: how many it has, int64; `None` if it has no tensor with axes.
        optimizer: that of the model, or `None`.
    """

    examples: tf.Tensor | None
    optimizer: Any


class _Thread(threading.local):
    batch: Batch | None = None


_thread = _Thread()


@functools.cache
def install() -> None:
    """From now on the training steps of Keras' own loop know their batches."""
    keras_patches.around_steps(_knowing_batch)


def current() -> Batch | None:
    """The batch of the training step that is computed or traced; `None` outside of one."""
    return _thread.batch


def examples() -> tf.Tensor | None:
    """The number of examples, int64, of the batch of the step that is computed or traced; `None` outside of one."""
    return None if _thread.batch is None else _thread.batch.examples


def _knowing_batch(model: Any, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    if step != model.train_step:
        return step

    @functools.wraps(step)
    def knowing(data: Any) -> Any:
        before, _thread.batch = _thread.batch, Batch(_length(data), getattr(model, "optimizer", None))
        try:
            return step(data)
        finally:
            _thread.batch = before

    return knowing


def _length(data: Any) -> tf.Tensor | None:
    for tensor in keras.tree.flatten(data):
        if isinstance(tensor, tf.RaggedTensor):
            return tensor.nrows(tf.int64)
        if isinstance(tensor, tf.SparseTensor):
            return tensor.dense_shape[0]
        if hasattr(tensor, "shape") and tf.TensorShape(tensor.shape).rank != 0:
            return tf.shape(tensor, tf.int64)[0]
    return None
