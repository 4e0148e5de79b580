"""What a worker of a `parameter_server` job reads itself: datasets that `tfdist.data.load` can load in each process.

    chief                                       worker
      fingerprint(origin)            ──>          loads the dataset, and says what it found
      arrays(origin)                 ──>          keeps the arrays beside its graphs
      batch(origin, epoch, number)   ──>          reads the files of this batch

The functions are called from graphs that the chief sends, by name; `origin` is the JSON of a `FeedOrigin`.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

import tfdist.data
from tfdist.data.pipeline.array_feed import ArrayFeed
from tfdist.data.pipeline.feed import Feed
from tfdist.data.pipeline.file_feed import FileFeed
from tfdist.data.pipeline.origin import FeedOrigin
from tfdist.errors import DataError
from tfdist.internals import tensorflow_coordinator
from tfdist.internals.keras import tree

NOTHING_READ = -1
_TOLD = "tfdist cannot use an example:"
_FINGERPRINT, _ARRAYS, _BATCH = "tfdist fingerprint", "tfdist arrays", "tfdist batch"


def serve() -> None:
    """Lets the chief's graphs call the functions of this process."""
    reader = _Reader()
    for name, function in ((_FINGERPRINT, reader.fingerprint), (_ARRAYS, reader.arrays), (_BATCH, reader.batch)):
        tensorflow_coordinator.serve_function(name, function)


def fingerprint_of_worker(origin: str) -> tf.Tensor:
    """In a worker's graph: the `fingerprint` of the feed that the worker makes; `NOTHING_READ` if it cannot."""
    return tensorflow_coordinator.call_served(_FINGERPRINT, [origin], [tf.TensorSpec([], tf.int64)])[0]


def arrays_of_worker(origin: str, specs: Sequence[tf.TensorSpec]) -> list[tf.Tensor]:
    """In a worker's graph: the different arrays of the feed that the worker makes."""
    return tensorflow_coordinator.call_served(_ARRAYS, [origin], specs)


def batch_of_worker(origin: str, place: tf.Tensor, number: tf.Tensor, specs: Sequence[tf.TensorSpec]) -> list[Any]:
    """In a worker's graph: batch `number` (int64) of the closure at `place`: int64 epoch, first batch, end."""
    return tensorflow_coordinator.call_served(_BATCH, [origin, place, number], specs)


def fingerprint(feed: Feed) -> int:
    """A checksum of the arrays of `feed` or, of files, of the first batch; it also depends on how much there is."""
    read = different(feed.arrays) if isinstance(feed, ArrayFeed) else tree.flatten(feed.first(1))
    checksum = zlib.crc32(repr([feed.num_batches, feed.examples]).encode())
    for array in read:
        numbers = np.ascontiguousarray(array)
        checksum = zlib.crc32(numbers.data.cast("B"), zlib.crc32(repr(numbers.shape).encode(), checksum))
    return checksum


def error_of_worker(error: tf.errors.OpError) -> DataError | None:
    """The error that a worker has told of an example that it cannot use, if it is that."""
    told = re.search(f"{_TOLD} (.*)", str(error))
    return DataError(*json.loads(told[1])) if told else None


@contextlib.contextmanager
def _told_to_chief() -> Iterator[None]:
    # Of an exception TensorFlow carries the text only.
    try:
        yield
    except DataError as error:
        raise ValueError(f"{_TOLD} {json.dumps([error.sentence, error.hint])}\n") from None


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


class _Reader:
    """The datasets that this process reads for the chief."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._feeds: dict[bytes, Any] = {}
        self._open: dict[bytes, _Open] = {}

    def fingerprint(self, origin: bytes) -> np.int64:
        with self._lock:
            try:
                return np.int64(fingerprint(self._feed(origin)))
            except Exception:  # whatever it is, the chief then sends the data
                return np.int64(NOTHING_READ)

    def arrays(self, origin: bytes) -> list[np.ndarray]:
        with self._lock:
            arrays = [array.numpy() for array in different(self._feed(origin).arrays)]
            del self._feeds[origin]  # TensorFlow's server has a copy
            return arrays

    def batch(self, origin: bytes, place: np.ndarray, number: np.ndarray) -> list[np.ndarray]:
        with self._lock:
            feed, wanted = self._feed(origin), int(number)
            found = self._open.get(origin)
            if found is None or found.place != tuple(place) or (wanted < found.next and wanted not in found.early):
                epoch, first, end = map(int, place)
                feed.begin(epoch)
                found = self._open[origin] = _Open(tuple(place), feed.range(epoch, first, end), first)
            while found.next <= wanted:
                with _told_to_chief(), feed.naming_bad_examples(found.next, 1):
                    found.early[found.next] = [part.numpy() for part in tree.flatten(next(found.iterator))]
                found.next += 1
            return list(found.early.pop(wanted))

    def _feed(self, origin: bytes) -> Any:
        if origin not in self._feeds:
            described = FeedOrigin.from_json(origin.decode())
            feed = tfdist.data.load_origin(described.source).feed(
                described.asked.split,
                described.asked.global_batch_size,
                seed=described.asked.seed,
                shuffle=described.asked.shuffle,
                augment=described.asked.augment,
                stream_positions=described.asked.stream_positions,
            )
            assert isinstance(feed, ArrayFeed | FileFeed)
            self._feeds[origin] = feed
        return self._feeds[origin]
