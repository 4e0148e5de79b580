"""How the workers of a `parameter_server` job get their examples.

    arrays of a dataset that each worker can load     each worker loads them; a closure contains indices
    other arrays, up to `device_data_bytes`           the chief sends them to each worker once; then the same
    larger arrays                                     a closure contains the examples of its steps
    files of a dataset that each worker can load      a closure contains batch numbers; the worker reads the batches
    anything else                                     the chief reads the data, and sends one batch per closure

See `tfdist.parameter_server.closures`. A worker can load what `tfdist.data.load` can load anywhere:

    chief                                            worker
      description(origin)                 ──>          loads the dataset, and describes it
      arrays(origin, description)         ──>          returns the arrays to its graph
      batch(origin, description, number)  ──>          reads the files of this batch

Graphs that the chief sends call these functions by name; `origin` is the JSON of a `FeedOrigin`. A process reads only
data whose description equals the chief's. A restarted worker has not described its data to the chief, so that it
compares the description when it first reads.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import re
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

import tfdist.data
from tfdist.data.input import device_feed
from tfdist.data.input.array_feed import ArrayFeed
from tfdist.data.input.dataset_feed import DatasetBatches
from tfdist.data.input.feed import Feed, WrappedFeed
from tfdist.data.input.file_feed import FileFeed
from tfdist.data.input.source import FeedOrigin
from tfdist.errors import ClusterError, DataError, DisagreementError, TfdistError
from tfdist.internals import tensorflow_coordinator
from tfdist.internals.keras import tree
from tfdist.jobs import consensus
from tfdist.jobs.world import World
from tfdist.parameter_server.closures import STEPS_OF_A_CLOSURE, Closure, ClosurePass, IndexedArrays, ReadByNumber
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
        tf.get_logger().addFilter(is_not_from_worker)
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
            name, description = feed.origin.source.name, description_of(feed)
            try:
                require_same(name, {0: description} | self._worker_descriptions(feed.origin), self._job)
                self._descriptions[feed] = description
            except ClusterError as error:
                self._descriptions[feed] = None
                warnings.warn(f"The chief sends the examples of `{name}`. {error.sentence}", stacklevel=2)
        return self._descriptions[feed]

    def _worker_descriptions(self, origin: FeedOrigin) -> dict[int, str]:
        """Returns the description of each worker's data by its rank."""
        origin_json = origin.to_json()
        answers = self._workers.answers(tf.function(lambda: description_of_worker(origin_json), autograph=False))
        if answers is None:
            raise ClusterError.lost("A worker did not answer which data it reads")
        ranks = [rank for rank, task in enumerate(self._job.tasks) if task.role == "worker"]
        return {rank: answer.decode() for rank, answer in zip(ranks, answers, strict=True)}


class WorkerFeed(WrappedFeed):
    """A feed whose data the workers have; their errors are raised on the chief as if it had read the data."""

    def naming_bad_examples(self, first_batch: int, batches: int) -> contextlib.AbstractContextManager[Any]:
        del first_batch, batches
        return errors_of_workers()


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
            tensors = batch_of_worker(self.origin, self.description, state, number, self.specs)
            return tree.pack_sequence_as(self.structure, tensors)


@tf.function(autograph=False)
def _received(arrays: Any) -> Any:
    return tf.nest.map_structure(tf.identity, arrays)


def _loading(feed: ArrayFeed, description: str) -> Any:
    """Returns a graph function with which a worker, also a restarted one, loads the arrays of `feed`."""
    assert feed.origin is not None
    tensors, origin = distinct(feed.arrays), feed.origin.to_json()
    indices = {id(tensor): index for index, tensor in enumerate(tensors)}
    structure = tree.map_structure(lambda array: None if array is None else indices[id(array)], feed.arrays)
    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]

    @tf.function(autograph=False)
    def load() -> Any:
        loaded = arrays_of_worker(origin, description, specs)
        return tree.map_structure(lambda index: None if index is None else loaded[index], structure)

    return load


_ENCODED_ERROR = re.compile("tfdist cannot go on: <([A-Za-z0-9+/=]+)>")
_ERRORS: dict[str, type[TfdistError]] = {error.__name__: error for error in (DataError, DisagreementError)}
_DESCRIPTION, _ARRAYS, _BATCH = "tfdist description", "tfdist arrays", "tfdist batch"


def serve(world: World) -> None:
    """Lets the chief's graphs call the functions of this process, whose place in the job is `world`."""
    reader = _Reader(world)
    for name, function in ((_DESCRIPTION, reader.description), (_ARRAYS, reader.arrays), (_BATCH, reader.batch)):
        tensorflow_coordinator.serve_function(name, function)


def description_of_worker(origin: str) -> tf.Tensor:
    """Returns, in a worker's graph, the `description` of the worker's data, or why it has none, as a string tensor."""
    return tensorflow_coordinator.call_served(_DESCRIPTION, [origin], [tf.TensorSpec([], tf.string)])[0]


def arrays_of_worker(origin: str, description: str, specs: Sequence[tf.TensorSpec]) -> list[tf.Tensor]:
    """Returns, in a worker's graph, the `distinct` arrays of the worker's feed, whose description must be equal."""
    return tensorflow_coordinator.call_served(_ARRAYS, [origin, description], specs)


def batch_of_worker(
    origin: str, description: str, batch_range: tf.Tensor, number: tf.Tensor, specs: Sequence[tf.TensorSpec]
) -> list[Any]:
    """Returns, in a worker's graph, the flat tensors of batch `number` (int64).

    The closure's `batch_range` is int64 `[3]`: epoch, first batch and end.
    """
    return tensorflow_coordinator.call_served(_BATCH, [origin, description, batch_range, number], specs)


def description_of(feed: Feed) -> str:
    """Returns a string that identifies the data of `feed`, with their size and checksums.

    The checksum of arrays covers all of them. Files are identified by their names, sizes and labels, and by the
    contents of three batches of a pass: the first, the middle and the last one. Reading all files for the comparison
    would take as long as an epoch.
    """
    text = f"{feed.examples} examples in {feed.num_batches} batches"
    if isinstance(feed, ArrayFeed):
        return f"{text}, arrays {_checksum(distinct(feed.arrays))}"
    assert isinstance(feed, FileFeed)
    if feed.listing is not None:
        text += f", files {feed.listing()}"
    feed.begin(0)
    for number in sorted({0, feed.num_batches // 2, feed.num_batches - 1}):
        with feed.naming_bad_examples(number, 1):
            text += f", batch {number} {_checksum(tree.flatten(next(feed.range(0, number, number + 1))))}"
    return text


def _checksum(arrays: Sequence[Any]) -> str:
    return consensus.fingerprint_of_arrays([np.ascontiguousarray(array) for array in arrays])


def require_same(source: str, descriptions: Mapping[int, str], world: World) -> None:
    """Compares the `description`s of the data of `source`, by rank.

    Raises:
        DisagreementError: they differ; the error shows each process with its description.
    """
    settings = {rank: {f"data of {source}": description} for rank, description in descriptions.items()}
    error = DisagreementError.among(settings, world.named_briefly)
    if error is not None:
        raise error


@contextlib.contextmanager
def errors_of_workers() -> Iterator[None]:
    """Raises an error of tfdist that a worker raised again as such; TensorFlow transmits only an exception's text."""
    try:
        yield
    except Exception as error:
        encoded = _ENCODED_ERROR.search(str(error))
        if encoded is None:
            raise
        name, sentence, hint = json.loads(base64.b64decode(encoded[1]))
        raise _ERRORS[name](sentence, hint) from error


def is_not_from_worker(record: logging.LogRecord) -> bool:
    """Filters the errors that `errors_of_workers` raises out of TensorFlow's log, where each takes a hundred lines."""
    return _ENCODED_ERROR.search(record.getMessage()) is None


@contextlib.contextmanager
def _encoding_errors() -> Iterator[None]:
    """Encodes errors of tfdist for `errors_of_workers` on the chief."""
    try:
        yield
    except tuple(_ERRORS.values()) as error:
        fields = json.dumps([type(error).__name__, error.sentence, error.hint])
        # Base64, because TensorFlow escapes quotes and line ends, and does so repeatedly for nested messages.
        raise ValueError(f"tfdist cannot go on: <{base64.b64encode(fields.encode()).decode()}>") from None


def distinct(arrays: Any) -> list[tf.Tensor]:
    """Returns each tensor of a structure once; in an autoencoder, for example, x and y are the same tensor."""
    return list({id(array): array for array in tree.flatten(arrays) if array is not None}.values())


@dataclass
class _OpenRange:
    """The batches of a closure that are being read.

    Attributes:
        batch_range: the epoch, the first batch and the end.
        iterator: yields the batches in their order.
        next: the number of the batch that `iterator` yields next.
        early: batches that were read before they were requested, because the steps of a loop may run in any order.
    """

    batch_range: tuple[int, ...]
    iterator: Any
    next: int
    early: dict[int, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _LoadedFeed:
    """A feed of this process, `None` if it could not be made, and its `description`."""

    feed: Any
    description: str


class _Reader:
    """The datasets that this process reads for the chief."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._lock = threading.Lock()
        self._loaded: dict[bytes, _LoadedFeed] = {}
        self._open: dict[bytes, _OpenRange] = {}

    def description(self, origin: bytes) -> str:
        with self._lock:
            return self._load(origin).description

    def arrays(self, origin: bytes, description: bytes) -> list[np.ndarray]:
        with self._lock, _encoding_errors():
            arrays = [array.numpy() for array in distinct(self._feed(origin, description).arrays)]
            del self._loaded[origin]  # TensorFlow's server has a copy
            return arrays

    def batch(self, origin: bytes, description: bytes, batch_range: np.ndarray, number: np.ndarray) -> list[np.ndarray]:
        with self._lock, _encoding_errors():
            feed, wanted = self._feed(origin, description), int(number)
            opened = self._open.get(origin)
            if (
                opened is None
                or opened.batch_range != tuple(batch_range)
                or (wanted < opened.next and wanted not in opened.early)
            ):
                epoch, first, end = map(int, batch_range)
                feed.begin(epoch)
                opened = _OpenRange(tuple(batch_range), feed.range(epoch, first, end), first)
                self._open[origin] = opened
            while opened.next <= wanted:
                with feed.naming_bad_examples(opened.next, 1):
                    opened.early[opened.next] = [part.numpy() for part in tree.flatten(next(opened.iterator))]
                opened.next += 1
            return list(opened.early.pop(wanted))

    def _feed(self, origin: bytes, description: bytes) -> Any:
        """Returns the feed, after checking that its description equals the chief's."""
        loaded = self._load(origin)
        source = FeedOrigin.from_json(origin.decode()).source.name
        require_same(source, {0: description.decode(), self._world.rank: loaded.description}, self._world)
        return loaded.feed

    def _load(self, origin: bytes) -> _LoadedFeed:
        if origin not in self._loaded:
            try:
                feed = _made(FeedOrigin.from_json(origin.decode()))
                self._loaded[origin] = _LoadedFeed(feed, description_of(feed))
            except Exception as error:  # whatever the reason, this process has no data that could equal the chief's
                reason = " ".join([f"{type(error).__name__}:", *str(error).splitlines()[:1]])
                return _LoadedFeed(None, f"nothing, because of {reason}")
        return self._loaded[origin]


def _made(origin: FeedOrigin) -> Feed:
    asked = origin.arguments
    return tfdist.data.load_origin(origin.source).feed(
        asked.split,
        asked.global_batch_size,
        seed=asked.seed,
        shuffle=asked.shuffle,
        augment=asked.augment,
        stream_positions=asked.stream_positions,
    )
