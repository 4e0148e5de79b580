"""The real training steps of simulated workers, which share a single model.

A worker consists of its trainable weights, float32 `[n]`, which algorithms exchange, and its state: the values of the
model's non-trainable variables, such as moving averages, and of its optimizer's variables.

A step is a function of its worker's weights and state and of its part of a global batch. It is computed when its result
is needed, and then all steps that have begun are computed in one call of a graph, since each call has a cost, and
steps of different workers do not depend on each other.

    gradients       of the steps side by side, with the weights as tensors
    updates         one after the other, in the variables of the model and its optimizer
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.data.input.array_feed import ArrayFeed
from tfdist.data.input.division import Division
from tfdist.errors import UsageError
from tfdist.internals import keras as keras_internals
from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.optimizers import fused
from tfdist.relaxed.compression import packed
from tfdist.simulator.state import Packing, State, Values

# The most bytes of weights and state in a call of a graph, whose results are in memory as long as one of them is.
BYTES_OF_A_CALL = 16 * 2**20
STEPS_SIDE_BY_SIDE = 4  # enough to use the cores that small steps leave idle
ALIGNMENT = 64  # bytes; TensorFlow uses arrays at such addresses, and rows of such a size, without copying them
_LOSS = tf.TensorSpec([], tf.float32)


@dataclass(eq=False)
class Step:
    """A step that has begun; see `Replicas.begin`.

    Attributes:
        kind: "train" or "gradient".
        epoch: the number of the epoch.
        batch: the number of the global batch in the epoch.
        part: the number of the part of the batch.
        weights: the weights before the step.
        state: the state before the step.
        computed: the new weights or the gradient, the new state, and the loss, which is `None` for a part without
            examples; `None` until the step is computed.
    """

    kind: str
    epoch: int
    batch: int
    part: int
    weights: np.ndarray
    state: State
    computed: tuple[np.ndarray, State, float | None] | None = None


class Replicas:
    """The steps of `size` workers, each on its part of every global batch.

    Args:
        model: a compiled and built model whose optimizer has its slots.
        feed: the training data, with batches available in any order.
        size: the number of workers.

    Attributes:
        averages: where the model's non-trainable variables are in a state.
        optimizer: where the optimizer's variables are in a state.
        initial_weights: the weights that all workers begin with, float32 `[n]`.
        initial_state: the state that all workers begin with.
        parameters: the number of trainable weights.
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
        self.averages = Packing([variable.value for variable in model.non_trainable_variables])
        self.optimizer = Packing([variable.value for variable in model.optimizer.variables])
        self._scales_loss = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        self._epochs: dict[int, Any] = {}
        self._graphs: dict[str, Any] = {}
        self._begun: list[Step] = []
        # The weights and the optimizer's values that the variables have, if `apply` was the last that changed them.
        self._held: tuple[np.ndarray | None, Values | None] = None, None
        self.initial_weights: np.ndarray = packed(self._weights).numpy()
        self.initial_state = State(self.averages.read(), self.optimizer.read())
        self.parameters = self.initial_weights.size
        self.losses: list[float] = []

    def begin(self, kind: str, part: int, step: int, weights: np.ndarray, state: State) -> Step:
        """Begins step number `step` of the run on a part of its global batch.

        Args:
            kind: "train" for new weights, or "gradient" for the gradient at `weights`.
            part: the number of the part.
            step: the number of the step.
            weights: the weights of the worker, which must not change afterwards.
            state: the state of the worker, which must not change afterwards.
        """
        begun = Step(kind, *divmod(step, self.steps_per_epoch), part, weights, state)
        if self.examples(part, step):
            self._begun.append(begun)
        else:
            begun.computed = (weights if kind == "train" else np.zeros_like(weights), state, None)
        return begun

    def result(self, step: Step) -> tuple[np.ndarray, State]:
        """Returns the new weights of a step, or its gradient, and the new state."""
        if step.computed is None:
            self._compute_begun()
        assert step.computed is not None
        array, state, loss = step.computed
        if loss is not None:
            self.losses.append(loss)
        return array, state

    def apply(self, weights: np.ndarray, state: State, gradient: np.ndarray) -> tuple[np.ndarray, State]:
        """Returns the weights and the state after the optimizer has applied `gradient`."""
        if self._held[0] is not weights or self._held[1] is not state.optimizer:
            _assign(self._weights, self._unpacked(tf.constant(weights)))
            self.optimizer.assign(state.optimizer)
        new_weights, optimizer = self._call("apply", self._update_graph, _stacked([gradient]))
        self._held = np.asarray(new_weights), {name: np.asarray(array) for name, array in optimizer.items()}
        return self._held[0], State(state.averages, self._held[1])

    def examples(self, part: int, step: int) -> int:
        """Returns the number of examples of a part of the global batch of step number `step`."""
        number = step % self.steps_per_epoch
        batch_size = min(self._feed.batch_size, self._feed.examples - number * self._feed.batch_size)
        begin, end = self._division.part(batch_size, part)
        return int(end - begin)

    def learning_rate(self, state: State) -> float:
        """Returns the learning rate of the last step that led to this state."""
        self._held = None, None
        self.optimizer.assign(state.optimizer)
        return keras_internals.last_learning_rate(self._model.optimizer)

    def evaluate(self, weights: np.ndarray, state: State, data: Any) -> dict[str, float]:
        """Evaluates the model with these weights on `data`; returns loss and metrics as `Model.evaluate` does."""
        self._held = None, None
        _assign(self._weights, self._unpacked(tf.constant(weights)))
        self.averages.assign(state.averages)
        metrics: dict[str, float] = self._model.evaluate(data, verbose=0, return_dict=True)
        return metrics

    @property
    def steps_per_epoch(self) -> int:
        """The number of global batches per epoch."""
        return int(self._feed.num_batches)

    def _compute_begun(self) -> None:
        """Computes all steps that have begun, with as few calls of graphs as their memory permits."""
        begun, self._begun = self._begun, []
        alike: dict[tuple[str, int], list[Step]] = {}
        for step in begun:
            alike.setdefault((step.kind, step.epoch), []).append(step)
        state = self.initial_state
        arrays = (self.initial_weights, *state.averages.values(), *state.optimizer.values())
        most = max(1, BYTES_OF_A_CALL // sum(array.nbytes for array in arrays))
        for steps in alike.values():
            for first in range(0, len(steps), most):
                self._compute(steps[first : first + most])

    def _compute(self, steps: Sequence[Step]) -> None:
        """Computes steps of the same kind and epoch."""
        kind, epoch = steps[0].kind, steps[0].epoch
        if epoch not in self._epochs:
            self._epochs = {epoch: self._feed.start(epoch, 0)}
        if kind == "train":
            self._held = None, None
        needs_optimizer = kind == "train" or self._scales_loss
        stacked = (
            _stacked([step.weights for step in steps]),
            _stacked_values([step.state.averages for step in steps]),
            _stacked_values([step.state.optimizer for step in steps]) if needs_optimizer else {},
            tf.constant([step.batch for step in steps]),
            tf.constant([step.part for step in steps]),
        )
        graph = self._train_graph if kind == "train" else self._gradient_graph
        arrays, averages, optimizer, losses = self._call(kind, graph, stacked, self._epochs[epoch])
        rows = zip(np.asarray(arrays), _rows(averages, len(steps)), losses.numpy().tolist(), strict=True)
        optimizers = _rows(optimizer, len(steps)) if kind == "train" else [step.state.optimizer for step in steps]
        for step, (array, new_averages, loss), new_optimizer in zip(steps, rows, optimizers, strict=True):
            step.computed = array, State(new_averages, new_optimizer), loss

    def _call(self, name: str, function: Any, stacked: Any, *others: Any) -> Any:
        """Calls the graph of a function of `stacked` arrays, of which there may be any number, and `others`."""
        if name not in self._graphs:
            specs = tf.nest.map_structure(lambda array: tf.TensorSpec([None, *array.shape[1:]], array.dtype), stacked)
            graph = tf.function(function, autograph=False)
            # A concrete function, since `tf.function` would examine the types of all tensors in each call.
            with tensorflow_internals.own_traces():
                self._graphs[name] = graph.get_concrete_function(specs, *others)
        return self._graphs[name](stacked, *others)

    def _train_graph(self, stacked: Any, epoch: Any) -> Any:
        """Returns the new weights, moving averages and optimizer's variables of each step, and its loss."""
        weights, _, optimizer, *_ = stacked

        def differentiate(index: tf.Tensor) -> Any:
            step_weights, *step = _element(stacked, index)
            values = self._unpacked(step_weights)
            gradients, *others = self._differentiate(epoch, values, *step)
            return values, gradients, others

        def update(index: tf.Tensor) -> Any:
            _assign(self._weights, _read(values, index))
            self.optimizer.assign(_element(optimizer, index))
            return self._update(_read(gradients, index))

        count, state = tf.shape(weights)[0], self.initial_state
        specs: Any = self._weight_specs, self._weight_specs, [_specs(state.averages), _LOSS]
        values, gradients, others = _each(count, differentiate, specs, STEPS_SIDE_BY_SIDE)
        specs = tf.TensorSpec([self.parameters], tf.float32), _specs(state.optimizer)
        updates = _each(count, update, specs, 1)  # one after the other, since all use the same variables
        (new_weights, new_optimizer), (new_averages, losses) = _stack(updates), _stack(others)
        return new_weights, new_averages, new_optimizer, losses

    def _gradient_graph(self, stacked: Any, epoch: Any) -> Any:
        """Returns the gradient of each step, its new moving averages, nothing, and its loss."""
        weights, *_ = stacked

        def differentiate(index: tf.Tensor) -> Any:
            step_weights, *step = _element(stacked, index)
            gradients, *others = self._differentiate(epoch, self._unpacked(step_weights), *step)
            return packed(gradients), others

        specs = tf.TensorSpec([self.parameters], tf.float32), [_specs(self.initial_state.averages), _LOSS]
        results = _each(tf.shape(weights)[0], differentiate, specs, STEPS_SIDE_BY_SIDE)
        gradients, (new_averages, losses) = _stack(results)
        return gradients, new_averages, {}, losses

    def _update_graph(self, stacked: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Updates the variables by a gradient as the only row; returns their values."""
        return self._update(self._unpacked(stacked[0]))

    def _differentiate(
        self, epoch: Any, values: list[tf.Tensor], averages: Any, optimizer: Any, number: tf.Tensor, part: tf.Tensor
    ) -> tuple[list[tf.Tensor], Any, tf.Tensor]:
        """Returns the gradients at the `values` of the weights, the new moving averages, and the loss.

        Assigns no variable, so that steps can be computed side by side.
        """
        model, batches = self._model, self._feed.batches
        state = [*zip(model.trainable_variables, values, strict=True)]
        state += zip(model.non_trainable_variables, self.averages.unpacked(averages), strict=True)
        if optimizer:
            state += zip(model.optimizer.variables, self.optimizer.unpacked(optimizer), strict=True)
        batch = batches.examples(epoch, batches.fetch(epoch, number), part, self._division)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(values)
            with keras.StatelessScope(state, collect_losses=True) as scope:
                outputs = model(x, training=True)
                loss = model.compute_loss(x=x, y=y, y_pred=outputs, sample_weight=sample_weight, training=True)
                scaled = model.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, values, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        new_averages = [scope.get_current_value(variable) for variable in model.non_trainable_variables]
        dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
        return dense, self.averages.packed(new_averages), tf.cast(loss, tf.float32)

    def _update(self, gradients: Any) -> tuple[tf.Tensor, Any]:
        """Lets the optimizer update the variables; returns their values."""
        with fused.fused(self._model.optimizer):
            self._model.optimizer.apply(gradients, self._model.trainable_variables)
        return packed(self._weights), self.optimizer.packed(self.optimizer.variables)

    @property
    def _weight_specs(self) -> list[tf.TensorSpec]:
        return [tf.TensorSpec(variable.shape, variable.dtype) for variable in self._weights]

    def _unpacked(self, flat: tf.Tensor) -> list[tf.Tensor]:
        """Returns the parts of an array of weights, which may have padding at its end, by variable."""
        sizes = [math.prod(variable.shape) for variable in self._weights]
        parts = tf.split(flat, [*sizes, flat.shape[0] - sum(sizes)])[:-1]
        pairs = zip(parts, self._weights, strict=True)
        return [tf.cast(tf.reshape(part, variable.shape), variable.dtype) for part, variable in pairs]


def _assign(variables: list[tf.Variable], values: list[tf.Tensor]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _each(count: tf.Tensor, function: Callable[[tf.Tensor], Any], specs: Any, side_by_side: int) -> Any:
    """Returns the results of `function(index)` for the indices below `count`, as `tf.TensorArray`s.

    In contrast to `tf.map_fn`, the results are not copied.

    Args:
        count: the number of calls.
        function: returns a structure of tensors.
        specs: the specs of these tensors.
        side_by_side: how many calls may be computed at the same time.
    """
    flat = [tf.TensorArray(spec.dtype, count, element_shape=spec.shape) for spec in tf.nest.flatten(specs)]

    def call(index: tf.Tensor, arrays: Any) -> Any:
        results = tf.nest.flatten(function(index))
        return index + 1, [array.write(index, result) for array, result in zip(arrays, results, strict=True)]

    _, flat = tf.while_loop(lambda index, _: index < count, call, (0, flat), parallel_iterations=side_by_side)
    return tf.nest.pack_sequence_as(specs, flat)


def _specs(values: Values) -> dict[str, tf.TensorSpec]:
    return {name: tf.TensorSpec(array.shape, array.dtype) for name, array in values.items()}


def _element(stacked: Any, index: tf.Tensor) -> Any:
    return tf.nest.map_structure(lambda array: array[index], stacked)


def _stack(arrays: Any) -> Any:
    return tf.nest.map_structure(lambda array: array.stack(), arrays)


def _read(arrays: Any, index: tf.Tensor) -> Any:
    return tf.nest.map_structure(lambda array: array.read(index), arrays)


def _stacked(arrays: Sequence[np.ndarray]) -> tf.Tensor:
    """Returns float32 arrays `[n]` as the rows of one tensor, which are padded; they are copied once."""
    row_bytes = -(-arrays[0].nbytes // ALIGNMENT) * ALIGNMENT
    memory = np.empty(len(arrays) * row_bytes + ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    rows = memory[begin : begin + len(arrays) * row_bytes].view(np.float32).reshape(len(arrays), -1)
    np.stack(arrays, out=rows[:, : arrays[0].size])
    rows[:, arrays[0].size :] = 0
    return tf.experimental.dlpack.from_dlpack(rows.__dlpack__())


def _stacked_values(values: Sequence[Values]) -> dict[str, tf.Tensor]:
    arrays = {name: [each[name] for each in values] for name in values[0]}
    return {name: _stacked(rows) if name == "float32" else tf.constant(np.stack(rows)) for name, rows in arrays.items()}


def _rows(stacked: dict[str, tf.Tensor], count: int) -> list[Values]:
    """Returns the values of each of `count` steps."""
    arrays = {name: array.numpy() for name, array in stacked.items()}
    return [{name: array[index] for name, array in arrays.items()} for index in range(count)]
