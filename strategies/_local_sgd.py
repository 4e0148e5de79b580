"""The inner loop of local SGD: each process trains on its own part of the data, and the weights are averaged at times.

    run(state, first, count)
        steps up to the next averaging         Keras' plain train_step, on this process' examples alone
        weights and slots = their mean over the processes, weighted by the examples of each since the last averaging
        metrics = their sums over the processes

SGD with an averaging after each step is synchronous training: the mean of the new weights is a step along the mean
gradient. Otherwise the weights drift apart between averagings; the distance is measured before each.

Source: Stich, Local SGD converges fast and communicates little, ICLR 2019; on averaging the optimizer's slots, Wang et
al., SlowMo, ICLR 2020.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.core import metrics
from tfdist.core.inner_loop import Outcome, StepProgram, Steps
from tfdist.core.metrics import Logs
from tfdist.core.steps_per_call import AtNan
from tfdist.data.pipeline import batch_parts
from tfdist.data.pipeline.array_feed import ArrayBatches
from tfdist.data.pipeline.division import WHOLE, Division
from tfdist.data.pipeline.feed import Batches
from tfdist.internals import keras as keras_internals
from tfdist.internals import tensorflow_variables
from tfdist.internals.keras import tf_variable
from tfdist.internals.tensorflow_variables import PIECE_BYTES, size_bytes
from tfdist.strategies import base


class AveragingProgram(StepProgram):
    """Runs `model.train_step` on this process' part of the data.

    Args:
        strategy: has the `communicator`.
        steps: of training, on the batches of all processes.
        sync_every: average after this number of steps; `None` averages at the end of an epoch only.
        averages: how the processes average; `None` is over all of them.
    """

    meets_in_each_step = False

    def __init__(self, strategy: Any, steps: Steps, sync_every: int | None, averages: Averages | None = None):
        self._job = strategy
        rank, size = strategy.communicator.rank, strategy.communicator.size
        in_memory = isinstance(steps.batches, ArrayBatches)
        self._own: Any = (
            OwnBatches(steps.batches, rank, size)  # type: ignore[arg-type]
            if in_memory
            else _PartBatches(steps.batches, rank, size, _counter())
        )
        self._sync_every = sync_every
        self._averages = averages or Averages(strategy.communicator, steps.model)
        self._state: tuple[Any, Any] = (None, None)
        super().__init__(
            base.OnThisProcess(strategy), dataclasses.replace(steps, batches=self._own, at_nan=AtNan.NOTHING)
        )

    def begin_epoch(self) -> None:
        self._averages.begin_epoch()

    def run(self, state: Any, first: int, count: int) -> Outcome:
        """Runs `count` global steps; in some of them this process may have no example."""
        if state is not self._state[0]:
            self._state = state, self._own.state(state)
        done, ended = 0, False
        own: Logs = {}
        while done < count and not ended:
            wanted = count - done
            if self._sync_every is not None:
                wanted = min(wanted, self._sync_every - (first + done) % self._sync_every)
            outcome = super().run(self._state[1], first + done, wanted)
            self._averages.note(self._own.examples(self._state[1], first + done, outcome.steps))
            done, ended, own = done + outcome.steps, outcome.data_ended, outcome.logs or own
            if self._sync_every is not None and (first + done) % self._sync_every == 0:
                self._averages.take()
        merged = metrics.results(self._job, self._model) if done else {}
        return Outcome(done, ended, own | {name: value for name, value in merged.items() if name in own})

    def end_epoch(self) -> dict[str, float]:
        """Averages, and returns the logs about the epoch's averagings."""
        return self._averages.end_epoch()

    def _step(self, state: Any, batch: Any) -> tuple[tf.Tensor, Logs]:
        self._own.note(state, batch)
        has_examples = self._own.has_examples(state, batch)
        if has_examples is True:
            return super()._step(state, batch)
        step = super()._step
        return tf.cond(has_examples, lambda: step(state, batch), lambda: (tf.constant(True), self._no_logs()))


class Averages:
    """Averages a model's weights and its optimizer's slots over the processes, one part after the other.

    Attributes:
        taken: the number of averagings so far.
    """

    def __init__(self, communicator: Any, model: Any):
        self.communicator = communicator
        self.taken = 0
        # Seeds and counters, which are integers, are not averaged.
        weights = [v for v in model.trainable_variables + model.non_trainable_variables if _is_float(v)]
        self._parts = _parts([*weights, *_slots(model)], sum(math.prod(v.shape) for v in weights))
        self._examples = 0
        self._share = 0.0
        self.begin_epoch()

    def begin_epoch(self) -> None:
        self._disagreements: list[float] = []
        self._seconds = 0.0

    def note(self, examples: int) -> None:
        """Counts `examples` more that this process has trained on."""
        self._examples += examples

    def take(self) -> None:
        """Gives every process the mean of the weights, and measures the time and the distance from it."""
        began = time.perf_counter()
        examples = np.array([self._examples], np.float64)
        self.communicator.sum_in_place(examples)
        if examples[0] == 0:
            return
        self._share, self._examples = self._examples / examples[0], 0
        distance = np.array([sum(part.average(self.mean) for part in self._parts)], np.float64)
        self.communicator.sum_in_place(distance)
        self._disagreements.append(math.sqrt(distance[0] / self.communicator.size))
        self.taken += 1
        self._seconds += time.perf_counter() - began

    def mean(self, values: np.ndarray) -> np.ndarray:
        """The mean of the processes' `values`, weighted by their examples since the last averaging.

        It is called for each part of the weights and slots, whose number is the same in all processes. An algorithm
        that averages otherwise overrides this; `values` must stay as they are.
        """
        mean = values * np.float32(self._share)
        self.communicator.sum_in_place(mean)
        return mean

    def end_epoch(self) -> dict[str, float]:
        self.take()
        # The mean over the processes on the chief; on the others their own.
        seconds = self.communicator.sum_on(self._seconds)
        mean = self._seconds if seconds is None else seconds / self.communicator.size
        disagreement = float(np.mean(self._disagreements)) if self._disagreements else 0.0
        return {"disagreement": disagreement, "sync_seconds": mean}


class _Part:
    """Some of the weights and slots, which travel in one array.

    Args:
        variables: small ones, or a large one.
        weights: the number of their elements that are weights, which come before the slots.
    """

    def __init__(self, variables: Sequence[tf.Variable], weights: int):
        self.weights = weights
        self.size = sum(map(_size, variables))
        self._variables = variables
        # One copy to NumPy and one back, instead of one per variable.
        self._pack_in_graph = tf.function(self._pack, autograph=False)
        self._unpack_in_graph = tf.function(self._unpack, autograph=False)

    def average(self, mean: Callable[[np.ndarray], np.ndarray]) -> float:
        """Assigns the `mean` of the values, and returns the squared distance of the weights from it."""
        if len(self._variables) == 1 and size_bytes(self._variables[0]) > PIECE_BYTES:
            return self._average_large(mean)
        local = self._pack_in_graph().numpy()
        averaged = mean(local)
        self._unpack_in_graph(tf.constant(averaged))
        return _squared(local[: self.weights] - averaged[: self.weights])

    def _average_large(self, mean: Callable[[np.ndarray], np.ndarray]) -> float:
        """As `average`, of one variable, in pieces."""
        (variable,) = self._variables
        whole = tensorflow_variables.read(variable).reshape(-1).copy()
        distance = 0.0
        for begin in range(0, whole.size, PIECE_BYTES // whole.itemsize):
            piece = whole[begin : begin + PIECE_BYTES // whole.itemsize]
            local = piece.astype(np.float32)
            averaged = mean(local)
            distance += _squared(local - averaged) if self.weights else 0.0
            piece[:] = averaged
        tensorflow_variables.fill(variable, whole)
        return distance

    def _pack(self) -> tf.Tensor:
        return tf.concat([tf.reshape(tf.cast(variable, tf.float32), [-1]) for variable in self._variables], 0)

    def _unpack(self, flat: tf.Tensor) -> None:
        parts = tf.split(flat, list(map(_size, self._variables)))
        for variable, part in zip(self._variables, parts, strict=True):
            variable.assign(tf.cast(tf.reshape(part, variable.shape), variable.dtype))


def _parts(variables: Sequence[Any], weights: int) -> list[_Part]:
    """The parts of `variables`, of whose elements the first `weights` are weights."""
    parts: list[_Part] = []
    for pack in tensorflow_variables.packs(variables, PIECE_BYTES):
        parts.append(_Part([held[0] for held in pack], max(weights, 0)))
        weights -= parts[-1].size
    return parts


def _counter() -> tf.Variable:
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.Variable(0, dtype=tf.int64, trainable=False)


def _size(variable: tf.Variable) -> int:
    return math.prod(variable.shape)


def _squared(difference: np.ndarray) -> float:
    return float(np.dot(difference, difference))


def _slots(model: Any) -> list[Any]:
    """The slots of the model's optimizers: those of their variables that have the shape of a weight."""
    shapes = {tuple(variable.shape) for variable in model.trainable_variables} - {()}
    variables = [variable for optimizer in keras_internals.optimizers(model) for variable in optimizer.variables]
    return [v for v in variables if _is_float(v) and tuple(v.shape) in shapes]


def _is_float(variable: Any) -> bool:
    return tf_variable(variable).dtype.is_floating


@dataclasses.dataclass(frozen=True)
class OwnBatches(Batches):
    """The examples of one process, which are the same in every epoch: its part of `np.array_split`.

    Each step takes such a number of them that all processes end an epoch with the same step.
    """

    whole: ArrayBatches
    rank: int
    size: int
    length_known: bool = True

    def state(self, state: Any) -> Any:
        """This process' part of a pass, in the order of the pass, and the number of examples of all processes."""
        arrays, positions = state
        order = positions[0].numpy()
        lengths = [len(part) for part in np.array_split(order, self.size)]
        begin, end = sum(lengths[: self.rank]), sum(lengths[: self.rank + 1])
        own = (begin <= order) & (order < end)
        return (arrays, tuple(tf.constant(of_each.numpy()[own]) for of_each in positions)), len(order)

    def examples(self, state: Any, first: int, steps: int) -> int:
        """The number of examples of this process in `steps` steps from `first` on."""
        return int(self._end(state, first + steps) - self._end(state, first))

    def fetch(self, state: Any, step: tf.Tensor) -> tuple[tf.Tensor, ...]:
        (_, positions), _ = state
        if self._even:  # a static shape makes a faster graph
            count = self.whole.batch_size // self.size
            sizes = [[count, *of_each.shape[1:]] for of_each in positions]
            starts = [[step * count, *[0] * (of_each.shape.rank - 1)] for of_each in positions]
            return tuple(map(tf.slice, positions, starts, sizes))
        begin, end = self._end(state, step), self._end(state, step + 1)
        return tuple(of_each[begin:end] for of_each in positions)

    def part(self, state: Any, batch: tuple[tf.Tensor, ...], index: int, division: Division) -> tuple[Any, Any]:
        del index, division
        return self.whole.part(state[0], batch, 0, WHOLE)

    def note(self, state: Any, batch: tuple[tf.Tensor, ...]) -> None:
        """A step's examples need no counting: they follow from its number."""

    def has_examples(self, state: Any, batch: tuple[tf.Tensor, ...]) -> bool | tf.Tensor:
        """Whether this process has an example of the step's global batch."""
        del state
        return True if self._even else tf.shape(batch[0])[0] > 0

    @property
    def _even(self) -> bool:
        return self.whole.even and self.whole.batch_size % self.size == 0

    def _end(self, state: Any, step: Any) -> Any:
        """The position of step `step` in this process' examples: the same fraction as in all examples, rounded."""
        (_, positions), examples = state
        seen = tf.minimum(tf.cast(step, tf.int64) * self.whole.batch_size, examples)
        own_count, examples = tf.cast(tf.shape(positions[0])[0], tf.int64), tf.cast(examples, tf.int64)
        return tf.cast((2 * own_count * seen + examples) // (2 * examples), tf.int32)


@dataclasses.dataclass(frozen=True)
class _PartBatches(Batches):
    """Batches that are not in memory and so cannot be split once: each process takes its part of every batch."""

    whole: Batches
    rank: int
    size: int
    seen: tf.Variable  # an int64 scalar: the examples of this process that have not been asked for

    @property
    def length_known(self) -> bool:  # type: ignore[override]
        return self.whole.length_known

    def state(self, state: Any) -> Any:
        return state

    def examples(self, state: Any, first: int, steps: int) -> int:
        del state, first, steps
        seen = int(self.seen.numpy())
        self.seen.assign(0)
        return seen

    def note(self, state: Any, batch: Any) -> None:
        """Counts the examples that this process has of the step's global batch."""
        data, share = self.whole.part(state, batch, self.rank, Division(self.size))
        flat = [one for one in keras_internals.tree.flatten(data) if batch_parts.has_examples(one)]
        self.seen.assign_add(tf.where(share > 0, tf.cast(batch_parts.length(flat[0]), tf.int64), 0))

    def fetch(self, state: Any, step: tf.Tensor) -> Any:
        return self.whole.fetch(state, step)

    def has_examples(self, state: Any, batch: Any) -> bool | tf.Tensor:
        """Whether this process has an example of the step's global batch."""
        return self.whole.part(state, batch, self.rank, Division(self.size))[1] > 0

    def part(self, state: Any, batch: Any, index: int, division: Division) -> tuple[Any, Any]:
        del index, division
        return self.whole.part(state, batch, self.rank, Division(self.size))[0], 1.0
