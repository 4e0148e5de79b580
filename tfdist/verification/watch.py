"""Records the input, the layer outputs, the losses and the gradients of the steps of a verification."""

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


class _TracedStep(threading.local):
    """The step that this thread is tracing: its recorded values by name, and its graph."""

    values: dict[str, tf.Tensor] | None = None
    graph: Any = None


class Watch(contextlib.AbstractContextManager[None]):
    """In this context, the model's `train_step` also returns its input, layer outputs, losses and gradients.

    Args:
        model: the model.
        sees: whether anything is recorded.

    Attributes:
        seen: the layer, loss or variable of each recorded value, by the value's kind and name; `None` for the input.
        noise: the relative noise that steps on one device add to their gradients.
    """

    def __init__(self, model: Any, sees: bool = True):
        self.seen: dict[tuple[str, str], Any] = {}
        self.noise: tf.Variable | None = None
        self._model = model
        self._sees = sees
        self._traced_step = _TracedStep()

    def __enter__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(keras_patches.watching(self._model, self._see))
        step = functools.partial(self._train_step, self._model.train_step)
        if not self._sees:  # then the wrapper counts as Keras' own step, which is recognized by `__func__`
            vars(step)["__func__"] = getattr(self._model.train_step, "__func__", None)
        # Past Keras' attribute tracking, so that nothing of it is saved with the model.
        object.__setattr__(self._model, "train_step", step)
        self._stack.callback(object.__delattr__, self._model, "train_step")

    def __exit__(self, *raised: Any) -> None:
        self._stack.close()

    def _train_step(self, step: Callable[[Any], Any], data: Any) -> Any:
        values: dict[str, tf.Tensor] = {}
        self._traced_step.values = values
        self._traced_step.graph = _graph()
        try:
            if self._sees:
                self._record_batch(data)
            logs = step(data)
        finally:
            self._traced_step.values = None
        return {**logs, **values} if isinstance(logs, dict) else logs

    @property
    def is_in_step(self) -> bool:
        """Whether this thread is tracing a step, and is not in a nested graph."""
        return self._traced_step.values is not None and _graph() is self._traced_step.graph

    def _record_batch(self, data: Any) -> None:
        """Records the input, so that a bug in dividing batches is not attributed to the first layer."""
        parts = data if isinstance(data, tuple) and len(data) <= 3 else (data,)
        for name, part in zip(("x", "y", "sample_weight"), parts, strict=False):
            for tensor in tree.flatten(part):
                if isinstance(tensor, tf.Tensor) and (tensor.dtype.is_floating or tensor.dtype.is_integer):
                    self._record("batch", name, None, tensor)

    def _see(self, kind: str, of: Any, value: Any) -> Any:
        if not self._sees or not self.is_in_step:
            return value
        if kind == "gradients":
            for variable, gradient in zip(of, value, strict=True):
                if gradient is not None:
                    self._record("gradient", variable.path, variable, tf.convert_to_tensor(gradient)[tf.newaxis])
            return value if self.noise is None else [self._with_noise(gradient) for gradient in value]
        name = getattr(of, "path", None) or of.name
        for tensor in tree.flatten(value):
            if isinstance(tensor, tf.Tensor) and tensor.dtype.is_floating:
                self._record(kind, name, of, tensor)

    def _with_noise(self, gradient: Any) -> Any:
        """Adds noise of about one bit of the largest element to a gradient, like rounding errors of sums."""
        if gradient is None:
            return None
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(self._with_noise(gradient.values), gradient.indices, gradient.dense_shape)
        draws = tf.random.stateless_uniform(tf.shape(gradient), [0, len(self.seen)], -1.0, 1.0, gradient.dtype)
        largest = tf.reduce_max(tf.abs(gradient), keepdims=True) if gradient.shape.rank else tf.abs(gradient)
        return gradient + tf.cast(self.noise, gradient.dtype) * largest * draws

    def _record(self, kind: str, name: str, of: Any, rows: tf.Tensor) -> None:
        """Records a scalar, or for a tensor its sum and its sum of absolute values, divided by its rows, float32 `[2]`.

        Args:
            kind: the kind of the value, such as "output".
            name: the name of the value.
            of: the layer, loss or variable of the value.
            rows: the value.
        """
        values = self._traced_step.values
        assert values is not None
        candidates = (name if number == 1 else f"{name} ({number})" for number in range(1, len(values) + 2))
        name = next(candidate for candidate in candidates if f"{MARK}{kind}: {candidate}" not in values)
        self.seen[kind, name] = of
        rows = tf.cast(rows, tf.float32)
        if rows.shape.rank:
            count = tf.cast(tf.maximum(tf.shape(rows)[0], 1), tf.float32)
            rows = tf.stack([tf.reduce_sum(rows), tf.reduce_sum(tf.abs(rows))]) / count
        values[f"{MARK}{kind}: {name}"] = rows


def _graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
