"""The real training steps of simulated workers, which share a single model.

A worker consists of its trainable weights, float32 `[n]`, which algorithms exchange, and its state: the tensors of its
optimizer and of the model's non-trainable variables, such as moving averages. A step is a graph that takes both, and
the worker's part of a global batch.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.data.input.array_feed import ArrayFeed
from tfdist.data.input.division import Division
from tfdist.errors import UsageError
from tfdist.internals import keras as keras_internals
from tfdist.relaxed.compression import packed, unpacked

State = list[tf.Tensor]


class Replicas:
    """The steps of `size` workers, each on its part of every global batch.

    Args:
        model: a compiled and built model whose optimizer has its slots.
        feed: the training data, with batches available in any order.
        size: the number of workers.

    Attributes:
        initial_weights: the weights that all workers begin with, float32 `[n]`.
        initial_state: the state that all workers begin with.
        parameters: the number of trainable weights.
        slots: the indices of the floating-point arrays in the state.
        losses: the loss of each step; callers may clear it.

    Raises:
        UsageError: the model overrides `train_step`.
    """

    def __init__(self, model: keras.Model, feed: ArrayFeed, size: int):
        if keras_internals.has_own_step(model, "train"):
            raise UsageError(
                f"The model `{model.name}` overrides `train_step`, and simulated workers take the steps of Keras",
                "remove the method, or move its work into `compute_loss`",
            )
        self._model, self._feed, self._division = model, feed, Division(size)
        self._weights = [variable.value for variable in model.trainable_variables]
        others = [*model.non_trainable_variables, *model.optimizer.variables]
        self._state = [variable.value for variable in others]
        self._epochs: dict[int, Any] = {}
        self._graphs: dict[str, Any] = {}
        self.initial_weights = np.concatenate([value.numpy().reshape(-1) for value in self._weights]).astype(np.float32)
        self.initial_state: State = [tf.identity(value) for value in self._state]
        self.parameters = self.initial_weights.size
        self._non_trainable_count = len(model.non_trainable_variables)
        self.slots = [index for index, value in enumerate(self._state) if value.dtype.is_floating and value.shape.rank]
        self.losses: list[float] = []

    def train(self, rank: int, step: int, weights: np.ndarray, state: State) -> tuple[np.ndarray, State]:
        """Returns the weights and the state of worker `rank` after step number `step` of the run."""
        if self.examples(rank, step) == 0:
            return weights, state
        new_weights, new_state, loss = self._call("step", tf.constant(weights), state, *self._batch(rank, step))
        self.losses.append(float(loss))
        return new_weights.numpy(), new_state

    def gradient(self, rank: int, step: int, weights: np.ndarray, state: State) -> tuple[np.ndarray, State, int]:
        """Returns worker `rank`'s gradient at `weights`, the state after the forward pass, and the example count."""
        if self.examples(rank, step) == 0:
            return np.zeros_like(weights), state, 0
        gradient, new_state, loss = self._call("gradient", tf.constant(weights), state, *self._batch(rank, step))
        self.losses.append(float(loss))
        return gradient.numpy(), new_state, self.examples(rank, step)

    def apply(self, weights: np.ndarray, state: State, gradient: np.ndarray) -> tuple[np.ndarray, State]:
        """Returns the weights and the state after the optimizer has applied `gradient`."""
        new_weights, new_state = self._call("apply", tf.constant(weights), state, tf.constant(gradient))
        return new_weights.numpy(), new_state

    def with_averages(self, state: State, others: list[State]) -> State:
        """Returns `state`, with its moving averages replaced by the mean of those in `others`."""
        averages = []
        for index in range(self._non_trainable_count):
            values = [other[index] for other in others]
            keep_first = not values[0].dtype.is_floating or len(values) == 1
            averages.append(values[0] if keep_first else tf.reduce_mean(tf.stack(values), 0))
        return [*averages, *state[self._non_trainable_count :]]

    def examples(self, rank: int, step: int) -> int:
        """Returns the number of examples of worker `rank` in its step number `step`."""
        number = step % self.steps_per_epoch
        batch_size = min(self._feed.batch_size, self._feed.examples - number * self._feed.batch_size)
        begin, end = self._division.part(batch_size, rank)
        return int(end - begin)

    def learning_rate(self, state: State) -> float:
        """Returns the learning rate of the last step that led to this state."""
        _assign(self._state, state)
        return keras_internals.last_learning_rate(self._model.optimizer)

    def evaluate(self, weights: np.ndarray, state: State, data: Any) -> dict[str, float]:
        """Evaluates the model with these weights on `data`; returns loss and metrics as `Model.evaluate` does."""
        _assign(self._weights, self._unpacked(tf.constant(weights)))
        _assign(self._state, state)
        metrics: dict[str, float] = self._model.evaluate(data, verbose=0, return_dict=True)
        return metrics

    @property
    def steps_per_epoch(self) -> int:
        """The number of global batches per epoch."""
        return int(self._feed.num_batches)

    def _batch(self, rank: int, step: int) -> tuple[Any, tf.Tensor, tf.Tensor]:
        """Returns what a graph needs to fetch a worker's part of a batch: the epoch's data, batch number, and rank."""
        epoch, number = divmod(step, self.steps_per_epoch)
        if epoch not in self._epochs:
            self._epochs[epoch] = self._feed.start(epoch, 0)
        return self._epochs[epoch], tf.constant(number), tf.constant(rank)

    def _call(self, name: str, *arguments: Any) -> Any:
        """Calls a concrete function, since `tf.function` would examine the types of all tensors in each call."""
        if name not in self._graphs:
            functions = {"step": self._step_graph, "gradient": self._gradient_graph, "apply": self._apply_graph}
            self._graphs[name] = tf.function(functions[name], autograph=False).get_concrete_function(*arguments)
        return self._graphs[name](*arguments)

    def _step_graph(
        self, weights: tf.Tensor, state: State, epoch: Any, number: tf.Tensor, rank: tf.Tensor
    ) -> tuple[tf.Tensor, State, tf.Tensor]:
        gradients, loss = self._differentiate(weights, state, epoch, number, rank)
        self._model.optimizer.apply(gradients, self._model.trainable_variables)
        return packed(self._weights), [value.read_value() for value in self._state], loss

    def _gradient_graph(
        self, weights: tf.Tensor, state: State, epoch: Any, number: tf.Tensor, rank: tf.Tensor
    ) -> tuple[tf.Tensor, State, tf.Tensor]:
        gradients, loss = self._differentiate(weights, state, epoch, number, rank)
        dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
        return packed(dense), [value.read_value() for value in self._state], loss

    def _differentiate(
        self, weights: tf.Tensor, state: State, epoch: Any, number: tf.Tensor, rank: tf.Tensor
    ) -> tuple[list[Any], tf.Tensor]:
        _assign(self._weights, self._unpacked(weights))
        _assign(self._state, state)
        batches = self._feed.batches
        batch = batches.examples(epoch, batches.fetch(epoch, number), rank, self._division)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        with tf.GradientTape() as tape:
            outputs = self._model(x, training=True)
            loss = self._model.compute_loss(x=x, y=y, y_pred=outputs, sample_weight=sample_weight, training=True)
            scaled = self._model.optimizer.scale_loss(loss)
        return tape.gradient(scaled, self._weights), loss

    def _apply_graph(self, weights: tf.Tensor, state: State, gradient: tf.Tensor) -> tuple[tf.Tensor, State]:
        _assign(self._weights, self._unpacked(weights))
        _assign(self._state, state)
        self._model.optimizer.apply(self._unpacked(gradient), self._model.trainable_variables)
        return packed(self._weights), [value.read_value() for value in self._state]

    def _unpacked(self, flat: tf.Tensor) -> list[tf.Tensor]:
        pairs = zip(unpacked(flat, self._weights), self._weights, strict=True)
        return [tf.cast(part, value.dtype) for part, value in pairs]


def _assign(variables: list[tf.Variable], values: list[tf.Tensor]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
