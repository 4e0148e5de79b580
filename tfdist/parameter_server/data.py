"""How examples come to the workers of a `parameter_server` job.

    arrays of a dataset that each worker can load     each worker loads them; a closure has the indices of its examples
    other arrays, up to `device_data_bytes`           the chief sends them to each worker once; then the same
    larger arrays                                     a closure has the examples of its steps
    files of a dataset that each worker can load      a closure has numbers: epoch, first batch, end; the worker reads
    anything else                                     the chief reads, and sends each batch, one per closure

See `tfdist.parameter_server.closure_data`.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tfdist.data.input import device_feed
from tfdist.data.input.array_feed import ArrayFeed
from tfdist.data.input.dataset_feed import DatasetBatches
from tfdist.data.input.feed import Feed, WrappedFeed
from tfdist.data.input.file_feed import FileFeed
from tfdist.data.input.origin import FeedOrigin
from tfdist.errors import ClusterError
from tfdist.internals.keras import tree
from tfdist.jobs.world import World
from tfdist.parameter_server import reader
from tfdist.parameter_server.closure_data import STEPS_OF_A_CLOSURE, Closure, ClosurePass, IndexedArrays, ReadByNumber
from tfdist.parameter_server.workers import Processes

# Arrays that are sent whole, if the user states no bound; TensorFlow sends no message above 2 GiB.
SENT_BYTES = 1 << 30


class Data:
    """The data of one job: decides who reads which.

    Args:
        workers: who read the data, or are sent them.
        job: the processes of the job.
        sent_bytes: larger arrays are not sent whole; `None` is `SENT_BYTES`.
    """

    def __init__(self, workers: Processes, job: World, sent_bytes: int | None):
        self._workers, self._sent_bytes = workers, SENT_BYTES if sent_bytes is None else sent_bytes
        self._job = job
        tf.get_logger().addFilter(reader.not_told)
        self._held: weakref.WeakKeyDictionary[Feed, Any] = weakref.WeakKeyDictionary()
        self._compared: weakref.WeakKeyDictionary[Feed, str | None] = weakref.WeakKeyDictionary()

    def placed(self, feed: Feed) -> Feed:
        """`feed` as the workers read it."""
        if isinstance(feed, ArrayFeed):
            return ArraysOfWorkers(feed, self._held_by_workers(feed))
        if isinstance(feed, FileFeed):
            described = self._description(feed)
            return feed if described is None else ReadByWorkers(feed, described)
        return feed

    def _held_by_workers(self, feed: ArrayFeed) -> Any:
        """The arrays on each worker; `None` if they are too large to be sent."""
        if feed not in self._held:
            arrays = feed.arrays
            described = self._description(feed)
            if described is not None:
                self._held[feed] = self._workers.on_each(_loading(feed, described))
            elif device_feed.is_dense(arrays) and device_feed.size_bytes(arrays) > self._sent_bytes:
                self._held[feed] = None
            else:
                self._held[feed] = self._workers.on_each(_received, arrays)
        return self._held[feed]

    def _description(self, feed: Feed) -> str | None:
        """What the feed is, if each worker, asked once, makes the same; `None` if the chief is to send it."""
        if feed.origin is None:
            return None
        if feed not in self._compared:
            name, mine = feed.origin.source.name, reader.description(feed)
            try:
                reader.require_same(name, {0: mine} | self._descriptions(feed.origin), self._job)
                self._compared[feed] = mine
            except ClusterError as error:
                self._compared[feed] = None
                warnings.warn(f"The chief sends the examples of `{name}`. {error.sentence}", stacklevel=2)
        return self._compared[feed]

    def _descriptions(self, origin: FeedOrigin) -> dict[int, str]:
        """What each worker would read, by its rank."""
        line = origin.to_json()
        found = self._workers.answers(tf.function(lambda: reader.description_of_worker(line), autograph=False))
        if found is None:
            raise ClusterError.lost("A worker does not say what it reads")
        ranks = [rank for rank, task in enumerate(self._job.tasks) if task.role == "worker"]
        return {rank: one.decode() for rank, one in zip(ranks, found, strict=True)}


class OfWorkers(WrappedFeed):
    """A feed of which the workers have the data; an error of theirs is raised as if the chief had read them."""

    def naming_bad_examples(self, first_batch: int, batches: int) -> contextlib.AbstractContextManager[Any]:
        del first_batch, batches
        return reader.errors_of_workers()


class ArraysOfWorkers(OfWorkers, IndexedArrays):
    """Arrays of which each worker has a copy or, where `held` is `None`, gets the examples of its steps."""


class ReadByWorkers(OfWorkers):
    """Batches of files: a worker reads those of its steps, and nobody any others.

    Args:
        feed: the chief's own.
        described: its `description`, which that of every worker equals.
    """

    def __init__(self, feed: FileFeed, described: str):
        super().__init__(feed)
        assert feed.origin is not None
        rows = feed.batch_size if feed.examples % feed.batch_size == 0 else None
        specs = tuple(tf.TensorSpec([rows, *spec.shape[1:]], spec.dtype) for spec in tree.flatten(feed.spec))
        origin = feed.origin.to_json()
        self.batches = ReadBatches(True, origin=origin, described=described, specs=specs, structure=feed.spec)
        self._files = feed

    def start(self, epoch: int, first_batch: int) -> Numbers:
        self._files.begin(epoch)
        return Numbers(epoch, self._files.num_batches, self._files.examples, self._files.batch_size)

    def resume(self, saved: bytes, epoch: int, first_batch: int) -> Numbers:
        del saved
        return self.start(epoch, first_batch)


@dataclass(frozen=True)
class Numbers(ClosurePass):
    """A pass whose batches are read by their numbers, on the chief."""

    epoch: int
    num_batches: int
    examples: int
    batch_size: int

    def closures(self, first: int, count: int, length: int) -> Iterator[Closure]:
        for begin in range(first, min(first + count, self.num_batches), length):
            end = min(begin + length, first + count, self.num_batches)
            place = tf.constant([self.epoch, begin, end], tf.int64)
            examples = min(end * self.batch_size, self.examples) - begin * self.batch_size
            yield Closure((place, tf.constant(end - begin)), end - begin, end - begin == STEPS_OF_A_CLOSURE, examples)


@dataclass(frozen=True)
class ReadBatches(DatasetBatches, ReadByNumber):
    """A batch that the worker reads, by its number; the state is the place of the closure.

    Attributes:
        origin: of the feed.
        described: its `description`.
        specs: of the tensors of a batch, flat.
        structure: a batch has it.
    """

    origin: str = field(kw_only=True)
    described: str = field(kw_only=True)
    specs: tuple[tf.TensorSpec, ...] = field(kw_only=True)
    structure: Any = field(kw_only=True, compare=False)

    def fetch(self, state: Any, step: tf.Tensor) -> Any:
        with tf.device("CPU:0"):
            number = state[1] + tf.cast(step, tf.int64)
            found = reader.batch_of_worker(self.origin, self.described, state, number, self.specs)
            return tree.pack_sequence_as(self.structure, found)


@tf.function(autograph=False)
def _received(arrays: Any) -> Any:
    return tf.nest.map_structure(tf.identity, arrays)


def _loading(feed: ArrayFeed, described: str) -> Any:
    """A graph function with which a worker loads the arrays of `feed`, also one that comes back."""
    assert feed.origin is not None
    tensors, line = reader.different(feed.arrays), feed.origin.to_json()
    numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
    places = tree.map_structure(lambda one: None if one is None else numbers[id(one)], feed.arrays)
    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]

    @tf.function(autograph=False)
    def load() -> Any:
        loaded = reader.arrays_of_worker(line, described, specs)
        return tree.map_structure(lambda place: None if place is None else loaded[place], places)

    return load
