"""Loss and metrics for targets that are class numbers, one per example, pixel or token."""

from __future__ import annotations

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


@keras.saving.register_keras_serializable("tfdist")
class Accuracy(keras.metrics.Mean):
    """The fraction of targets, except `ignored_class`, for which the target class has the largest logit.

    Args:
        ignored_class: the number of the class to ignore.
        name: the name of the metric.
        dtype: the dtype of its state.

    Attributes:
        additive: the state is a sum over the targets, so that the states of replicas can be added.
    """

    additive = True

    def __init__(self, ignored_class: int, name: str = "accuracy", dtype: Any = None):
        super().__init__(name=name, dtype=dtype)
        self.ignored_class = ignored_class
        self._direction = "up"  # used by Keras' callbacks that keep the best epoch

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Adds class numbers `[B, ...]` and logits `[B, ..., classes]`."""
        y_true = ops.cast(y_true, "int32")
        weights = ops.cast(ops.not_equal(y_true, self.ignored_class), self.dtype)
        if sample_weight is not None:
            per_example = ops.cast(sample_weight, self.dtype)
            weights = weights * ops.reshape(per_example, (-1, *[1] * (len(y_true.shape) - 1)))
        correct = ops.cast(ops.equal(y_true, ops.cast(ops.argmax(y_pred, axis=-1), "int32")), self.dtype)
        return super().update_state(correct, weights)

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"ignored_class": self.ignored_class}
