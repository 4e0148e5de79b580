"""Batches of a job of several processes: of data that all are given alike, or of parts that each brings.

    model.fit(dataset)                 every process has the same batches, and its replicas take their parts of each
    model.fit(per_process(dataset))    a global batch is what the processes' batches make together, in their order

What all shall have alike is compared: each process keeps a running fingerprint of the batches that it has fetched, and
the fingerprints travel with what the processes agree on between two calls of the inner loop. Arrays are compared once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import tensorflow as tf

from tfdist.data.input import batch_parts
from tfdist.data.input.array_feed import ArrayBatches, ArrayFeed
from tfdist.data.input.dataset_feed import DatasetFeed
from tfdist.data.input.division import WHOLE, Division
from tfdist.data.input.feed import ONLY_PARTS, Batches, Feed, WrappedFeed
from tfdist.data.input.large_feed import LargeArrayFeed
from tfdist.errors import UsageError
from tfdist.internals.keras import tree
from tfdist.internals.tensorflow import without_strategy
from tfdist.jobs import consensus
from tfdist.jobs.world import World


class GraphPeers(consensus.Peers, Protocol):
    """The processes of a job, which can also gather numbers inside a graph; every strategy is one."""

    def numbers_of_all(self, number: tf.Tensor) -> tf.Tensor:
        """The `number` of each process, an int32 scalar, by rank: int32 `[world_size]`."""
        ...


def shared(feed: Feed, peers: GraphPeers) -> Feed:
    """`feed` as processes go through it that all have the same.

    Raises:
        DisagreementError: the processes were given different arrays, or different numbers of batches, in all of them.
    """
    consensus.require_equal(
        peers,
        {"the examples": feed.examples, "the batches": feed.num_batches, "the batch size": feed.batch_size},
    )
    if isinstance(feed, ArrayFeed | LargeArrayFeed):
        mine = fingerprint(feed.arrays).numpy().tobytes().hex()
        consensus.require_equal_fingerprints(peers, "arrays", mine)
    return _SharedFeed(feed, peers) if isinstance(feed, DatasetFeed) else feed


def fingerprint(data: Any, before: tf.Tensor | None = None) -> tf.Tensor:
    """64 bits that tell a structure of tensors from others: uint8 `[1, 8]`; those of what came `before` go in."""
    parts = [] if before is None else [before]
    with tf.device("CPU:0"):
        for tensor in tf.nest.flatten(tree.map_structure(batch_parts.none_if_empty, data), expand_composites=True):
            if tensor is not None:
                parts.append(_fingerprint(tf.reshape(tensor, [1, -1])))
        return _fingerprint(tf.concat([tf.zeros([1, 0], tf.uint8), *parts], 1))


def _fingerprint(row: tf.Tensor) -> tf.Tensor:
    if row.dtype == tf.string:  # the kernel leaves the result of no strings at all undefined
        row = tf.concat([[[""]], row], 1)
    return tf.raw_ops.Fingerprint(data=row, method="farmhash64")


class Given:
    """The batches that this process was given so far, as one fingerprint."""

    def __init__(self) -> None:
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


_given: weakref.WeakKeyDictionary[Any, Given] = weakref.WeakKeyDictionary()


def given(peers: GraphPeers) -> Given:
    """The batches that this process was given so far, one of `peers`."""
    if peers not in _given:
        _given[peers] = Given()
    return _given[peers]


class _SharedFeed(WrappedFeed):
    """A feed whose batches are alike in all processes, which take note of them."""

    def __init__(self, feed: DatasetFeed, peers: GraphPeers):
        super().__init__(feed)
        self._peers = peers
        self._endless = feed.endless

    @property
    def batches(self) -> Batches:
        return SharedBatches(self._feed.batches, given(self._peers), self._peers.numbers_of_all, self._endless)


class PartFeed(WrappedFeed):
    """A feed that this process goes through by itself."""

    def __init__(self, feed: Feed, world: World):
        super().__init__(feed)
        self._world = world

    @property
    def batches(self) -> Batches:
        return PartBatches(self._feed.batches, self._world.rank, self._world.world_size)


class JoinedFeed(WrappedFeed):
    """A feed whose batches are what those of all processes make together.

    Args:
        feed: this process' own.
        peers: the processes of the job.
    """

    own = True

    def __init__(self, feed: Feed, peers: GraphPeers):
        super().__init__(feed)
        self._peers = peers
        found = consensus.all_gather_object(peers, [feed.num_batches, feed.examples, feed.batch_size])
        numbers, examples, sizes = ([None] if None in values else values for values in zip(*found, strict=True))
        self._num_batches = None if numbers == [None] else max(numbers)
        self.examples = None if examples == [None] else sum(examples)
        self.batch_size = None if sizes == [None] else sum(sizes)
        length_known = consensus.all_gather_object(peers, feed.batches.length_known)
        self._length_known = self._num_batches is not None and all(length_known)

    @property
    def num_batches(self) -> int | None:
        return self._num_batches

    def first(self, count: int) -> list[Any]:
        raise UsageError(*ONLY_PARTS)

    @property
    def batches(self) -> Batches:
        own = self._feed.batches
        # The end of this process' data is to be seen, whatever it is for the loop.
        own = replace(own, even=False) if isinstance(own, ArrayBatches) else replace(own, length_known=False)
        world = self._peers.world
        return JoinedBatches(own, world.rank, world.world_size, self._length_known, self._peers.numbers_of_all)


@dataclass(frozen=True)
class Found:
    """A batch that may not be there, as the loop asks for it."""

    there: tf.Tensor
    get_value: Callable[[], Any]

    def has_value(self) -> tf.Tensor:
        """Whether there is one: bool scalar, the same in all processes."""
        return self.there


# A whole number of each process, by rank: int32 `[world_size]` of an int32 scalar, in a graph.
NumbersOfAll = Callable[[tf.Tensor], tf.Tensor]


@dataclass(frozen=True)
class SharedBatches(Batches):
    """Batches that are alike in all processes, which end together."""

    whole: Batches
    given: Given
    numbers_of_all: NumbersOfAll
    endless: bool

    @property
    def length_known(self) -> bool:  # type: ignore[override]
        return self.whole.length_known

    def fetch(self, state: Any, step: tf.Tensor) -> Any:
        batch = self.whole.fetch(state, step)
        if self.length_known:
            self.given.note(batch)
            return batch
        there = batch.has_value()
        _either(there, lambda: self.given.note(batch.get_value()), self.given.forget)
        if not self.endless:
            # One that has no further batch must not leave the others alone in the middle of a step.
            there = tf.reduce_all(self.numbers_of_all(tf.cast(there, tf.int32)) > 0)
        return Found(there, batch.get_value)

    def part(self, state: Any, batch: Any, index: int, division: Division) -> tuple[Any, Any]:
        return self.whole.part(state, batch, index, division)

    def lengths_of_parts(self, state: Any, batch: Any, division: Division) -> list[Any]:
        # Processes whose batches differ in length, against what was agreed, must not leave each other in a step.
        mine = [tf.cast(length, tf.int32) for length in self.whole.lengths_of_parts(state, batch, division)]
        of_all = self.numbers_of_all(tf.reduce_sum(tf.maximum(mine, 0)))
        alike = tf.reduce_all(tf.equal(of_all, of_all[:1]))
        return [tf.where(alike, length, batch_parts.DIFFERENT) for length in mine]


@dataclass(frozen=True)
class PartBatches(Batches):
    """The batches of this process alone, for the replicas that it has."""

    part_of: Batches
    rank: int
    world_size: int
    own: ClassVar[bool] = True

    @property
    def length_known(self) -> bool:  # type: ignore[override]
        return self.part_of.length_known

    def fetch(self, state: Any, step: tf.Tensor) -> Any:
        return self.part_of.fetch(state, step)

    def part(self, state: Any, batch: Any, index: int, division: Division) -> tuple[Any, Any]:
        return _local_part(self, state, batch, index, division)

    def mine(self, state: Any, batch: Any, division: Division) -> Any:
        del division
        return self.part_of.part(state, batch, 0, WHOLE)[0]


@dataclass(frozen=True)
class JoinedBatches(Batches):
    """What the batches of all processes make together, in the order of their ranks.

    A batch is this process' own, and the numbers of examples of all. One whose data have ended has no examples in it.
    """

    part_of: Batches
    rank: int
    world_size: int
    length_known: bool
    numbers_of_all: NumbersOfAll
    in_parts: ClassVar[bool] = True

    def fetch(self, state: Any, step: tf.Tensor) -> Any:
        mine = self.part_of.fetch(state, step)
        if not self.part_of.length_known:
            mine = _value_or_nothing(mine)
        examples = next(batch_parts.length(tensor) for tensor in tree.flatten(mine) if tensor is not None)
        sizes = self.numbers_of_all(tf.cast(examples, tf.int32))
        if self.length_known:
            return mine, sizes
        return Found(tf.reduce_sum(sizes) > 0, lambda: (mine, sizes))

    def lengths_of_parts(self, state: Any, batch: Any, division: Division) -> list[Any]:
        del state
        within = Division(division.count // self.world_size)
        sizes = tf.unstack(batch[1], num=self.world_size)
        return [length for size in sizes for length in batch_parts.rows(size, within)]

    def mine(self, state: Any, batch: Any, division: Division) -> Any:
        """The examples of this process, of which there may be none."""
        del division
        return self.part_of.part(state, batch[0], 0, WHOLE)[0]

    def part(self, state: Any, batch: Any, index: int, division: Division) -> tuple[Any, Any]:
        mine, sizes = batch
        data, share = _local_part(self, state, mine, index, division)
        of_all = tf.cast(sizes[self.rank], tf.float64) / tf.cast(tf.reduce_sum(sizes), tf.float64)
        return tree.map_structure(batch_parts.at_least_one, data), share * of_all


def _local_part(batches: Any, state: Any, batch: Any, index: int, division: Division) -> tuple[Any, Any]:
    """The part of replica `index` in the job, of a batch that this process' replicas share."""
    replicas = division.count // batches.world_size
    return batches.part_of.part(state, batch, index - batches.rank * replicas, Division(replicas))


def _value_or_nothing(optional: Any) -> Any:
    """The batch, or one without examples."""
    spec = tree.map_structure(lambda one: None if isinstance(one, tf.OptionalSpec) else one, optional.element_spec)
    specs = [one for one in tree.flatten(spec) if one is not None]

    def value() -> list[Any]:
        found = tree.map_structure(batch_parts.none_if_empty, optional.get_value())
        return [tensor for tensor in tree.flatten(found) if tensor is not None]

    found = iter(tf.cond(optional.has_value(), value, lambda: [_nothing(one) for one in specs]))
    return tree.map_structure(lambda one: None if one is None else next(found), spec)


def _nothing(spec: Any) -> Any:
    """A tensor of this spec that has no examples."""
    shape = [0, *[size or 1 for size in spec.shape[1:]]]
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensor(tf.zeros([0, len(shape)], tf.int64), tf.zeros([0], spec.dtype), shape)
    if isinstance(spec, tf.RaggedTensorSpec):
        values = tf.zeros([0, *shape[spec.ragged_rank + 1 :]], spec.dtype)
        splits = [tf.zeros([1], spec.row_splits_dtype)] * spec.ragged_rank
        return tf.RaggedTensor.from_nested_row_splits(values, splits)
    return tf.zeros(shape, spec.dtype)


def _either(condition: tf.Tensor, yes: Callable[[], None], no: Callable[[], None]) -> None:
    def done(function: Callable[[], None]) -> Callable[[], tf.Tensor]:
        def call() -> tf.Tensor:
            function()
            return tf.constant(True)

        return call

    tf.cond(condition, done(yes), done(no))
