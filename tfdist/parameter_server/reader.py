"""What a worker of a `parameter_server` job reads itself: datasets that `tfdist.data.load` can load in each process.

    chief                                            worker
      description(origin)                 ──>          loads the dataset, and says what it found
      arrays(origin, description)         ──>          keeps the arrays beside its graphs
      batch(origin, description, number)  ──>          reads the files of this batch

The functions are called from graphs that the chief sends, by name; `origin` is the JSON of a `FeedOrigin`. A process
reads only what is described as the chief's data are: one that takes the place of another, which the chief never asked,
loads the dataset when it is first to read, and compares it then.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

import tfdist.data
from tfdist.data.input.array_feed import ArrayFeed
from tfdist.data.input.feed import Feed
from tfdist.data.input.file_feed import FileFeed
from tfdist.data.input.origin import FeedOrigin
from tfdist.errors import DataError, DisagreementError, TfdistError
from tfdist.internals import tensorflow_coordinator
from tfdist.internals.keras import tree
from tfdist.jobs import consensus
from tfdist.jobs.world import World

_TOLD = re.compile("tfdist cannot go on: <([A-Za-z0-9+/=]+)>")
_KINDS: dict[str, type[TfdistError]] = {kind.__name__: kind for kind in (DataError, DisagreementError)}
_DESCRIPTION, _ARRAYS, _BATCH = "tfdist description", "tfdist arrays", "tfdist batch"


def serve(world: World) -> None:
    """Lets the chief's graphs call the functions of this process, whose place is `world`."""
    reader = _Reader(world)
    for name, function in ((_DESCRIPTION, reader.description), (_ARRAYS, reader.arrays), (_BATCH, reader.batch)):
        tensorflow_coordinator.serve_function(name, function)


def description_of_worker(origin: str) -> tf.Tensor:
    """In a worker's graph: the `description` of the feed that the worker makes, or why it makes none: a string."""
    return tensorflow_coordinator.call_served(_DESCRIPTION, [origin], [tf.TensorSpec([], tf.string)])[0]


def arrays_of_worker(origin: str, described: str, specs: Sequence[tf.TensorSpec]) -> list[tf.Tensor]:
    """In a worker's graph: the different arrays of the feed that the worker makes, which has that `description`."""
    return tensorflow_coordinator.call_served(_ARRAYS, [origin, described], specs)


def batch_of_worker(
    origin: str, described: str, place: tf.Tensor, number: tf.Tensor, specs: Sequence[tf.TensorSpec]
) -> list[Any]:
    """In a worker's graph: batch `number` (int64) of the closure at `place`: int64 epoch, first batch, end."""
    return tensorflow_coordinator.call_served(_BATCH, [origin, described, place, number], specs)


def description(feed: Feed) -> str:
    """What tells the data of `feed` from others: how much there is, and checksums.

    Of arrays the checksum is of all of them. Files are told apart by what is known without reading them (their names
    and sizes, and the labels), and by the contents of three batches of a pass: the first, the middle and the last one.
    To read all of them only to compare would take as long as an epoch.
    """
    found = f"{feed.examples} examples in {feed.num_batches} batches"
    if isinstance(feed, ArrayFeed):
        return f"{found}, arrays {_checksum(different(feed.arrays))}"
    assert isinstance(feed, FileFeed)
    if feed.listing is not None:
        found += f", files {feed.listing()}"
    feed.begin(0)
    for number in sorted({0, feed.num_batches // 2, feed.num_batches - 1}):
        with feed.naming_bad_examples(number, 1):
            found += f", batch {number} {_checksum(tree.flatten(next(feed.range(0, number, number + 1))))}"
    return found


def _checksum(arrays: Sequence[Any]) -> str:
    return consensus.fingerprint_of_arrays([np.ascontiguousarray(array) for array in arrays])


def require_same(source: str, described_by_rank: Mapping[int, str], world: World) -> None:
    """Compares the `description`s of the data of `source` that some processes of the job have.

    Raises:
        DisagreementError: they differ; the error names the processes, with what each has.
    """
    settings = {rank: {f"data of {source}": described} for rank, described in described_by_rank.items()}
    error = DisagreementError.among(settings, world.named_briefly)
    if error is not None:
        raise error


@contextlib.contextmanager
def errors_of_workers() -> Iterator[None]:
    """Raises again an error of tfdist that a worker has raised; TensorFlow only passes on the text of an exception."""
    try:
        yield
    except Exception as error:
        told = _TOLD.search(str(error))
        if told is None:
            raise
        name, sentence, hint = json.loads(base64.b64decode(told[1]))
        raise _KINDS[name](sentence, hint) from error


def not_told(record: logging.LogRecord) -> bool:
    """A filter of TensorFlow's log without the errors that `errors_of_workers` raises: each takes a hundred lines."""
    return _TOLD.search(record.getMessage()) is None


@contextlib.contextmanager
def _told_to_chief() -> Iterator[None]:
    try:
        yield
    except tuple(_KINDS.values()) as error:
        fields = json.dumps([type(error).__name__, error.sentence, error.hint])
        # Encoded, because TensorFlow escapes quotes and line ends, more than once where messages are in messages.
        raise ValueError(f"tfdist cannot go on: <{base64.b64encode(fields.encode()).decode()}>") from None


def different(arrays: Any) -> list[tf.Tensor]:
    """The tensors of a structure, each once; in autoencoding x and y are the same."""
    return list({id(array): array for array in tree.flatten(arrays) if array is not None}.values())


@dataclass
class _Open:
    """The batches of a closure that are being read.

    Attributes:
        place: the epoch, the first batch and the end.
        iterator: gives the batches in their order.
        next: the number of the batch that it gives next.
        early: batches that were read before they were asked for: the steps of a loop may ask in any order.
    """

    place: tuple[int, ...]
    iterator: Any
    next: int
    early: dict[int, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Loaded:
    """A feed of this process, `None` if it could not be made, and its `description`."""

    feed: Any
    description: str


class _Reader:
    """The datasets that this process reads for the chief."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._lock = threading.Lock()
        self._loaded: dict[bytes, _Loaded] = {}
        self._open: dict[bytes, _Open] = {}

    def description(self, origin: bytes) -> str:
        with self._lock:
            return self._load(origin).description

    def arrays(self, origin: bytes, described: bytes) -> list[np.ndarray]:
        with self._lock, _told_to_chief():
            arrays = [array.numpy() for array in different(self._feed(origin, described).arrays)]
            del self._loaded[origin]  # TensorFlow's server has a copy
            return arrays

    def batch(self, origin: bytes, described: bytes, place: np.ndarray, number: np.ndarray) -> list[np.ndarray]:
        with self._lock, _told_to_chief():
            feed, wanted = self._feed(origin, described), int(number)
            found = self._open.get(origin)
            if found is None or found.place != tuple(place) or (wanted < found.next and wanted not in found.early):
                epoch, first, end = map(int, place)
                feed.begin(epoch)
                found = self._open[origin] = _Open(tuple(place), feed.range(epoch, first, end), first)
            while found.next <= wanted:
                with feed.naming_bad_examples(found.next, 1):
                    found.early[found.next] = [part.numpy() for part in tree.flatten(next(found.iterator))]
                found.next += 1
            return list(found.early.pop(wanted))

    def _feed(self, origin: bytes, described: bytes) -> Any:
        """The feed, which has the description that the chief's has."""
        loaded = self._load(origin)
        source = FeedOrigin.from_json(origin.decode()).source.name
        require_same(source, {0: described.decode(), self._world.rank: loaded.description}, self._world)
        return loaded.feed

    def _load(self, origin: bytes) -> _Loaded:
        if origin not in self._loaded:
            try:
                feed = _made(FeedOrigin.from_json(origin.decode()))
                self._loaded[origin] = _Loaded(feed, description(feed))
            except Exception as error:  # whatever it is, this process has other data than the chief
                reason = " ".join([f"{type(error).__name__}:", *str(error).splitlines()[:1]])
                return _Loaded(None, f"nothing, because of {reason}")
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
