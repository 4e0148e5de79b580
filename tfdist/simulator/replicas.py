"""The weights and the optimizer of each simulated worker, and its real steps, all by one model.

A worker is two things: its trained weights, float32 `[n]`, which algorithms exchange, and the rest of its state, the
tensors of its optimizer and of moving averages. A step is one graph that takes both, and a part of a global batch.
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
from tfdist.relaxed.flat_weights import packed, unpacked

State = list[tf.Tensor]


class Replicas:
    """The steps of `size` workers, each of which takes its part of every global batch.

    Args:
        model: compiled and built, with the slots of its optimizer.
        feed: of training, whose batches can be fetched in any order.
        size: the number of workers.

    Attributes:
        first: the weights that all begin with.
        rest: the state besides that all begin with.
        parameters: the number of trained weights.

    Raises:
        UsageError: the model has a `train_step` of its own.
    """

    def __init__(self, model: keras.Model, feed: ArrayFeed, size: int):
        if keras_internals.has_own_step(model, "train"):
            raise UsageError(
                f"The model `{model.name}` has a `train_step` of its own, and simulated workers take Keras' steps",
                "leave it out, or put what it does into `compute_loss`",
            )
        self._model, self._feed, self._division = model, feed, Division(size)
        self._trained = [variable.value for variable in model.trainable_variables]
        others = [*model.non_trainable_variables, *model.optimizer.variables]
        self._rest = [variable.value for variable in others]
        self._passes: dict[int, Any] = {}
        self._graphs: dict[str, Any] = {}
        self.first = np.concatenate([value.numpy().reshape(-1) for value in self._trained]).astype(np.float32)
        self.rest: State = [tf.identity(value) for value in self._rest]
        self.parameters = self.first.size
        self._moving = len(model.non_trainable_variables)
        self.slots = [index for index, value in enumerate(self._rest) if value.dtype.is_floating and value.shape.rank]
        self.losses: list[float] = []

    def train(self, rank: int, step: int, weights: np.ndarray, rest: State) -> tuple[np.ndarray, State]:
        """The weights and the rest of worker `rank` after its step number `step` of the run."""
        if self.examples(rank, step) == 0:
            return weights, rest
        new, state, loss = self._call("step", tf.constant(weights), rest, *self._place(rank, step))
        self.losses.append(float(loss))
        return new.numpy(), state

    def gradient(self, rank: int, step: int, weights: np.ndarray, rest: State) -> tuple[np.ndarray, State, int]:
        """The gradient of worker `rank` at `weights`, the rest after the forward pass, and the number of examples."""
        if self.examples(rank, step) == 0:
            return np.zeros_like(weights), rest, 0
        gradient, state, loss = self._call("gradient", tf.constant(weights), rest, *self._place(rank, step))
        self.losses.append(float(loss))
        return gradient.numpy(), state, self.examples(rank, step)

    def apply(self, weights: np.ndarray, rest: State, gradient: np.ndarray) -> tuple[np.ndarray, State]:
        """The weights and the rest after an update of the optimizer."""
        new, state = self._call("apply", tf.constant(weights), rest, tf.constant(gradient))
        return new.numpy(), state

    def with_moving(self, rest: State, of: list[State]) -> State:
        """`rest` with the moving averages, which layers keep, of other states: their mean."""
        moving = []
        for index in range(self._moving):
            values = [state[index] for state in of]
            same = not values[0].dtype.is_floating or len(values) == 1
            moving.append(values[0] if same else tf.reduce_mean(tf.stack(values), 0))
        return [*moving, *rest[self._moving :]]

    def examples(self, rank: int, step: int) -> int:
        """The number of examples of worker `rank` in its step number `step`."""
        begin, end = self._division.part(self._length(step), rank)
        return int(end - begin)

    def learning_rate(self, rest: State) -> float:
        """That of a worker's optimizer."""
        self._assign(self._rest, rest)
        return float(keras.ops.convert_to_numpy(self._model.optimizer.learning_rate))

    def evaluate(self, weights: np.ndarray, rest: State, data: Any) -> dict[str, float]:
        """The model's loss and metrics with these weights over `data`, as `Model.evaluate` has them."""
        self._assign(self._trained, self._unpacked(tf.constant(weights)))
        self._assign(self._rest, rest)
        found: dict[str, float] = self._model.evaluate(data, verbose=0, return_dict=True)
        return found

    @property
    def steps_per_epoch(self) -> int:
        """The number of global batches in an epoch."""
        return int(self._feed.num_batches)

    def _length(self, step: int) -> int:
        number = step % self.steps_per_epoch
        return min(self._feed.batch_size, self._feed.examples - number * self._feed.batch_size)

    def _place(self, rank: int, step: int) -> tuple[Any, tf.Tensor, tf.Tensor]:
        """Where a graph finds the part of a worker of a global batch: the pass, the batch's number in it, the rank."""
        epoch, number = divmod(step, self.steps_per_epoch)
        if epoch not in self._passes:
            self._passes[epoch] = self._feed.start(epoch, 0)
        return self._passes[epoch], tf.constant(number), tf.constant(rank)

    def _call(self, name: str, *arguments: Any) -> Any:
        """Calls a graph, which is found by its name: `tf.function` would look at the types of all tensors each time."""
        if name not in self._graphs:
            made = {"step": self._step_in_graph, "gradient": self._gradient_in_graph, "apply": self._apply_in_graph}
            self._graphs[name] = tf.function(made[name], autograph=False).get_concrete_function(*arguments)
        return self._graphs[name](*arguments)

    def _step_in_graph(
        self, weights: tf.Tensor, rest: State, of_pass: Any, number: tf.Tensor, rank: tf.Tensor
    ) -> tuple[tf.Tensor, State, tf.Tensor]:
        gradient, loss = self._differentiated(weights, rest, of_pass, number, rank)
        self._model.optimizer.apply(gradient, self._model.trainable_variables)
        return packed(self._trained), [value.read_value() for value in self._rest], loss

    def _gradient_in_graph(
        self, weights: tf.Tensor, rest: State, of_pass: Any, number: tf.Tensor, rank: tf.Tensor
    ) -> tuple[tf.Tensor, State, tf.Tensor]:
        gradient, loss = self._differentiated(weights, rest, of_pass, number, rank)
        dense = [tf.convert_to_tensor(one) for one in gradient]
        return packed(dense), [value.read_value() for value in self._rest], loss

    def _differentiated(
        self, weights: tf.Tensor, rest: State, of_pass: Any, number: tf.Tensor, rank: tf.Tensor
    ) -> tuple[list[Any], tf.Tensor]:
        self._assign(self._trained, self._unpacked(weights))
        self._assign(self._rest, rest)
        batches = self._feed.batches
        batch = batches.examples(of_pass, batches.fetch(of_pass, number), rank, self._division)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        with tf.GradientTape() as tape:
            outputs = self._model(x, training=True)
            loss = self._model.compute_loss(x=x, y=y, y_pred=outputs, sample_weight=sample_weight, training=True)
            scaled = self._model.optimizer.scale_loss(loss)
        return tape.gradient(scaled, self._trained), loss

    def _apply_in_graph(self, weights: tf.Tensor, rest: State, gradient: tf.Tensor) -> tuple[tf.Tensor, State]:
        self._assign(self._trained, self._unpacked(weights))
        self._assign(self._rest, rest)
        self._model.optimizer.apply(self._unpacked(gradient), self._model.trainable_variables)
        return packed(self._trained), [value.read_value() for value in self._rest]

    def _unpacked(self, flat: tf.Tensor) -> list[tf.Tensor]:
        pairs = zip(unpacked(flat, self._trained), self._trained, strict=True)
        return [tf.cast(part, value.dtype) for part, value in pairs]

    def _assign(self, variables: list[tf.Variable], values: list[tf.Tensor]) -> None:
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
