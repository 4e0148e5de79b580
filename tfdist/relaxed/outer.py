"""The weights that the processes of local SGD had in common last, and what a rule makes of them when they meet.

    begin         the processes part from what they have in common
    update        they have met: the new weights, from the mean of theirs
    settle        the model gets what is shown of it, to evaluations, checkpoints and users

The rules themselves are in `tfdist.relaxed.outer_rules`. Variables that are remembered have the names of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.relaxed import outer_rules
from tfdist.relaxed.flat_weights import packed, unpacked


class Outer:
    """Keeps the weights that were common last, float32, beside those of the model.

    Args:
        weights: the trainable variables of the model, of Keras.
        device: where its variables are.

    Attributes:
        starts: the common weights.
        averages_slots: the state of the optimizer is averaged with the weights; otherwise each process keeps its own.
        by_examples: the mean is weighed by the examples that each process has seen; otherwise each counts the same.
    """

    averages_slots: ClassVar[bool] = True
    by_examples: ClassVar[bool] = True

    def __init__(self, weights: Sequence[Any], device: str):
        self.weights = list(weights)
        self._device = device
        self.starts = self.alike("start")
        self._pack_in_graph = tf.function(lambda: packed(self.weights), autograph=False)
        self._update_in_graph = tf.function(self._update_by_flat, autograph=False)

    def alike(self, name: str) -> list[Any]:
        """A Keras variable of zeros, float32, for each weight."""
        with tf.init_scope(), tensorflow_internals.without_strategy(), tf.device(self._device):
            return [
                keras.Variable(np.zeros(weight.shape, np.float32), dtype="float32", name=f"{name}_{_plain(weight)}")
                for weight in self.weights
            ]

    @property
    def shared(self) -> list[Any]:
        """What a checkpoint must have of it, the same in all processes; the common weights are the model's then."""
        return []

    @property
    def own(self) -> list[Any]:
        """What a checkpoint must have of it for each process."""
        return []

    def begin(self) -> None:
        for start, weight in zip(self.starts, self.weights, strict=True):
            start.assign(weight)

    def settle(self) -> None:
        """The weights of the model are common ones after an update."""

    def packed_weights(self) -> np.ndarray:
        """The weights of this process, one after the other: float32 `[n]`."""
        found: np.ndarray = self._pack_in_graph().numpy()
        return found

    def update(self, mean: np.ndarray, learning_rate: float) -> None:
        """The processes have met.

        Args:
            mean: of the weights, float32 `[n]`, one weight after the other.
            learning_rate: of the last steps.
        """
        self._update_in_graph(tf.constant(mean), tf.constant(learning_rate, tf.float32))

    def _update_by_flat(self, mean: tf.Tensor, learning_rate: tf.Tensor) -> None:
        self._update(unpacked(mean, self.weights), learning_rate)

    def _update(self, means: Sequence[tf.Tensor], learning_rate: tf.Tensor) -> None:
        raise NotImplementedError


class ByRule(Outer):
    """What a function makes of each weight, see `tfdist.relaxed.outer_rules`."""

    def __init__(self, weights: Sequence[Any], device: str, rule: outer_rules.Rule):
        super().__init__(weights, device)
        self._rule = rule
        self._memory = self.alike("memory")

    @property
    def shared(self) -> list[Any]:
        return self._memory

    def _update(self, means: Sequence[tf.Tensor], learning_rate: tf.Tensor) -> None:
        for weight, start, memory, mean in zip(self.weights, self.starts, self._memory, means, strict=True):
            new, remembered = self._rule(start.value, mean, memory.value, learning_rate)
            weight.assign(new)
            start.assign(new)
            memory.assign(remembered)


class ByOptimizer(Outer):
    """An optimizer of Keras' gets the move of the weights as if it were a gradient, and each process keeps its slots.

    Args:
        weights: the trainable variables of the model, of Keras.
        device: where its variables are.
        optimizer: not built.
        mixing: what a process keeps of its own weights after an update.

    Source: Douillard et al., DiLoCo: distributed low-communication training of language models, arXiv 2311.08105.
    """

    averages_slots = False

    def __init__(self, weights: Sequence[Any], device: str, optimizer: keras.optimizers.Optimizer, mixing: float = 0.0):
        super().__init__(weights, device)
        self._optimizer, self._mixing = optimizer, mixing
        with tf.init_scope(), tensorflow_internals.without_strategy(), tf.device(device):
            optimizer.build(self.starts)

    @property
    def shared(self) -> list[Any]:
        return list(self._optimizer.variables)

    def _update(self, means: Sequence[tf.Tensor], learning_rate: tf.Tensor) -> None:
        del learning_rate
        moves = [start.value - mean for start, mean in zip(self.starts, means, strict=True)]
        self._optimizer.apply(moves, self.starts)
        for weight, start in zip(self.weights, self.starts, strict=True):
            weight.assign(self._mixing * weight + (1 - self._mixing) * start if self._mixing else start)

    def settle(self) -> None:
        if self._mixing:
            for weight, start in zip(self.weights, self.starts, strict=True):
                weight.assign(start)


class Shown(Outer):
    """The common weights are the mean, which the model shows, and each process keeps its own.

    How far a process is from what is shown is remembered, and it goes on from there.
    """

    averages_slots = False
    by_examples = False

    def __init__(self, weights: Sequence[Any], device: str):
        super().__init__(weights, device)
        self._offsets = self.alike("offset")

    @property
    def own(self) -> list[Any]:
        return self._offsets

    def begin(self) -> None:
        super().begin()
        for weight, offset in zip(self.weights, self._offsets, strict=True):
            weight.assign(weight + offset)

    def settle(self) -> None:
        for weight, start, offset in zip(self.weights, self.starts, self._offsets, strict=True):
            offset.assign(weight - start)
            weight.assign(start)

    def _update(self, means: Sequence[tf.Tensor], learning_rate: tf.Tensor) -> None:
        del learning_rate
        for start, mean in zip(self.starts, means, strict=True):
            start.assign(mean)


class Elastic(Shown):
    """The common weights are a centre, which the processes are drawn to, and which is drawn to them."""

    def __init__(self, weights: Sequence[Any], device: str, moving_rate: float, size: int):
        super().__init__(weights, device)
        self._moving_rate, self._size = moving_rate, size

    def _update(self, means: Sequence[tf.Tensor], learning_rate: tf.Tensor) -> None:
        del learning_rate
        for weight, start, mean in zip(self.weights, self.starts, means, strict=True):
            own, centre = outer_rules.elastic(weight.value, start.value, mean, self._moving_rate, self._size)
            weight.assign(own)
            start.assign(centre)


def _plain(weight: Any) -> str:
    """The path of a variable, as a name, which must not have a slash."""
    return str(weight.path).replace("/", "_")
