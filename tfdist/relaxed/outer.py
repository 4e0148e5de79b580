"""The weights that the processes of local SGD have in common, and how they change at a synchronization.

    begin                   copies the common weights, before the processes take steps of their own
    update                  computes the new weights from the mean over the processes
    show_common_weights     assigns the common weights to the model, for evaluations, checkpoints and users

The rules themselves are in `tfdist.relaxed.outer_rules`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.relaxed import outer_rules
from tfdist.relaxed.compression import PackedVariables, unpacked


class OuterOptimizer:
    """Keeps the weights that the processes last had in common, in float32.

    Args:
        weights: trainable Keras variables of the model.
        device: where the new variables are made.

    Attributes:
        common: the common weights.
        packed: reads and assigns the weights of this process as one array.
        averages_slots: the slots of the optimizer are averaged with the weights; otherwise each process keeps its own.
        weighted_by_examples: the mean is weighted by the examples that each process has seen; otherwise the processes
            have equal weights.
    """

    averages_slots: ClassVar[bool] = True
    weighted_by_examples: ClassVar[bool] = True

    def __init__(self, weights: Sequence[Any], device: str):
        self.weights = list(weights)
        self._device = device
        self.common = self.new_variables("start")
        self.packed = PackedVariables(self.weights)
        self._update_in_graph = tf.function(
            lambda mean, learning_rate: self._update(unpacked(mean, self.weights), learning_rate), autograph=False
        )

    def new_variables(self, prefix: str) -> list[Any]:
        """Makes a Keras variable of zeros, float32, for each weight; checkpoints identify them by the `prefix`."""
        with tf.init_scope(), tensorflow_internals.without_strategy(), tf.device(self._device):
            return [
                keras.Variable(
                    np.zeros(weight.shape, np.float32),
                    dtype="float32",
                    name=f"{prefix}_{weight.path.replace('/', '_')}",  # a name must not have a slash
                )
                for weight in self.weights
            ]

    @property
    def shared(self) -> list[Any]:
        """Variables for checkpoints that are the same in all processes; the model has the common weights itself."""
        return []

    @property
    def per_process(self) -> list[Any]:
        """Variables for checkpoints of which each process has its own values."""
        return []

    def begin(self) -> None:
        for common, weight in zip(self.common, self.weights, strict=True):
            common.assign(weight)

    def show_common_weights(self) -> None:
        """Assigns the common weights to the model; does nothing where `update` has done so."""

    def update(self, mean: np.ndarray, learning_rate: float) -> None:
        """Computes the new weights.

        Args:
            mean: the mean of the packed weights over the processes, float32 `[n]`.
            learning_rate: the learning rate of the last steps.
        """
        self._update_in_graph(tf.constant(mean), tf.constant(learning_rate, tf.float32))

    def _update(self, means: Sequence[tf.Tensor], learning_rate: tf.Tensor) -> None:
        raise NotImplementedError


class RuleOuterOptimizer(OuterOptimizer):
    """Updates each weight by a function, see `tfdist.relaxed.outer_rules`."""

    def __init__(self, weights: Sequence[Any], device: str, rule: outer_rules.Rule):
        super().__init__(weights, device)
        self._rule = rule
        self._memory = self.new_variables("memory")

    @property
    def shared(self) -> list[Any]:
        return self._memory

    def _update(self, means: Sequence[tf.Tensor], learning_rate: tf.Tensor) -> None:
        for weight, common, memory, mean in zip(self.weights, self.common, self._memory, means, strict=True):
            new, remembered = self._rule(common.value, mean, memory.value, learning_rate)
            weight.assign(new)
            common.assign(new)
            memory.assign(remembered)


class KerasOuterOptimizer(OuterOptimizer):
    """Applies a Keras optimizer to the common weights, with their change as the gradient.

    The processes keep the slots of their own inner optimizers.

    `optimizer` is not built; `mixing` is the fraction of its own weights that a process keeps at an update.

    Source: Douillard et al., DiLoCo: distributed low-communication training of language models, arXiv 2311.08105.
    """

    averages_slots = False

    def __init__(self, weights: Sequence[Any], device: str, optimizer: keras.optimizers.Optimizer, mixing: float = 0.0):
        super().__init__(weights, device)
        self._optimizer, self._mixing = optimizer, mixing
        with tf.init_scope(), tensorflow_internals.without_strategy(), tf.device(device):
            optimizer.build(self.common)

    @property
    def shared(self) -> list[Any]:
        return list(self._optimizer.variables)

    def _update(self, means: Sequence[tf.Tensor], learning_rate: tf.Tensor) -> None:
        del learning_rate
        changes = [common.value - mean for common, mean in zip(self.common, means, strict=True)]
        self._optimizer.apply(changes, self.common)
        for weight, common in zip(self.weights, self.common, strict=True):
            weight.assign(self._mixing * weight + (1 - self._mixing) * common if self._mixing else common)

    def show_common_weights(self) -> None:
        if self._mixing:
            for weight, common in zip(self.weights, self.common, strict=True):
                weight.assign(common)


class SharedMean(OuterOptimizer):
    """The common weights are the mean, which the model shows; each process continues with its own weights.

    The offset of the process's weights from the common weights is kept while the model shows the latter.
    """

    averages_slots = False
    weighted_by_examples = False

    def __init__(self, weights: Sequence[Any], device: str):
        super().__init__(weights, device)
        self._offsets = self.new_variables("offset")

    @property
    def per_process(self) -> list[Any]:
        return self._offsets

    def begin(self) -> None:
        super().begin()
        for weight, offset in zip(self.weights, self._offsets, strict=True):
            weight.assign(weight + offset)

    def show_common_weights(self) -> None:
        for weight, common, offset in zip(self.weights, self.common, self._offsets, strict=True):
            offset.assign(weight - common)
            weight.assign(common)

    def _update(self, means: Sequence[tf.Tensor], learning_rate: tf.Tensor) -> None:
        del learning_rate
        for common, mean in zip(self.common, means, strict=True):
            common.assign(mean)


class ElasticAveraging(SharedMean):
    """The common weights are a centre; the processes and the centre move towards each other."""

    def __init__(self, weights: Sequence[Any], device: str, moving_rate: float, size: int):
        super().__init__(weights, device)
        self._moving_rate, self._size = moving_rate, size

    def _update(self, means: Sequence[tf.Tensor], learning_rate: tf.Tensor) -> None:
        del learning_rate
        for weight, common, mean in zip(self.weights, self.common, means, strict=True):
            local, centre = outer_rules.elastic(weight.value, common.value, mean, self._moving_rate, self._size)
            weight.assign(local)
            common.assign(centre)
