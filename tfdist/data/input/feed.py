"""What the loop reads global batches from: the interface of all feeds.

A feed is the host's side: it knows how many batches a pass over the data has, and starts passes. Its `batches` are the
graph's side: they fetch a global batch and cut one replica's part out of it.
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
    "Each process of the job reads its own part of the data, and to verify a model it needs whole global batches",
    "call `strategy.verify(model, x, y)` with a few batches that every process has",
)


class Feed:
    """Global batches, pass after pass.

    Attributes:
        num_batches: batches in a pass, `None` when only the end of the data will tell.
        examples: examples in a pass, `None` when unknown.
        batch_size: examples in a full global batch, `None` when unknown.
        spec: the `tf.TensorSpec`s of a global batch.
        batches: the graph's side of the feed.
        own: other processes of the job have other data.
        origin: how another process can make the same feed; `None` if it cannot.
    """

    own: ClassVar[bool] = False
    origin: FeedOrigin | None = None
    num_batches: Any
    examples: Any
    batch_size: Any
    spec: Any
    batches: Any

    def start(self, epoch: int, first_batch: int) -> Any:
        """The state of pass number `epoch`, whose next batch is number `first_batch`."""
        raise NotImplementedError

    def finish(self) -> None:
        """Ends a pass."""

    def reset(self) -> None:
        """Tells the data, as Keras does, that a training or an evaluation is about to begin."""

    def begin_epoch(self) -> None:
        """Tells the data that an epoch begins, before its first batch is read."""

    def end_epoch(self) -> None:
        """Tells the data that an epoch has ended, and was not stopped."""

    def look_ahead(self, keep: bool) -> None:
        """Makes what the next pass reads from, at the end of a pass whose length was known; `keep` has it read."""

    def release(self) -> None:
        """Lets go of what passes have left open, when none is to follow."""

    def first(self, count: int) -> list[Any]:
        """Up to `count` global batches that the first pass begins with; that pass has them all the same."""
        state, count = self.start(0, 0), min(count, self.num_batches or count)
        return [self.batches.part(state, batch, 0, WHOLE)[0] for batch in self.batches.take(state, 0, count)]

    def save(self) -> bytes | None:
        """What `resume` needs besides the place in the pass; `None` where that pass cannot be gone on with."""
        return b""

    def resume(self, saved: bytes, epoch: int, first_batch: int) -> Any:
        """As `start`, going on from where another process had `saved` its feed of the same data.

        Raises:
            CheckpointError: these are other data, and a pass has begun.
        """
        del saved
        return self.start(epoch, first_batch)

    def naming_bad_examples(self, first_batch: int, batches: int) -> contextlib.AbstractContextManager[Any]:
        """The context in which these batches are read: it names the example that cannot be used."""
        del first_batch, batches
        return contextlib.nullcontext()


class WrappedFeed(Feed):
    """A feed over the passes of another one; a subclass says what it has of its own, its `batches` at least."""

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

    def reset(self) -> None:
        self._feed.reset()

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
    """How a graph gets at the batches of a feed; equal ones can share a graph.

    Attributes:
        length_known: every step that the loop asks for has a batch.
        own: the other processes of the job take no part in the steps.
        in_parts: each process has its part of a global batch alone.
        at_any_time: each batch can be fetched at any time, and again.
    """

    length_known: bool
    at_any_time: ClassVar[bool] = False
    own: ClassVar[bool] = False
    in_parts: ClassVar[bool] = False

    def fetch(self, state: Any, step: tf.Tensor) -> Any:
        """Global batch number `step` (int32 scalar) of the pass; an optional where `length_known` is false."""
        raise NotImplementedError

    def part(self, state: Any, batch: Any, index: int, division: Division) -> tuple[Any, Any]:
        """Part `index` of a global batch, and its share, a float or a float64 scalar.

        Where there are fewer examples than parts, an empty part holds an example of another one, so that no model sees
        a batch without examples; its share is 0.
        """
        raise NotImplementedError

    @property
    def size(self) -> int | None:
        """The number of examples of every global batch, where stock Keras knows it while it traces; else `None`."""
        return None

    def lengths_of_step(self, step: Any, division: Division) -> list[Any] | None:
        """As `lengths_of_parts`, of batch number `step`, where that is known before it is fetched; else `None`."""
        del step, division
        return None

    def lengths_of_parts(self, state: Any, batch: Any, division: Division) -> list[Any]:
        """The number of examples of a global batch in each part: integers, or int32 scalars."""
        found = []
        for index in range(division.count):
            data, share = self.part(state, batch, index, division)
            sized = next(one for one in tree.flatten(data) if batch_parts.has_examples(one))
            length = batch_parts.length(sized)
            if isinstance(share, float | int):
                found.append(length if share else 0)
            else:
                found.append(tf.where(share > 0, length, 0))
        return found

    def mine(self, state: Any, batch: Any, division: Division) -> Any:
        """The examples of this process, where each has its part of a batch alone; there may be none."""
        raise NotImplementedError

    def take(self, state: Any, first: int, count: int) -> Iterator[Any]:
        """Up to `count` batches from number `first` on, fetched one by one outside of a graph."""
        for step in range(first, first + count):
            batch = self.fetch(state, tf.constant(step))
            if not self.length_known:
                if not batch.has_value():
                    return
                batch = batch.get_value()
            yield batch
