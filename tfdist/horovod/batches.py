"""How many examples the batch has that Keras trains on: the weight of a process' gradient in the mean over all.

Keras passes each batch to the model's `train_step`. The number of its examples is the length of the first axis of its
first tensor, as everywhere in Keras. In a loop written by hand nothing says which tensors are the batch.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.internals import keras_loops


class _Thread(threading.local):
    examples: tf.Tensor | None = None


_thread = _Thread()


@functools.cache
def install() -> None:
    """From now on the steps of Keras' own loop know the number of examples of their batches."""
    keras_loops.around_steps(_with_number)


def examples() -> tf.Tensor | None:
    """The number of examples, int64, of the batch of the step that is computed or traced; `None` outside of one."""
    return _thread.examples


@contextlib.contextmanager
def of_batch(data: Any) -> Iterator[None]:
    """The context of a step on the batch `data`."""
    before, _thread.examples = _thread.examples, _length(data)
    try:
        yield
    finally:
        _thread.examples = before


def _with_number(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(step)
    def numbered(data: Any) -> Any:
        with of_batch(data):
            return step(data)

    return numbered


def _length(data: Any) -> tf.Tensor | None:
    for tensor in keras.tree.flatten(data):
        if isinstance(tensor, tf.RaggedTensor):
            return tensor.nrows(tf.int64)
        if isinstance(tensor, tf.SparseTensor):
            return tensor.dense_shape[0]
        if hasattr(tensor, "shape") and tf.TensorShape(tensor.shape).rank != 0:
            return tf.shape(tensor, tf.int64)[0]
    return None
