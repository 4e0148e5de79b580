"""The part of the global batches that a process trains on by itself."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.input import batch_parts
from tfdist.data.input.array_feed import ArrayBatches
from tfdist.data.input.division import WHOLE, Division
from tfdist.data.input.feed import Batches
from tfdist.internals import keras as keras_internals


def own(batches: Batches, rank: int, size: int, *, split_once: bool) -> Any:
    """The batches of process `rank` of `size`.

    Args:
        batches: of all processes.
        rank: of this process.
        size: the number of processes.
        split_once: divide arrays before the first epoch, so that a process has the same examples in every epoch, and
            not each batch.
    """
    if isinstance(batches, ArrayBatches):
        return SplitArrays(batches, rank, size) if split_once else ArrayParts(batches, rank, Division(size))
    return StreamParts(batches, rank, Division(size), _counter())


@dataclasses.dataclass(frozen=True)
class SplitArrays(Batches):
    """The examples of one process, which are the same in every epoch: its part of `np.array_split`.

    Each step takes such a number of them that all processes end an epoch with the same step.
    """

    whole: ArrayBatches
    rank: int
    processes: int
    length_known: bool = True

    def state(self, state: Any) -> Any:
        """This process' part of a pass, in the order of the pass, and the number of examples of all processes."""
        arrays, positions = state
        order = positions[0].numpy()
        lengths = [len(part) for part in np.array_split(order, self.processes)]
        begin, end = sum(lengths[: self.rank]), sum(lengths[: self.rank + 1])
        own = (begin <= order) & (order < end)
        return (arrays, tuple(tf.constant(of_each.numpy()[own]) for of_each in positions)), len(order)

    def examples(self, state: Any, first: int, steps: int) -> int:
        """The number of examples of this process in `steps` steps from `first` on."""
        return int(self._end(state, first + steps) - self._end(state, first))

    def fetch(self, state: Any, step: tf.Tensor) -> tuple[tf.Tensor, ...]:
        (_, positions), _ = state
        if self._even:  # a static shape makes a faster graph
            count = self.whole.batch_size // self.processes
            sizes = [[count, *of_each.shape[1:]] for of_each in positions]
            starts = [[step * count, *[0] * (of_each.shape.rank - 1)] for of_each in positions]
            return tuple(map(tf.slice, positions, starts, sizes))
        begin, end = self._end(state, step), self._end(state, step + 1)
        return tuple(of_each[begin:end] for of_each in positions)

    def part(self, state: Any, batch: tuple[tf.Tensor, ...], index: int, division: Division) -> tuple[Any, Any]:
        """As its share the fraction of all examples that are of this process; that of a batch is a little off."""
        del index, division
        own, of_all = state
        data, _ = self.whole.part(own, batch, 0, WHOLE)
        return data, 1 / self.processes if self._even else tf.size(own[1][0]) / of_all

    def note(self, state: Any, batch: tuple[tf.Tensor, ...]) -> None:
        """A step's examples need no counting: they follow from its number."""

    def has_examples(self, state: Any, batch: tuple[tf.Tensor, ...]) -> bool | tf.Tensor:
        """Whether this process has an example of the step's global batch."""
        del state
        return True if self._even else tf.shape(batch[0])[0] > 0

    @property
    def _even(self) -> bool:
        return self.whole.even and self.whole.batch_size % self.processes == 0

    def _end(self, state: Any, step: Any) -> Any:
        """The position of step `step` in this process' examples: the same fraction as in all examples, rounded."""
        (_, positions), examples = state
        seen = tf.minimum(tf.cast(step, tf.int64) * self.whole.batch_size, examples)
        own_count, examples = tf.cast(tf.shape(positions[0])[0], tf.int64), tf.cast(examples, tf.int64)
        return tf.cast((2 * own_count * seen + examples) // (2 * examples), tf.int32)


@dataclasses.dataclass(frozen=True)
class _Parts(Batches):
    """A process' part of each global batch."""

    whole: Any
    rank: int
    division: Division

    @property
    def length_known(self) -> bool:  # type: ignore[override]
        return bool(self.whole.length_known)

    def state(self, state: Any) -> Any:
        return state

    def fetch(self, state: Any, step: tf.Tensor) -> Any:
        return self.whole.fetch(state, step)

    def has_examples(self, state: Any, batch: Any) -> bool | tf.Tensor:
        """Whether this process has an example of the step's global batch."""
        return self._own_part(state, batch)[1] > 0

    def part(self, state: Any, batch: Any, index: int, division: Division) -> tuple[Any, Any]:
        del index, division
        return self._own_part(state, batch)

    def _own_part(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """The examples of this process, and their share of the batch."""
        found: tuple[Any, Any] = self.whole.part(state, batch, self.rank, self.division)
        return found


@dataclasses.dataclass(frozen=True)
class ArrayParts(_Parts):
    """A process' part of each batch of arrays, whose examples follow from the number of a step."""

    whole: ArrayBatches

    def examples(self, state: Any, first: int, steps: int) -> int:
        """The number of examples of this process in `steps` steps from `first` on."""
        size, left = self.whole.batch_size, int(state[1][0].shape[0]) - first * self.whole.batch_size
        lengths = [min(size, left - step * size) for step in range(steps)]
        return sum(end - begin for begin, end in (self.division.part(length, self.rank) for length in lengths))

    def note(self, state: Any, batch: Any) -> None:
        """A step's examples need no counting: they follow from its number."""


@dataclasses.dataclass(frozen=True)
class StreamParts(_Parts):
    """A process' part of each batch of a stream, whose examples are counted as they come."""

    seen: tf.Variable  # an int64 scalar: the examples of this process that have not been asked for

    def examples(self, state: Any, first: int, steps: int) -> int:
        """The number of examples of this process in the steps since this was last called."""
        del state, first, steps
        seen = int(self.seen.numpy())
        self.seen.assign(0)
        return seen

    def note(self, state: Any, batch: Any) -> None:
        """Counts the examples that this process has of the step's global batch."""
        data, share = self._own_part(state, batch)
        flat = [one for one in keras_internals.tree.flatten(data) if batch_parts.has_examples(one)]
        self.seen.assign_add(tf.where(share > 0, tf.cast(batch_parts.length(flat[0]), tf.int64), 0))


def _counter() -> tf.Variable:
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.Variable(0, dtype=tf.int64, trainable=False)
