"""How the workers of a `parameter_server` job get their examples.

    arrays of a dataset that each worker can load     each worker loads them; a closure contains indices
    other arrays, up to `device_data_bytes`           the chief sends them to each worker once; then the same
    larger arrays                                     a closure contains the examples of its steps
    files of a dataset that each worker can load      a closure contains batch numbers; the worker reads the batches
    anything else                                     the chief reads the data, and sends one batch per closure

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
from tfdist.data.input.source import FeedOrigin
from tfdist.errors import ClusterError
from tfdist.internals.keras import tree
from tfdist.jobs.world import World
from tfdist.parameter_server import reader
from tfdist.parameter_server.closure_data import STEPS_OF_A_CLOSURE, Closure, ClosurePass, IndexedArrays, ReadByNumber
from tfdist.parameter_server.workers import Processes

# The default limit for arrays that are sent whole; TensorFlow sends no message above 2 GiB.
SENT_BYTES = 1 << 30


class Data:
    """Decides for each feed of a job whether the workers or the chief read the data.

    Args:
        workers: the workers of the job.
        job: the processes of the job.
        sent_bytes: larger arrays are not sent whole; `None` means `SENT_BYTES`.
    """

    def __init__(self, workers: Processes, job: World, sent_bytes: int | None):
        self._workers, self._sent_bytes = workers, SENT_BYTES if sent_bytes is None else sent_bytes
        self._job = job
        tf.get_logger().addFilter(reader.is_not_from_worker)
        self._worker_arrays: weakref.WeakKeyDictionary[Feed, Any] = weakref.WeakKeyDictionary()
        self._descriptions: weakref.WeakKeyDictionary[Feed, str | None] = weakref.WeakKeyDictionary()

    def placed(self, feed: Feed) -> Feed:
        """Returns `feed` as the workers read it."""
        if isinstance(feed, ArrayFeed):
            return WorkerArrays(feed, self._arrays_on_workers(feed))
        if isinstance(feed, FileFeed):
            description = self._common_description(feed)
            return feed if description is None else WorkerFiles(feed, description)
        return feed

    def _arrays_on_workers(self, feed: ArrayFeed) -> Any:
        """Returns the arrays of each worker; `None` if they are too large to be sent."""
        if feed not in self._worker_arrays:
            arrays = feed.arrays
            description = self._common_description(feed)
            if description is not None:
                self._worker_arrays[feed] = self._workers.on_each(_loading(feed, description))
            elif device_feed.is_dense(arrays) and device_feed.size_bytes(arrays) > self._sent_bytes:
                self._worker_arrays[feed] = None
            else:
                self._worker_arrays[feed] = self._workers.on_each(_received, arrays)
        return self._worker_arrays[feed]

    def _common_description(self, feed: Feed) -> str | None:
        """Returns the description of the feed if all workers have the same data; `None` if the chief must send them.

        The workers are asked once per feed.
        """
        if feed.origin is None:
            return None
        if feed not in self._descriptions:
            name, description = feed.origin.source.name, reader.description(feed)
            try:
                reader.require_same(name, {0: description} | self._worker_descriptions(feed.origin), self._job)
                self._descriptions[feed] = description
            except ClusterError as error:
                self._descriptions[feed] = None
                warnings.warn(f"The chief sends the examples of `{name}`. {error.sentence}", stacklevel=2)
        return self._descriptions[feed]

    def _worker_descriptions(self, origin: FeedOrigin) -> dict[int, str]:
        """Returns the description of each worker's data by its rank."""
        origin_json = origin.to_json()
        answers = self._workers.answers(tf.function(lambda: reader.description_of_worker(origin_json), autograph=False))
        if answers is None:
            raise ClusterError.lost("A worker did not answer which data it reads")
        ranks = [rank for rank, task in enumerate(self._job.tasks) if task.role == "worker"]
        return {rank: answer.decode() for rank, answer in zip(ranks, answers, strict=True)}


class WorkerFeed(WrappedFeed):
    """A feed whose data the workers have; their errors are raised on the chief as if it had read the data."""

    def naming_bad_examples(self, first_batch: int, batches: int) -> contextlib.AbstractContextManager[Any]:
        del first_batch, batches
        return reader.errors_of_workers()


class WorkerArrays(WorkerFeed, IndexedArrays):
    """Arrays that each worker has or, if `worker_arrays` is `None`, of which it gets the examples of its steps."""


class WorkerFiles(WorkerFeed):
    """Batches of files; a worker reads only the batches of its own steps.

    Args:
        feed: the chief's feed.
        description: the description of its data, which is the same on all workers.
    """

    def __init__(self, feed: FileFeed, description: str):
        super().__init__(feed)
        assert feed.origin is not None
        rows = feed.batch_size if feed.examples % feed.batch_size == 0 else None
        specs = tuple(tf.TensorSpec([rows, *spec.shape[1:]], spec.dtype) for spec in tree.flatten(feed.spec))
        origin = feed.origin.to_json()
        self.batches = NumberedBatches(True, origin=origin, description=description, specs=specs, structure=feed.spec)
        self._files = feed

    def start(self, epoch: int, first_batch: int) -> NumberedPass:
        self._files.begin(epoch)
        return NumberedPass(epoch, self._files.num_batches, self._files.examples, self._files.batch_size)

    def resume(self, saved: bytes, epoch: int, first_batch: int) -> NumberedPass:
        del saved
        return self.start(epoch, first_batch)


@dataclass(frozen=True)
class NumberedPass(ClosurePass):
    """A pass on the chief whose closures contain batch numbers."""

    epoch: int
    num_batches: int
    examples: int
    batch_size: int

    def closures(self, first: int, count: int, length: int) -> Iterator[Closure]:
        for begin in range(first, min(first + count, self.num_batches), length):
            end = min(begin + length, first + count, self.num_batches)
            batch_range = tf.constant([self.epoch, begin, end], tf.int64)
            examples = min(end * self.batch_size, self.examples) - begin * self.batch_size
            whole = end - begin == STEPS_OF_A_CLOSURE
            yield Closure((batch_range, tf.constant(end - begin)), end - begin, whole, examples)


@dataclass(frozen=True)
class NumberedBatches(DatasetBatches, ReadByNumber):
    """Batches that a worker reads by number; the state is the closure's int64 epoch, first batch and end.

    Attributes:
        origin: the feed's origin as JSON.
        description: the description of the feed's data.
        specs: the specs of a batch's tensors, flat.
        structure: a structure like a batch.
    """

    origin: str = field(kw_only=True)
    description: str = field(kw_only=True)
    specs: tuple[tf.TensorSpec, ...] = field(kw_only=True)
    structure: Any = field(kw_only=True, compare=False)

    def fetch(self, state: Any, step: tf.Tensor) -> Any:
        with tf.device("CPU:0"):
            number = state[1] + tf.cast(step, tf.int64)
            tensors = reader.batch_of_worker(self.origin, self.description, state, number, self.specs)
            return tree.pack_sequence_as(self.structure, tensors)


@tf.function(autograph=False)
def _received(arrays: Any) -> Any:
    return tf.nest.map_structure(tf.identity, arrays)


def _loading(feed: ArrayFeed, description: str) -> Any:
    """Returns a graph function with which a worker, also a restarted one, loads the arrays of `feed`."""
    assert feed.origin is not None
    tensors, origin = reader.distinct(feed.arrays), feed.origin.to_json()
    indices = {id(tensor): index for index, tensor in enumerate(tensors)}
    structure = tree.map_structure(lambda array: None if array is None else indices[id(array)], feed.arrays)
    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]

    @tf.function(autograph=False)
    def load() -> Any:
        loaded = reader.arrays_of_worker(origin, description, specs)
        return tree.map_structure(lambda index: None if index is None else loaded[index], structure)

    return load
