"""The interface through which the inner loop reads global batches.

A `Feed` is the host's side: it knows how many batches a pass over the data has, and starts passes. Its `batches` are
the graph's side: a `Batches` fetches a global batch and cuts the part of each replica out of it.

    feed              its batches           a global batch is fetched as
    ArrayFeed         ArrayBatches          the indices of its examples; the host gathers the part of each replica
                      RepeatedBatches       the same, with all indices taken from one batch
    DatasetFeed       DatasetBatches        the tensors of an iterator's next element, which are sliced
    GrainFeed         DatasetBatches        the same
    BatchFeed         FetchedBatches        the same, for one batch that is already there
    FileFeed          RankBatches           this process's part of it (`DatasetBatches` in a job of one process)

    a feed around another feed:
    ResidentFeed      ResidentBatches       indices; each replica gathers its part from the copy on its device
    PrefetchedFeed    PrefetchedBatches     the parts of this process's replicas, which are already on their devices
    job_feeds.shared  SharedBatches         a batch that is the same in all processes, which is compared
    job_feeds.local   LocalBatches          a batch of this process alone
    JoinedFeed        JoinedBatches         a batch of this process; those of all processes make the global batch

`tfdist.parameter_server` adds variants for batches that workers read or are sent, and `tfdist.relaxed.local_sgd` for
processes that train without the others. `DataPasses` tracks the position of a `fit`, `evaluate` or `predict` in the
passes over its data.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import tensorflow as tf

from tfdist.data.input import batch_parts
from tfdist.data.input.division import WHOLE, Division
from tfdist.errors import DataError
from tfdist.internals.keras import tree

NO_BATCHES = "The dataset has no batches", "pass at least one example"
ONLY_PARTS = (
    "Each process of the job reads its own part of the data, but `verify` needs whole global batches",
    "call `strategy.verify(model, x, y)` with a few batches that are the same in every process",
)


def graph_function(function: Callable[..., Any]) -> Any:
    """A `tf.function` that makes pipelines.

    TensorFlow's warning about retracing counts by code object, which all feeds share, unless it is wrapped.
    """
    return tf.function(functools.partial(function), autograph=False)


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
        origin: how another process can make the same feed, as a `source.FeedOrigin`; `None` if it cannot.
        sample: returns a hash of a few examples, which processes with the same data have in common; may be `None`.
        shard: the index and the number of shards, if the data say that they are one shard of several.
    """

    per_process: ClassVar[bool] = False
    origin: Any = None
    arrays: Any = None
    sample: Callable[[], str] | None = None
    shard: tuple[int, int] | None = None
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
        return self.start(epoch, first_batch)

    def naming_bad_examples(self, first_batch: int, batches: int) -> contextlib.AbstractContextManager[Any]:
        """The context in which these batches are read: errors in it name the example that cannot be used."""
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


class DataPasses:
    """Divides the passes over the data into epochs, and tracks the position; a context manager.

    Without `steps_per_epoch` an epoch is a pass. With it, an epoch continues where the previous one stopped, and ends
    early, with Keras' warning, at the end of the data.

    Attributes:
        feed: the data.
        num_batches: the number of steps per epoch; `None` if only the end of the data will tell.
        examples: the number of examples per epoch; `None` if unknown.
        state: the state of the current pass, see `Feed.start`; `None` between passes.
        position: the number of the next batch in its pass.
    """

    def __init__(self, feed: Feed, steps_per_epoch: int | None):
        self.feed = feed
        self._steps = steps_per_epoch
        self.num_batches = steps_per_epoch or feed.num_batches
        if steps_per_epoch is None or steps_per_epoch == feed.num_batches:
            self.examples = feed.examples
        else:
            self.examples = None if feed.batch_size is None else steps_per_epoch * feed.batch_size
        self.state: Any = None
        self.position = 0
        self._pass = 0
        self._saved: tuple[int, int, bytes] | None = None
        self._empty = True

    def __enter__(self) -> DataPasses:
        return self

    def __exit__(self, *raised: Any) -> None:
        """Frees pipelines that read ahead: their threads may run Python, and would block the interpreter's exit."""
        self.close()
        self.feed.release()

    def begin_at(self, epoch: int, resume_batch: int | None, next_pass: int) -> None:
        """Moves to epoch number `epoch`, or to where a resumed run has finished `resume_batch` steps of it.

        A model that was trained before continues with `next_pass`: its second `fit(epochs=1)` has another order than
        its first, and with `initial_epoch=1` the order of one `fit(epochs=2)`.
        """
        self._pass, self.position = max(epoch, next_pass), 0
        if self._saved is not None:
            self._pass, self.position, _ = self._saved
        elif resume_batch is not None:
            self._pass, self.position = self._after(epoch, resume_batch)

    @property
    def next(self) -> int:
        """The number of the pass that a later `fit` begins with."""
        return self._pass + (self.position > 0)

    @property
    def position_in_passes(self) -> dict[str, int]:
        """The position in the data, as keyword arguments of `resume`."""
        return {"number": self._pass, "position": self.position}

    def resume(self, saved: bytes, number: int, position: int) -> None:
        """Makes the passes begin at batch `position` of pass `number`, with what `Feed.save` returned."""
        self._saved = number, position, saved

    def _after(self, epochs: int, batches: int) -> tuple[int, int]:
        """The pass and the position in it after `epochs` epochs and `batches` batches."""
        if self._steps is None:
            return epochs, batches
        if self.feed.num_batches is None:
            return 0, epochs * self._steps + batches
        number = position = 0
        for _ in range(epochs):
            position += min(self._steps, self.feed.num_batches - position)
            if position == self.feed.num_batches:
                number, position = number + 1, 0
        return number, position + batches

    def reset(self) -> None:
        """Tells the data that a training or an evaluation is about to begin."""
        # Keras calls this hook once before the first epoch, so that a dataset that shuffles in it begins shuffled.
        self.feed.end_epoch()

    def begin_epoch(self) -> int | None:
        """Starts a pass if none is open; returns how many of its batches are left, `None` if unknown."""
        self.feed.begin_epoch()
        if self._saved is not None:
            self.state = self.feed.resume(self._saved[2], self._pass, self.position)
            self._saved = None
        elif self.state is None:
            self.state = self.feed.start(self._pass, self.position)
        return None if self.feed.num_batches is None else self.feed.num_batches - self.position

    def end_epoch(self, steps: int, data_ended: bool, stopped: bool) -> None:
        """Ends an epoch.

        Args:
            steps: the number of steps of the epoch.
            data_ended: whether there are no further batches in the pass.
            stopped: whether a callback has stopped the training; as with Keras, the hooks of the data are then not
                called.

        Raises:
            DataError: there was not a single batch, which for data of unknown length is only known now.
        """
        self._empty = self._empty and self.position == 0
        if self._empty and data_ended:
            raise DataError(*NO_BATCHES)
        if self._steps is None or data_ended:
            self.close()
            self._pass, self.position = self._pass + 1, 0
        if not stopped:
            if data_ended and self.feed.num_batches is not None:
                self.feed.look_ahead(keep=self._steps is not None)
            self.feed.end_epoch()
        if self._steps is not None and steps < self._steps and data_ended:
            warnings.warn(
                f"The data ended after {steps} of the {self._steps} steps of an epoch; repeat the dataset, or lower "
                "the number of steps.",
                stacklevel=2,
            )

    def close(self) -> None:
        """Ends the pass, if one is open."""
        if self.state is not None:
            self.feed.finish()
            self.state = None
