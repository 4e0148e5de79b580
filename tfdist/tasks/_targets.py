"""Loss and metrics for targets that are class numbers, one per example, pixel or token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from tfdist.data.spec import DataSpec


def loss(spec: DataSpec) -> keras.losses.Loss:
    """The mean cross-entropy over all targets that are not ignored, in nats."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=spec.ignored_class)


def metrics(spec: DataSpec) -> list[Any]:
    """The metric "accuracy": the fraction of correctly predicted targets among those that are not ignored."""
    return ["accuracy" if spec.ignored_class is None else Accuracy(spec.ignored_class)]


def metrics_of_language(spec: DataSpec) -> list[Any]:
    """The metrics of a model of tokens: "accuracy", and "perplexity"."""
    return [*metrics(spec), Perplexity(spec.ignored_class)]


class _OverTargets(keras.metrics.Mean):
    """A mean over all targets except `ignored_class`, of any number of replicas.

    Args:
        ignored_class: the number of the class to ignore; `None` ignores none.
        name: the name of the metric.
        dtype: the dtype of its state.

    Attributes:
        additive: the state is a sum over the targets, so that the states of replicas can be added.
    """

    additive = True
    direction = "down"

    def __init__(self, ignored_class: int | None, name: str, dtype: Any = None):
        super().__init__(name=name, dtype=dtype)
        self.ignored_class = ignored_class
        self._direction = self.direction  # used by Keras' callbacks that keep the best epoch

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Adds class numbers `[B, ...]` and logits `[B, ..., classes]`."""
        y_true = ops.cast(y_true, "int32")
        weights = _weights(y_true, self.ignored_class, sample_weight, self.dtype)
        return super().update_state(self.of_targets(y_true, y_pred), weights)

    def of_targets(self, y_true: Any, y_pred: Any) -> Any:
        """The value of each target, `[B, ...]`."""
        raise NotImplementedError

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"ignored_class": self.ignored_class}


@keras.saving.register_keras_serializable("tfdist")
class Accuracy(_OverTargets):
    """The fraction of targets, except `ignored_class`, for which the target class has the largest logit."""

    direction = "up"

    def __init__(self, ignored_class: int | None, name: str = "accuracy", dtype: Any = None):
        super().__init__(ignored_class, name, dtype)

    def of_targets(self, y_true: Any, y_pred: Any) -> Any:
        return ops.cast(ops.equal(y_true, ops.cast(ops.argmax(y_pred, axis=-1), "int32")), self.dtype)


@keras.saving.register_keras_serializable("tfdist")
class Perplexity(_OverTargets):
    """The exponential of the mean cross-entropy, in nats, over all targets except `ignored_class`.

    The mean is over the targets of all batches, so that a batch with fewer targets counts less; the loss of an epoch is
    instead the mean of its batches' losses, weighted by their examples.
    """

    def __init__(self, ignored_class: int | None = None, name: str = "perplexity", dtype: Any = None):
        super().__init__(ignored_class, name, dtype)

    def of_targets(self, y_true: Any, y_pred: Any) -> Any:
        return _cross_entropies(y_true, y_pred, self.ignored_class)

    def result(self) -> Any:
        return ops.exp(super().result())


@keras.saving.register_keras_serializable("tfdist")
class NatsPerByte(keras.metrics.Mean):
    """The cross-entropy of all targets, in nats, per byte of their text: comparable between vocabularies.

    Args:
        lengths: the number of bytes of each class.
        name: the name of the metric.
        dtype: the dtype of its state.

    Attributes:
        additive: the state is a sum over the targets, so that the states of replicas can be added.
    """

    additive = True

    def __init__(self, lengths: Sequence[int], name: str = "nats_per_byte", dtype: Any = None):
        super().__init__(name=name, dtype=dtype)
        self.lengths = list(lengths)
        self._direction = "down"

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Adds class numbers `[B, ...]` and logits `[B, ..., classes]`."""
        y_true = ops.cast(y_true, "int32")
        lengths = ops.take(ops.convert_to_tensor(self.lengths, self.dtype), y_true)
        weights = lengths * _weights(y_true, None, sample_weight, self.dtype)
        return super().update_state(_cross_entropies(y_true, y_pred, None) / lengths, weights)

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"lengths": self.lengths}


def _cross_entropies(y_true: Any, y_pred: Any, ignored_class: int | None) -> Any:
    """The cross-entropy of each target, in nats; that of an ignored one is finite and has no meaning."""
    if ignored_class is not None:
        y_true = ops.where(ops.equal(y_true, ignored_class), 0, y_true)
    return ops.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)


def _weights(y_true: Any, ignored_class: int | None, sample_weight: Any, dtype: Any) -> Any:
    """The weight of each target: 0 if it is ignored, else that of its example, or 1."""
    weights = ops.ones_like(y_true, dtype)
    if ignored_class is not None:
        weights = ops.cast(ops.not_equal(y_true, ignored_class), dtype)
    if sample_weight is not None:
        weights = weights * ops.reshape(ops.cast(sample_weight, dtype), (-1, *[1] * (len(y_true.shape) - 1)))
    return weights
