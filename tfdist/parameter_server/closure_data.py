"""The data of closures; a closure is a few steps that one worker runs.

    arrays              the worker has them; a closure contains the indices of its examples
    numbered batches    a closure contains the numbers of its batches, which the worker reads
    anything else       the coordinator reads the data, and sends one batch per closure

In each case a step gets the same examples as on one device.
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
    """A few steps, as the arguments of the function that a worker runs.

    Attributes:
        arguments: the data, and the number of steps.
        steps: the number of steps.
        whole: the closure has the largest number of steps, each with a full batch.
        examples: the number of examples of all steps; `None` for a batch whose tensors have different lengths.
    """

    arguments: tuple[Any, ...]
    steps: int
    whole: bool = False
    examples: int | None = None


class ClosurePass:
    """The state of a pass over data that the workers have or read themselves."""

    def closures(self, first: int, count: int, length: int) -> Iterator[Closure]:
        """Yields `count` steps from batch `first` on, up to `length` per closure."""
        raise NotImplementedError


@dataclass(frozen=True)
class IndexedPass(ClosurePass):
    """A pass over arrays, whose closures contain the indices of their examples.

    Attributes:
        batch_size: the number of examples in a full batch.
        arrays: the coordinator's arrays.
        positions: the arrays per example that `ArrayFeed.start` returns, of which the first are the indices.
        worker_arrays: the workers' arrays; `None` if each closure contains the examples of its steps.
    """

    batch_size: int
    arrays: Any
    positions: Sequence[np.ndarray]
    worker_arrays: Any

    def closures(self, first: int, count: int, length: int) -> Iterator[Closure]:
        for begin in range(first, first + count, length):
            steps = min(length, first + count - begin)
            rows = slice(begin * self.batch_size, (begin + steps) * self.batch_size)
            indices, *others = (positions[rows] for positions in self.positions)
            arrays = self.worker_arrays
            if arrays is None:
                with tf.device("CPU:0"):
                    arrays = keras_data.gather(self.arrays, tf.constant(indices))
                indices = np.arange(len(indices), dtype=indices.dtype)
            examples = tuple(tf.constant(positions) for positions in (indices, *others))
            whole = len(indices) == STEPS_OF_A_CLOSURE * self.batch_size
            yield Closure(((arrays, examples), tf.constant(steps)), steps, whole, len(indices))


class IndexedArrays(WrappedFeed):
    """An `ArrayFeed` whose passes are `IndexedPass`es.

    Args:
        feed: the coordinator's feed.
        worker_arrays: see `IndexedPass`.
    """

    def __init__(self, feed: ArrayFeed, worker_arrays: Any):
        super().__init__(feed)
        self.batches = feed.batches
        self._worker_arrays = worker_arrays

    def start(self, epoch: int, first_batch: int) -> IndexedPass:
        arrays, positions = self._feed.start(epoch, first_batch)
        positions = tuple(tensor.numpy() for tensor in positions)
        return IndexedPass(self.batch_size, arrays, positions, self._worker_arrays)

    def resume(self, saved: bytes, epoch: int, first_batch: int) -> IndexedPass:
        del saved
        return self.start(epoch, first_batch)


class ReadByNumber:
    """Marks `Batches` that a worker reads by the batch numbers in a closure."""


class SentBatches(FetchedBatches):
    """A batch that the coordinator has sent, traced for any number of examples.

    Keras weights the losses of several outputs by the number of examples if it is known when the graph is traced. All
    batches of a pass must be weighted in the same way, and the last one may be smaller.
    """

    def fetch(self, state: Any, step: tf.Tensor) -> Any:
        return tf.nest.map_structure(_with_unknown_length, super().fetch(state, step))


def _with_unknown_length(tensor: Any) -> Any:
    if not isinstance(tensor, tf.Tensor) or not tensor.shape.rank:
        return tensor
    return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=[None, *tensor.shape[1:]])


def worker_batches(batches: Batches) -> Batches:
    """Returns the `Batches` with which a worker's graph reads the data of a closure."""
    return batches if isinstance(batches, ArrayBatches | ReadByNumber) else SentBatches()


def closures(batches: Batches, state: Any, first: int, count: int, length: int) -> Iterator[Closure]:
    """Yields the closures of `count` steps, or of fewer if the data end.

    Args:
        batches: the feed's batches.
        state: the state of the pass.
        first: the number of the first batch.
        count: the number of steps.
        length: the largest number of steps per closure.
    """
    if isinstance(state, ClosurePass):
        yield from state.closures(first, count, length)
        return
    for batch in batches.take(state, first, count):
        (examples,) = map(int, batch_parts.lengths_of_parts(tf.nest.flatten(batch), WHOLE))
        known = None if examples == batch_parts.UNEQUAL else examples
        yield Closure((batch, tf.constant(1)), 1, examples=known)
