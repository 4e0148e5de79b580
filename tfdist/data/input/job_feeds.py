"""The batches of a job of several processes: the same in every process, or a part from each process.

    model.fit(dataset)                 every process has the same batches, and its replicas take their parts of them
    model.fit(per_process(dataset))    a global batch consists of the batches of all processes, in the order of ranks

Data that all processes should have in common are compared. Each process keeps a running fingerprint of the batches that
it has fetched; the processes compare these fingerprints between two calls of the inner loop. Arrays are compared once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import tensorflow as tf

from tfdist.data.input import batch_parts
from tfdist.data.input.array_feed import ArrayBatches
from tfdist.data.input.dataset_feed import DatasetFeed
from tfdist.data.input.division import WHOLE, Division
from tfdist.data.input.feed import ONLY_PARTS, Batches, Feed, WrappedFeed
from tfdist.errors import UsageError
from tfdist.internals import keras_data
from tfdist.internals.keras import tree
from tfdist.internals.tensorflow import without_strategy
from tfdist.jobs import consensus
from tfdist.jobs.world import World

# Gathers an int32 scalar of each process in a graph: int32 `[world_size]`, by rank.
NumbersOfAll = Callable[[tf.Tensor], tf.Tensor]


class GraphPeers(consensus.Peers, Protocol):
    """The processes of a job, which can also gather numbers inside a graph; every strategy implements it."""

    def numbers_of_all(self, number: tf.Tensor) -> tf.Tensor:
        """Returns the `number` of each process, an int32 scalar, by rank: int32 `[world_size]`."""
        ...


def shared(feed: Feed, peers: GraphPeers) -> Feed:
    """Returns `feed` for data that all processes should have in common, and compares the data.

    Raises:
        DisagreementError: the processes have different arrays or different numbers of batches; raised in all of them.
        UsageError: the data of this process are a shard, and are not marked with `per_process`.
    """
    if feed.shard is not None and feed.shard[1] > 1:
        index, count = feed.shard
        raise UsageError(
            f"The Grain `DataLoader` reads shard {index} of {count}, and all processes must be given the same data",
            "pass `tfdist.data.per_process(loader)`, or a loader with `shard_options=grain.sharding.NoSharding()`",
        )
    consensus.require_equal(
        peers,
        {"the examples": feed.examples, "the batches": feed.num_batches, "the batch size": feed.batch_size},
    )
    if feed.arrays is not None:
        consensus.require_equal_fingerprints(peers, "arrays", fingerprint(feed.arrays).numpy().tobytes().hex())
    if not isinstance(feed, DatasetFeed):
        if feed.sample is not None:
            consensus.require_equal_fingerprints(peers, "examples", feed.sample())
        return feed
    running, endless = batch_fingerprint(peers), feed.endless
    return _ChangedFeed(feed, lambda batches: SharedBatches(batches, running, peers.numbers_of_all, endless))


def local(feed: Feed, world: World) -> Feed:
    """Returns `feed` for data that this process goes through without the others."""
    return _ChangedFeed(feed, lambda batches: LocalBatches(batches, world.rank, world.world_size))


class _ChangedFeed(WrappedFeed):
    """A feed whose batches are `change(batches)` of those of another feed, whose length may become known later."""

    def __init__(self, feed: Feed, change: Callable[[Batches], Batches]):
        super().__init__(feed)
        self._change = change

    @property
    def batches(self) -> Batches:
        return self._change(self._feed.batches)


class JoinedFeed(WrappedFeed):
    """A feed whose global batches consist of the batches of all processes.

    Args:
        feed: the feed of this process.
        peers: the processes of the job.

    Raises:
        UsageError: the data of the processes are not the parts of a whole.
    """

    per_process = True

    def __init__(self, feed: Feed, peers: GraphPeers):
        super().__init__(feed)
        self._peers = peers
        _require_parts(feed, peers)
        counts = consensus.all_gather_object(peers, [feed.num_batches, feed.examples, feed.batch_size])
        numbers, examples, sizes = ([None] if None in values else values for values in zip(*counts, strict=True))
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
        local = self._feed.batches
        # Other processes may have more batches, so the end of this process's data must be visible in each step.
        local = replace(local, even=False) if isinstance(local, ArrayBatches) else replace(local, length_known=False)
        world = self._peers.world
        return JoinedBatches(local, world.rank, world.world_size, self._length_known, self._peers.numbers_of_all)


def _require_parts(feed: Feed, peers: GraphPeers) -> None:
    """Raises `UsageError` if the processes read the same data, or not all shards of them."""
    of_all = consensus.all_gather_object(peers, [feed.sample and feed.sample(), feed.shard], "compares its data")
    samples = [sample for sample, _ in of_all]
    shards = [tuple(shard) if shard else (0, 1) for _, shard in of_all]
    if any(count > 1 for _, count in shards) and sorted(shards) != [(i, len(shards)) for i in range(len(shards))]:
        listed = ", ".join(f"worker {rank}: {index} of {count}" for rank, (index, count) in enumerate(shards))
        raise UsageError(
            f"The Grain `DataLoader`s of the {len(shards)} processes do not read all shards: {listed}",
            "give each its own: `grain.sharding.ShardOptions(strategy.world.rank, strategy.world.world_size)`",
        )
    if None not in samples and len(set(samples)) == 1:
        raise UsageError(
            "`per_process` marks the part of each process, but all processes begin with the same examples",
            "divide the data by `strategy.world.rank`, or pass the same data to each process without `per_process`",
        )


def fingerprint(data: Any, previous: tf.Tensor | None = None) -> tf.Tensor:
    """A 64-bit fingerprint of a structure of tensors: uint8 `[1, 8]`.

    Args:
        data: the structure.
        previous: the fingerprint of the data before it, which the new fingerprint then covers too.
    """
    parts = [] if previous is None else [previous]
    with tf.device("CPU:0"):
        for tensor in tf.nest.flatten(tree.map_structure(batch_parts.none_if_empty, data), expand_composites=True):
            if tensor is not None:
                parts.append(_fingerprint(tf.reshape(tensor, [1, -1])))
        return _fingerprint(tf.concat([tf.zeros([1, 0], tf.uint8), *parts], 1))


def _fingerprint(row: tf.Tensor) -> tf.Tensor:
    if row.dtype == tf.string:  # for no strings at all, the kernel leaves the result undefined
        row = tf.concat([[[""]], row], 1)
    return tf.raw_ops.Fingerprint(data=row, method="farmhash64")


class BatchFingerprint:
    """The running fingerprint of the batches that this process has fetched."""

    def __init__(self) -> None:
        with tf.init_scope(), without_strategy(), tf.device("CPU:0"):
            self._value = tf.Variable(tf.zeros([1, 8], tf.uint8), trainable=False)

    def add(self, batch: Any) -> None:
        """Adds a batch; works in a graph."""
        self._value.assign(fingerprint(batch, self._value))

    def reset(self) -> None:
        """Forgets all batches: the data have ended before those of others, or the next call has different data."""
        self._value.assign(tf.zeros([1, 8], tf.uint8))

    def __str__(self) -> str:
        value = self._value.numpy()
        return value.tobytes().hex() if value.any() else "no further batch"


_fingerprints: weakref.WeakKeyDictionary[Any, BatchFingerprint] = weakref.WeakKeyDictionary()


def batch_fingerprint(peers: GraphPeers) -> BatchFingerprint:
    """Returns the running fingerprint of the batches that this process has fetched as one of `peers`."""
    if peers not in _fingerprints:
        _fingerprints[peers] = BatchFingerprint()
    return _fingerprints[peers]


@dataclass(frozen=True)
class OptionalBatch:
    """A batch and whether there is one, with the methods of `tf.experimental.Optional` that the loop calls."""

    exists: tf.Tensor
    get_value: Callable[[], Any]

    def has_value(self) -> tf.Tensor:
        """Whether there is a batch: bool scalar, the same in all processes."""
        return self.exists


@dataclass(frozen=True)
class SharedBatches(Batches):
    """`batches` of data that all processes have in common: they are compared, and end in the same step everywhere."""

    batches: Batches
    fingerprint: BatchFingerprint
    numbers_of_all: NumbersOfAll
    endless: bool

    @property
    def length_known(self) -> bool:  # type: ignore[override]
        return self.batches.length_known

    def fetch(self, state: Any, step: tf.Tensor) -> Any:
        batch = self.batches.fetch(state, step)
        if self.length_known:
            self.fingerprint.add(batch)
            return batch

        exists = exists_everywhere = exists_anywhere = batch.has_value()
        if not self.endless:
            of_all = self.numbers_of_all(tf.cast(exists, tf.int32)) > 0
            exists_everywhere, exists_anywhere = tf.reduce_all(of_all), tf.reduce_any(of_all)

        def add() -> tf.Tensor:
            self.fingerprint.add(batch.get_value())
            return tf.constant(True)

        def reset() -> tf.Tensor:
            self.fingerprint.reset()
            return tf.constant(False)

        # Where the data of all have ended, the batches before are still to be compared.
        tf.case([(exists, add), (exists_anywhere, reset)], lambda: tf.constant(False))
        # A process whose data have ended must not leave the others waiting in the middle of a step.
        return OptionalBatch(exists_everywhere, batch.get_value)

    def part(self, state: Any, batch: Any, index: int, division: Division) -> tuple[Any, Any]:
        return self.batches.part(state, batch, index, division)

    def lengths_of_parts(self, state: Any, batch: Any, division: Division) -> list[Any]:
        # Processes whose batches wrongly differ in length must not leave each other waiting in a step.
        lengths = [tf.cast(length, tf.int32) for length in self.batches.lengths_of_parts(state, batch, division)]
        of_all = self.numbers_of_all(tf.reduce_sum(tf.maximum(lengths, 0)))
        equal = tf.reduce_all(tf.equal(of_all, of_all[:1]))
        return [tf.where(equal, length, batch_parts.DIFFERENT) for length in lengths]


@dataclass(frozen=True)
class LocalBatches(Batches):
    """`batches` of this process alone, which its own replicas share."""

    batches: Batches
    rank: int
    world_size: int
    local: ClassVar[bool] = True

    @property
    def length_known(self) -> bool:  # type: ignore[override]
        return self.batches.length_known

    def fetch(self, state: Any, step: tf.Tensor) -> Any:
        return self.batches.fetch(state, step)

    def part(self, state: Any, batch: Any, index: int, division: Division) -> tuple[Any, Any]:
        return _part_of_replica(self, state, batch, index, division)

    def local_examples(self, state: Any, batch: Any, division: Division) -> Any:
        return self.batches.part(state, batch, 0, WHOLE)[0]


@dataclass(frozen=True)
class JoinedBatches(Batches):
    """Global batches that consist of the `batches` of all processes, in the order of their ranks.

    A batch is fetched as this process's own batch, and the number of examples of each process: int32 `[world_size]`.
    The batch of a process whose data have ended has no examples.
    """

    batches: Batches
    rank: int
    world_size: int
    length_known: bool
    numbers_of_all: NumbersOfAll
    in_parts: ClassVar[bool] = True

    def fetch(self, state: Any, step: tf.Tensor) -> Any:
        batch = self.batches.fetch(state, step)
        if not self.batches.length_known:
            batch = _value_or_no_examples(batch)
        examples = next(batch_parts.length(tensor) for tensor in tree.flatten(batch) if tensor is not None)
        sizes = self.numbers_of_all(tf.cast(examples, tf.int32))
        if self.length_known:
            return batch, sizes
        return OptionalBatch(tf.reduce_sum(sizes) > 0, lambda: (batch, sizes))

    def part(self, state: Any, batch: Any, index: int, division: Division) -> tuple[Any, Any]:
        local, sizes = batch
        data, share = _part_of_replica(self, state, local, index, division)
        share_of_process = tf.cast(sizes[self.rank], tf.float64) / tf.cast(tf.reduce_sum(sizes), tf.float64)
        return tree.map_structure(batch_parts.at_least_one, data), share * share_of_process

    def lengths_of_parts(self, state: Any, batch: Any, division: Division) -> list[Any]:
        of_process = Division(division.count // self.world_size)
        sizes = tf.unstack(batch[1], num=self.world_size)
        return [length for size in sizes for length in batch_parts.rows(size, of_process)]

    def local_examples(self, state: Any, batch: Any, division: Division) -> Any:
        return self.batches.part(state, batch[0], 0, WHOLE)[0]


def _part_of_replica(
    batches: LocalBatches | JoinedBatches, state: Any, batch: Any, index: int, division: Division
) -> tuple[Any, Any]:
    """The part of replica `index` of the job in a batch that only the replicas of this process share."""
    replicas = division.count // batches.world_size
    return batches.batches.part(state, batch, index - batches.rank * replicas, Division(replicas))


def _value_or_no_examples(optional: Any) -> Any:
    structure = keras_data.without_optionals(optional.element_spec)
    specs = [spec for spec in tree.flatten(structure) if spec is not None]

    def value() -> list[Any]:
        batch = tree.map_structure(batch_parts.none_if_empty, optional.get_value())
        return [tensor for tensor in tree.flatten(batch) if tensor is not None]

    tensors = iter(tf.cond(optional.has_value(), value, lambda: [_no_examples(spec) for spec in specs]))
    return tree.map_structure(lambda spec: None if spec is None else next(tensors), structure)


def _no_examples(spec: Any) -> Any:
    shape = [0, *[size or 1 for size in spec.shape[1:]]]
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensor(tf.zeros([0, len(shape)], tf.int64), tf.zeros([0], spec.dtype), shape)
    if isinstance(spec, tf.RaggedTensorSpec):
        values = tf.zeros([0, *shape[spec.ragged_rank + 1 :]], spec.dtype)
        splits = [tf.zeros([1], spec.row_splits_dtype)] * spec.ragged_rank
        return tf.RaggedTensor.from_nested_row_splits(values, splits)
    return tf.zeros(shape, spec.dtype)
