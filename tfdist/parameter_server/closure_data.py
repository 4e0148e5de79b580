"""Closures: some steps each, which one worker runs, and how it comes to their examples.

    arrays            the worker has them; a closure has the indices of its examples
    read by number    a closure has the numbers of its batches, which the worker reads
    anything else     the coordinator reads, and sends each batch, one per closure

Whoever reads, a step has the examples that it has on one device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.input import batch_parts
from tfdist.data.input.array_feed import ArrayBatches, ArrayFeed
from tfdist.data.input.dataset_feed import FetchedBatches
from tfdist.data.input.division import WHOLE
from tfdist.data.input.feed import Batches, WrappedFeed
from tfdist.internals import keras_data

STEPS_OF_A_CLOSURE = 10


@dataclass(frozen=True)
class Closure:
    """Some steps, as the arguments of the function that a worker runs.

    Attributes:
        arguments: the data, and the number of steps.
        steps: the number of steps.
        whole: it has as many steps as a closure can have, each with a full batch.
        examples: the number of examples of all steps; `None` for a batch whose tensors have different lengths.
    """

    arguments: tuple[Any, ...]
    steps: int
    whole: bool = False
    examples: int | None = None


class ClosurePass:
    """The state of a pass over data that closures name, and the workers have or read."""

    def closures(self, first: int, count: int, length: int) -> Iterator[Closure]:
        """The steps from batch `first` on, `length` per closure."""
        raise NotImplementedError


@dataclass(frozen=True)
class Indices(ClosurePass):
    """A pass over arrays: the order of the examples, and what is known of each.

    Attributes:
        batch_size: examples in a full batch.
        arrays: of the coordinator.
        positions: what `ArrayFeed.start` gives of each example.
        held: the arrays as the workers have them; `None` if each closure brings the examples of its steps.
    """

    batch_size: int
    arrays: Any
    positions: Sequence[np.ndarray]
    held: Any

    def closures(self, first: int, count: int, length: int) -> Iterator[Closure]:
        for begin in range(first, first + count, length):
            steps = min(length, first + count - begin)
            rows = slice(begin * self.batch_size, (begin + steps) * self.batch_size)
            indices, *rest = (of_each[rows] for of_each in self.positions)
            arrays = self.held
            if arrays is None:
                with tf.device("CPU:0"):
                    arrays = keras_data.gather(self.arrays, tf.constant(indices))
                indices = np.arange(len(indices), dtype=indices.dtype)
            examples = tuple(tf.constant(of_each) for of_each in (indices, *rest))
            whole = len(indices) == STEPS_OF_A_CLOSURE * self.batch_size
            yield Closure(((arrays, examples), tf.constant(steps)), steps, whole, len(indices))


class IndexedArrays(WrappedFeed):
    """Arrays whose examples closures name by their indices.

    Args:
        feed: the coordinator's own.
        held: see `Indices`.
    """

    def __init__(self, feed: ArrayFeed, held: Any):
        super().__init__(feed)
        self.batches = feed.batches
        self._held = held

    def start(self, epoch: int, first_batch: int) -> Indices:
        arrays, positions = self._feed.start(epoch, first_batch)
        return Indices(self.batch_size, arrays, tuple(of_each.numpy() for of_each in positions), self._held)

    def resume(self, saved: bytes, epoch: int, first_batch: int) -> Indices:
        del saved
        return self.start(epoch, first_batch)


class ReadByNumber:
    """Marks `Batches` that a worker reads, by the numbers that a closure has."""


class SentBatches(FetchedBatches):
    """A batch that the coordinator has sent, in a graph for any number of examples.

    Keras weighs the losses of several outputs by the number of examples, where that is known when the graph is traced:
    all batches of a pass must be weighed alike, and the last one may be smaller.
    """

    def fetch(self, state: Any, step: tf.Tensor) -> Any:
        return tf.nest.map_structure(_of_any_length, super().fetch(state, step))


def _of_any_length(tensor: Any) -> Any:
    if not isinstance(tensor, tf.Tensor) or not tensor.shape.rank:
        return tensor
    return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=[None, *tensor.shape[1:]])


def of_workers(batches: Batches) -> Batches:
    """What the workers' graph reads of a closure."""
    return batches if isinstance(batches, ArrayBatches | ReadByNumber) else SentBatches()


def closures(batches: Batches, state: Any, first: int, count: int, length: int) -> Iterator[Closure]:
    """The closures of `count` steps from batch `first` of the pass on; fewer when the data end.

    Args:
        batches: as the feed has them.
        state: of the pass.
        first: the number of the first batch.
        count: the number of steps.
        length: the largest number of steps per closure.
    """
    if isinstance(state, ClosurePass):
        yield from state.closures(first, count, length)
    else:
        for batch in batches.take(state, first, count):
            yield Closure((batch, tf.constant(1)), 1, examples=_examples(batch))


def _examples(batch: Any) -> int | None:
    (found,) = batch_parts.lengths_of_parts(tf.nest.flatten(batch), WHOLE)
    return None if int(found) == batch_parts.UNEQUAL else int(found)
