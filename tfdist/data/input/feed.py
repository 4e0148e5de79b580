"""The interface through which the inner loop reads global batches.

A `Feed` is the host's side: it knows how many batches a pass over the data has, and starts passes. Its `batches` are
the graph's side: a `Batches` fetches a global batch and cuts the part of each replica out of it.

    feed              its batches           a global batch is fetched as
    ArrayFeed         ArrayBatches          the indices of its examples; the host gathers the part of each replica
                      RepeatedBatches       the same, with all indices taken from one batch
    DatasetFeed       DatasetBatches        the tensors of an iterator's next element, which are sliced
    BatchFeed         FetchedBatches        the same, for one batch that is already there
    FileFeed          RankBatches           this process's part of it (`DatasetBatches` in a job of one process)

    a feed around another feed:
    ResidentFeed      ResidentBatches       indices; each replica gathers its part from the copy on its device
    PrefetchedFeed    PrefetchedBatches     the parts of this process's replicas, which are already on their devices
    job_feeds.shared  SharedBatches         a batch that is the same in all processes, which is compared
    job_feeds.local   LocalBatches          a batch of this process alone
    JoinedFeed        JoinedBatches         a batch of this process; those of all processes make the global batch

`tfdist.parameter_server` adds variants for batches that workers read or are sent, and `tfdist.relaxed.local_sgd` for
processes that train without the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

import tensorflow as tf

from tfdist.data.input import batch_parts
from tfdist.data.input.division import WHOLE, Division
from tfdist.data.input.origin import FeedOrigin
from tfdist.internals.keras import tree

NO_BATCHES = "The dataset has no batches", "pass at least one example"
ONLY_PARTS = (
    "Each process of the job reads its own part of the data, but `verify` needs whole global batches",
    "call `strategy.verify(model, x, y)` with a few batches that are the same in every process",
)


class Feed:
    """Global batches, pass after pass.

    Attributes:
        num_batches: the number of batches per pass; `None` if only the end of the data will tell.
        examples: the number of examples per pass; `None` if unknown.
        batch_size: the number of examples in a full global batch; `None` if unknown.
        spec: the `tf.TensorSpec`s of a global batch.
        batches: the graph's side of the feed.
        arrays: the arrays that contain all examples and that processes must have in common, if there are any.
        per_process: whether each process of the job has different data.
        origin: how another process can make the same feed; `None` if it cannot.
    """

    per_process: ClassVar[bool] = False
    origin: FeedOrigin | None = None
    arrays: Any = None
    num_batches: Any
    examples: Any
    batch_size: Any
    spec: Any
    batches: Any

    def start(self, epoch: int, first_batch: int) -> Any:
        """Starts pass number `epoch` at batch number `first_batch`; returns the state that `batches` take."""
        raise NotImplementedError

    def finish(self) -> None:
        """Ends a pass."""

    def begin_epoch(self) -> None:
        """Calls the hook of the data for the begin of an epoch, before its first batch is read."""

    def end_epoch(self) -> None:
        """Calls the hook of the data for the end of an epoch that no callback has stopped."""

    def look_ahead(self, keep: bool) -> None:
        """Creates the iterator of the next pass at the end of a pass of known length; `keep` has that pass use it."""

    def release(self) -> None:
        """Frees what passes have left open, when no other pass follows."""

    def first(self, count: int) -> list[Any]:
        """Returns up to `count` of the first global batches; the first pass still begins with them."""
        state, count = self.start(0, 0), min(count, self.num_batches or count)
        return [self.batches.part(state, batch, 0, WHOLE)[0] for batch in self.batches.take(state, 0, count)]

    def save(self) -> bytes | None:
        """Returns what `resume` needs besides the position in the pass; `None` if the pass cannot be resumed."""
        return b""

    def resume(self, saved: bytes, epoch: int, first_batch: int) -> Any:
        """Starts a pass where another process called `save` on its feed of the same data; see `start`.

        Raises:
            CheckpointError: these are different data, and the pass has begun.
        """
        del saved
        return self.start(epoch, first_batch)

    def naming_bad_examples(self, first_batch: int, batches: int) -> contextlib.AbstractContextManager[Any]:
        """The context in which these batches are read: errors in it name the example that cannot be used."""
        del first_batch, batches
        return contextlib.nullcontext()


class WrappedFeed(Feed):
    """A feed that delegates to another feed; a subclass defines at least its own `batches`."""

    def __init__(self, feed: Feed):
        self._feed = feed
        self.examples, self.batch_size, self.spec = feed.examples, feed.batch_size, feed.spec

    @property
    def num_batches(self) -> int | None:
        return self._feed.num_batches

    def start(self, epoch: int, first_batch: int) -> Any:
        return self._feed.start(epoch, first_batch)

    def finish(self) -> None:
        self._feed.finish()

    def begin_epoch(self) -> None:
        self._feed.begin_epoch()

    def end_epoch(self) -> None:
        self._feed.end_epoch()

    def look_ahead(self, keep: bool) -> None:
        self._feed.look_ahead(keep)

    def release(self) -> None:
        self._feed.release()

    def first(self, count: int) -> list[Any]:
        return self._feed.first(count)

    def save(self) -> bytes | None:
        return self._feed.save()

    def resume(self, saved: bytes, epoch: int, first_batch: int) -> Any:
        return self._feed.resume(saved, epoch, first_batch)

    def naming_bad_examples(self, first_batch: int, batches: int) -> contextlib.AbstractContextManager[Any]:
        return self._feed.naming_bad_examples(first_batch, batches)


class Batches:
    """How a graph reads the batches of a feed; equal instances can share a graph.

    Attributes:
        length_known: whether every step that the loop runs has a batch.
        at_any_time: whether each batch can be fetched at any time, and again.
        in_parts: whether a process has only its own part of a global batch.
        local: whether the other processes of the job take no part in the steps.
    """

    length_known: bool
    at_any_time: ClassVar[bool] = False
    in_parts: ClassVar[bool] = False
    local: ClassVar[bool] = False

    def fetch(self, state: Any, step: tf.Tensor) -> Any:
        """Fetches global batch number `step` (int32 scalar) of the pass; an optional unless `length_known`."""
        raise NotImplementedError

    def part(self, state: Any, batch: Any, index: int, division: Division) -> tuple[Any, Any]:
        """Returns part `index` of a global batch, and its share of the examples: a float or a float64 scalar.

        If there are fewer examples than parts, an empty part contains an example of another part, so that no model gets
        a batch without examples; its share is 0.
        """
        raise NotImplementedError

    @property
    def size(self) -> int | None:
        """The number of examples of every global batch, if stock Keras knows it while it traces; else `None`."""
        return None

    def lengths_of_step(self, step: Any, division: Division) -> list[Any] | None:
        """Returns the `lengths_of_parts` of batch number `step` if they are known before it is fetched, else `None`."""
        del step, division
        return None

    def lengths_of_parts(self, state: Any, batch: Any, division: Division) -> list[Any]:
        """Returns the number of examples in each part of a global batch: integers, or int32 scalars."""
        lengths = []
        for index in range(division.count):
            data, share = self.part(state, batch, index, division)
            length = batch_parts.length(next(filter(batch_parts.has_examples, tree.flatten(data))))
            if isinstance(share, float | int):
                lengths.append(length if share else 0)
            else:
                lengths.append(tf.where(share > 0, length, 0))
        return lengths

    def local_examples(self, state: Any, batch: Any, division: Division) -> Any:
        """Returns this process's part of a batch, which may have no examples; only if `in_parts` or `local`."""
        raise NotImplementedError

    def take(self, state: Any, first: int, count: int) -> Iterator[Any]:
        """Fetches up to `count` batches from number `first` on, one by one, outside of a graph."""
        for step in range(first, first + count):
            batch = self.fetch(state, tf.constant(step))
            if not self.length_known:
                if not batch.has_value():
                    return
                batch = batch.get_value()
            yield batch
