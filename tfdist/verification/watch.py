"""Records what a step of a verification computes besides variables and logs.

These are the examples that it is given, the outputs of layers, losses and gradients.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.internals import keras_patches
from tfdist.internals.keras import tree

# The prefix of the recorded values among the logs of a step.
MARK = "tfdist verification: "


class _Seen(threading.local):
    step: dict[str, tf.Tensor] | None = None
    graph: Any = None


class Watch(contextlib.AbstractContextManager[None]):
    """In this context, the model's `train_step` also returns the outputs of its layers, its losses and its gradients.

    Args:
        model: the model.
        sees: whether anything is recorded.

    Attributes:
        seen: the layer, loss or variable that each recorded value belongs to, by the value's kind and name; `None` for
            the examples.
        noise: the noise that steps on one device add to their gradients, relative to the gradients' size.
    """

    def __init__(self, model: Any, sees: bool = True):
        self.seen: dict[tuple[str, str], Any] = {}
        self.noise: tf.Variable | None = None
        self._model = model
        self._sees = sees
        self._of_thread = _Seen()

    def __enter__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(keras_patches.watching(self._model, self._see))
        step = functools.partial(self._train_step, self._model.train_step)
        if not self._sees:  # nobody looks at the gradients, which Keras' own step passes on as they are
            vars(step)["__func__"] = getattr(self._model.train_step, "__func__", None)
        # Past Keras' attribute tracking, so that nothing of it is saved with the model.
        object.__setattr__(self._model, "train_step", step)
        self._stack.callback(object.__delattr__, self._model, "train_step")

    def __exit__(self, *raised: Any) -> None:
        self._stack.close()

    def _train_step(self, step: Callable[[Any], Any], data: Any) -> Any:
        seen: dict[str, tf.Tensor] = {}
        self._of_thread.step = seen
        self._of_thread.graph = _graph()
        try:
            self._see_batch(data)
            logs = step(data)
        finally:
            self._of_thread.step = None
        return {**logs, **seen} if isinstance(logs, dict) else logs

    @property
    def is_in_step(self) -> bool:
        """Whether a step is being traced, here and not in a graph within its graph."""
        return self._of_thread.step is not None and _graph() is self._of_thread.graph

    def _see_batch(self, data: Any) -> None:
        """Records the examples themselves, so that a strategy's own fault is not taken for one of the first layer."""
        parts = data if isinstance(data, tuple) and len(data) <= 3 else (data,)
        for name, part in zip(("x", "y", "sample_weight"), parts, strict=False):
            for tensor in tree.flatten(part):
                if (
                    self._sees
                    and isinstance(tensor, tf.Tensor)
                    and (tensor.dtype.is_floating or tensor.dtype.is_integer)
                ):
                    self._note("batch", name, None, tensor)

    def _see(self, kind: str, of: Any, value: Any) -> Any:
        if not self._sees or not self.is_in_step:
            return value
        if kind == "gradients":
            for variable, gradient in zip(of, value, strict=True):
                if gradient is not None:
                    self._note("gradient", variable.path, variable, tf.convert_to_tensor(gradient)[tf.newaxis])
            return value if self.noise is None else [self._with_noise(gradient) for gradient in value]
        name = getattr(of, "path", None) or of.name
        for tensor in tree.flatten(value):
            if isinstance(tensor, tf.Tensor) and tensor.dtype.is_floating:
                self._note(kind, name, of, tensor)

    def _with_noise(self, gradient: Any) -> Any:
        """`gradient` with noise of about one bit of its largest number, as rounding of its sums could make."""
        if gradient is None:
            return None
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(self._with_noise(gradient.values), gradient.indices, gradient.dense_shape)
        draws = tf.random.stateless_uniform(tf.shape(gradient), [0, len(self.seen)], -1.0, 1.0, gradient.dtype)
        largest = tf.reduce_max(tf.abs(gradient), keepdims=True) if gradient.shape.rank else tf.abs(gradient)
        return gradient + tf.cast(self.noise, gradient.dtype) * largest * draws

    def _note(self, kind: str, name: str, of: Any, rows: tf.Tensor) -> None:
        """Records a scalar, or the sums of a tensor's values and of their absolute values per row, float32 `[2]`."""
        seen = self._of_thread.step
        assert seen is not None
        numbers = (name if number == 1 else f"{name} ({number})" for number in range(1, len(seen) + 2))
        name = next(one for one in numbers if f"{MARK}{kind}: {one}" not in seen)
        self.seen[kind, name] = of
        rows = tf.cast(rows, tf.float32)
        if rows.shape.rank:
            count = tf.cast(tf.maximum(tf.shape(rows)[0], 1), tf.float32)
            rows = tf.stack([tf.reduce_sum(rows), tf.reduce_sum(tf.abs(rows))]) / count
        seen[f"{MARK}{kind}: {name}"] = rows


def _graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
