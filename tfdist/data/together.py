"""Batches of a job of several processes: of data that all are given alike, or of parts that each brings.

    model.fit(dataset)                 every process has the same batches, and its replicas take their parts of each
    model.fit(per_process(dataset))    a global batch is what the processes' batches make together, in their order

What all shall have alike is compared: each process keeps a running fingerprint of the batches that it has fetched, and
the fingerprints travel with what the processes agree on between two calls of the inner loop. Arrays are compared once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfdist import agreement
from tfdist.data import feed as feeds
from tfdist.data.feed import ArrayFeed, Batches, DatasetFeed, Feed
from tfdist.keras_internals import tree
from tfdist.tensorflow_internals import without_strategy

if TYPE_CHECKING:
    from tfdist.strategies.base import Strategy


def of_job(feed: Feed, strategy: Strategy) -> Feed:
    """`feed` as all processes of the job go through it together.

    Raises:
        DisagreementError: the processes were given different arrays, or different numbers of batches, in all of them.
    """
    agreement.require(
        strategy,
        {"the examples": feed.examples, "the batches": feed.num_batches, "the batch size": feed.batch_size},
    )
    if isinstance(feed, ArrayFeed):
        mine = fingerprint(feed.arrays).numpy().tobytes().hex()
        agreement.require_alike(strategy, "arrays", mine)
    return _SharedFeed(feed, strategy.given) if isinstance(feed, DatasetFeed) else feed


def fingerprint(data: Any, before: tf.Tensor | None = None) -> tf.Tensor:
    """64 bits that tell a structure of tensors from others: uint8 `[1, 8]`; those of what came `before` go in."""
    parts = [] if before is None else [before]
    with tf.device("CPU:0"):
        for tensor in tf.nest.flatten(tree.map_structure(feeds.none_if_empty, data), expand_composites=True):
            if tensor is not None:
                parts.append(_fingerprint(tf.reshape(tensor, [1, -1])))
        return _fingerprint(tf.concat([tf.zeros([1, 0], tf.uint8), *parts], 1))


def _fingerprint(row: tf.Tensor) -> tf.Tensor:
    if row.dtype == tf.string:  # the kernel leaves the result of no strings at all undefined
        row = tf.concat([[[""]], row], 1)
    return tf.raw_ops.Fingerprint(data=row, method="farmhash64")


class Given:
    """The batches that this process was given so far, as one fingerprint.

    Args:
        numbers_of_all: a whole number of each process, by rank: int32 `[world_size]` of an int32 scalar, in a graph.
    """

    def __init__(self, numbers_of_all: Callable[[tf.Tensor], tf.Tensor]):
        self.numbers_of_all = numbers_of_all
        with tf.init_scope(), without_strategy(), tf.device("CPU:0"):
            self._seen = tf.Variable(tf.zeros([1, 8], tf.uint8), trainable=False)

    def note(self, batch: Any) -> None:
        """One batch more."""
        self._seen.assign(fingerprint(batch, self._seen))

    def forget(self) -> None:
        """There was no further batch, or those before do not count any more."""
        self._seen.assign(tf.zeros([1, 8], tf.uint8))

    def __str__(self) -> str:
        seen = self._seen.numpy()
        return seen.tobytes().hex() if seen.any() else "no further batch"


class _SharedFeed(Feed):
    """A feed whose batches are alike in all processes.

    Args:
        feed: what this process has.
        given: takes note of its batches.
    """

    def __init__(self, feed: DatasetFeed, given: Given):
        self._feed = feed
        self._given = given
        self.examples, self.batch_size, self.spec = feed.examples, feed.batch_size, feed.spec

    @property
    def num_batches(self) -> int | None:
        return self._feed.num_batches

    @property
    def batches(self) -> Batches:
        return SharedBatches(self._feed.batches, self._given, endless=self._feed.endless)

    def start(self, epoch: int, first_batch: int) -> Any:
        return self._feed.start(epoch, first_batch)

    def finish(self) -> None:
        self._feed.finish()


@dataclass(frozen=True)
class Found:
    """A batch that may not be there, as the loop asks for it."""

    there: tf.Tensor
    get_value: Callable[[], Any]

    def has_value(self) -> tf.Tensor:
        """Whether there is one: bool scalar, the same in all processes."""
        return self.there


@dataclass(frozen=True)
class SharedBatches(Batches):
    """Batches that are alike in all processes, which end together."""

    whole: Batches
    given: Given
    endless: bool

    @property
    def counted(self) -> bool:  # type: ignore[override]
        return self.whole.counted

    def fetch(self, state: Any, step: tf.Tensor) -> Any:
        batch = self.whole.fetch(state, step)
        if self.counted:
            self.given.note(batch)
            return batch
        there = batch.has_value()
        _either(there, lambda: self.given.note(batch.get_value()), self.given.forget)
        if not self.endless:
            # One that has no further batch must not leave the others alone in the middle of a step.
            there = tf.reduce_all(self.given.numbers_of_all(tf.cast(there, tf.int32)) > 0)
        return Found(there, batch.get_value)

    def part(self, state: Any, batch: Any, index: int, count: int) -> tuple[Any, Any]:
        return self.whole.part(state, batch, index, count)


def _either(condition: tf.Tensor, yes: Callable[[], None], no: Callable[[], None]) -> None:
    def done(function: Callable[[], None]) -> Callable[[], tf.Tensor]:
        def call() -> tf.Tensor:
            function()
            return tf.constant(True)

        return call

    tf.cond(condition, done(yes), done(no))
