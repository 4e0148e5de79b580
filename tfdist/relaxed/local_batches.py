"""The part of each global batch that a process trains on by itself."""

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


def local_batches(batches: Batches, rank: int, size: int, *, split_once: bool) -> LocalBatches:
    """The batches of process `rank` of `size`, from the global `batches`.

    With `split_once` arrays are divided before the first epoch, so that a process has the same examples in every epoch;
    otherwise each batch is divided.
    """
    if not isinstance(batches, ArrayBatches):
        with tf.init_scope(), tf.device("CPU:0"):
            seen = tf.Variable(0, dtype=tf.int64, trainable=False)
        return StreamParts(batches, rank, Division(size), seen)
    return SplitArrays(batches, rank, size) if split_once else ArrayParts(batches, rank, Division(size))


class LocalBatches(Batches):
    """The batches of one process, which counts its examples."""

    def state(self, state: Any) -> Any:
        """The state of a pass for this process, from its state for all processes."""
        return state

    def examples(self, state: Any, first: int, steps: int) -> int:
        """The number of examples of this process in `steps` steps, the first of which is number `first`."""
        raise NotImplementedError

    def has_examples(self, state: Any, batch: Any) -> bool | tf.Tensor:
        """Whether this process has an example of the step's global batch."""
        raise NotImplementedError

    def note(self, state: Any, batch: Any) -> None:
        """Counts the examples of this process in a step, unless they follow from the number of the step."""


@dataclasses.dataclass(frozen=True)
class SplitArrays(LocalBatches):
    """The examples of one process, which are the same in every epoch: its part of `np.array_split`.

    The number of examples per step is such that all processes end an epoch with the same step.
    """

    whole: ArrayBatches
    rank: int
    processes: int
    length_known: bool = True

    def state(self, state: Any) -> Any:
        """Returns this process's part of a pass, in the order of the pass, and the number of examples in the pass."""
        arrays, positions = state
        order = positions[0].numpy()
        lengths = [len(part) for part in np.array_split(order, self.processes)]
        begin, end = sum(lengths[: self.rank]), sum(lengths[: self.rank + 1])
        selected = (begin <= order) & (order < end)
        return (arrays, tuple(tf.constant(values.numpy()[selected]) for values in positions)), len(order)

    def examples(self, state: Any, first: int, steps: int) -> int:
        return int(self._end(state, first + steps) - self._end(state, first))

    def fetch(self, state: Any, step: tf.Tensor) -> tuple[tf.Tensor, ...]:
        (_, positions), _ = state
        if self._even:  # a static shape makes a faster graph
            count = self.whole.batch_size // self.processes
            sizes = [[count, *values.shape[1:]] for values in positions]
            starts = [[step * count, *[0] * (values.shape.rank - 1)] for values in positions]
            return tuple(map(tf.slice, positions, starts, sizes))
        begin, end = self._end(state, step), self._end(state, step + 1)
        return tuple(values[begin:end] for values in positions)

    def part(self, state: Any, batch: tuple[tf.Tensor, ...], index: int, division: Division) -> tuple[Any, Any]:
        """Returns the examples, and the process's share of all examples, which approximates its share of a batch."""
        del index, division
        local_state, examples = state
        data, _ = self.whole.part(local_state, batch, 0, WHOLE)
        return data, 1 / self.processes if self._even else tf.size(local_state[1][0]) / examples

    def has_examples(self, state: Any, batch: tuple[tf.Tensor, ...]) -> bool | tf.Tensor:
        del state
        return True if self._even else tf.shape(batch[0])[0] > 0

    @property
    def _even(self) -> bool:
        return self.whole.even and self.whole.batch_size % self.processes == 0

    def _end(self, state: Any, step: Any) -> Any:
        """The position of step `step` in this process's examples: the same fraction as in all examples, rounded."""
        (_, positions), examples = state
        seen = tf.minimum(tf.cast(step, tf.int64) * self.whole.batch_size, examples)
        count, examples = tf.cast(tf.shape(positions[0])[0], tf.int64), tf.cast(examples, tf.int64)
        return tf.cast((2 * count * seen + examples) // (2 * examples), tf.int32)


@dataclasses.dataclass(frozen=True)
class _Parts(LocalBatches):
    """The part of each global batch that belongs to one process."""

    whole: Any
    rank: int
    division: Division

    @property
    def length_known(self) -> bool:  # type: ignore[override]
        return bool(self.whole.length_known)

    def fetch(self, state: Any, step: tf.Tensor) -> Any:
        return self.whole.fetch(state, step)

    def has_examples(self, state: Any, batch: Any) -> bool | tf.Tensor:
        return self._local_part(state, batch)[1] > 0

    def part(self, state: Any, batch: Any, index: int, division: Division) -> tuple[Any, Any]:
        del index, division
        return self._local_part(state, batch)

    def _local_part(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """Returns the examples of this process, and their share of the batch."""
        part: tuple[Any, Any] = self.whole.part(state, batch, self.rank, self.division)
        return part


@dataclasses.dataclass(frozen=True)
class ArrayParts(_Parts):
    """The part of each batch of arrays, in which the number of examples follows from the number of the step."""

    whole: ArrayBatches

    def examples(self, state: Any, first: int, steps: int) -> int:
        size, left = self.whole.batch_size, int(state[1][0].shape[0]) - first * self.whole.batch_size
        lengths = [min(size, left - step * size) for step in range(steps)]
        return sum(end - begin for begin, end in (self.division.part(length, self.rank) for length in lengths))


@dataclasses.dataclass(frozen=True)
class StreamParts(_Parts):
    """The part of each batch of a stream, whose examples are counted as they come."""

    seen: tf.Variable  # int64 scalar: the examples of this process since the last call of `examples`

    def examples(self, state: Any, first: int, steps: int) -> int:
        """The number of examples of this process since the last call."""
        del state, first, steps
        seen = int(self.seen.numpy())
        self.seen.assign(0)
        return seen

    def note(self, state: Any, batch: Any) -> None:
        data, share = self._local_part(state, batch)
        with_examples = [leaf for leaf in keras_internals.tree.flatten(data) if batch_parts.has_examples(leaf)]
        self.seen.assign_add(tf.where(share > 0, tf.cast(batch_parts.length(with_examples[0]), tf.int64), 0))
