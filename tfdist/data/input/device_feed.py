"""Moves data to devices that have their own memory, such as GPUs.

    arrays up to `device_data_bytes`   each device has a copy, from which its replica gathers the examples of a step
    larger arrays                      the host gathers the part of each replica, and copies it to the device during
                                       earlier steps
    files, readers by number           the same with what this process has read

Examples of a dataset are sent and stored in the type of their file; the device casts them. The parts are bitwise equal
to those of `ArrayFeed`. Arrays of strings and sparse and ragged arrays stay on the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import tensorflow as tf

from tfdist.data.input import batch_parts
from tfdist.data.input.array_feed import ArrayBatches, ArrayFeed
from tfdist.data.input.division import Division
from tfdist.data.input.feed import Batches, Feed, WrappedFeed
from tfdist.data.input.file_feed import FileFeed
from tfdist.internals import keras_data
from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.internals.keras import tree

# The default of `device_data_bytes` for a GPU: a small part of its memory, but enough for CIFAR-10 as uint8.
GPU_BYTES = 256 << 20


def placed(feed: Feed, devices: Sequence[str], rank: int, division: Division, budget_bytes: int | None) -> Feed:
    """Returns `feed` in the form in which the replicas of this process read it.

    A `DatasetFeed` is returned unchanged: a checkpoint contains the position of its iterator, which must not be ahead
    of the steps. The host cuts its batches, and copies the parts of a step to the devices during earlier steps.

    Args:
        feed: the feed on the host.
        devices: the devices of this process's replicas.
        rank: the rank of this process.
        division: how a batch is divided among the replicas of the job.
        budget_bytes: larger arrays are not copied to the devices as a whole; `None` is `GPU_BYTES` for GPUs, and leaves
            data for CPUs on the host.
    """
    if budget_bytes is None:
        if all(device.startswith("CPU") for device in devices):
            return feed  # they share the memory of the host
        budget_bytes = GPU_BYTES
    if isinstance(feed, FileFeed):
        has_strings = any(spec.dtype == tf.string for spec in tree.flatten(feed.spec))
        return feed if has_strings else PrefetchedFeed(feed, devices, rank, division)
    if not isinstance(feed, ArrayFeed) or not is_dense(feed.arrays):
        return feed
    if size_bytes(feed.arrays) <= budget_bytes:
        return ResidentFeed(feed, devices)
    return PrefetchedFeed(feed, devices, rank, division)


class ResidentFeed(WrappedFeed):
    """An `ArrayFeed` of which each device has a copy of the arrays."""

    resume = Feed.resume

    def __init__(self, feed: ArrayFeed, devices: Sequence[str]):
        super().__init__(feed)
        copies = {device: _copied(feed.arrays, device) for device in dict.fromkeys(devices)}
        self._copies = tuple(copies[device] for device in devices)
        specs = tuple(
            None if array is None else tf.TensorSpec(array.shape, array.dtype) for array in tree.flatten(feed.arrays)
        )
        self.batches = ResidentBatches(feed.batches, specs)

    def start(self, epoch: int, first_batch: int) -> Any:
        _, positions = self._feed.start(epoch, first_batch)
        return self._copies, positions


@dataclass(frozen=True)
class ResidentBatches(Batches):
    """`ArrayBatches` of which each replica gathers its part from the copy on its device.

    Attributes:
        on_host: the batches of the arrays on the host.
        specs: the specs of the arrays, flat; `None` for an absent array.
    """

    at_any_time: ClassVar[bool] = True
    on_host: ArrayBatches
    specs: tuple[tf.TensorSpec | None, ...]
    length_known: bool = True

    @property
    def size(self) -> int | None:
        return self.on_host.size

    def fetch(self, state: Any, step: tf.Tensor) -> Any:
        return self.on_host.fetch(state, step)

    def part(self, state: Any, batch: Any, index: int, division: Division) -> tuple[Any, Any]:
        copies, _ = state
        with tf.device("CPU:0"):
            positions, share = self.on_host.positions(batch, index, division)
        data, specs = keras_data.gather(copies[index % len(copies)], positions[0]), iter(self.specs)
        data = tree.map_structure(lambda array: _unpacked(array, next(specs)), data)
        return self.on_host.transformed(data, positions), share


class PrefetchedFeed(WrappedFeed):
    """A feed on the host from which each device receives the parts of its replica before they are used.

    Args:
        feed: an `ArrayFeed` or a `FileFeed`; its `parts` are what the devices receive.
        devices: the devices of this process's replicas.
        rank: the rank of this process.
        division: how a batch is divided among the replicas of the job.
    """

    resume = Feed.resume

    def __init__(self, feed: ArrayFeed | FileFeed, devices: Sequence[str], rank: int, division: Division):
        super().__init__(feed)
        self._parts = feed.parts
        self._devices = list(devices)
        self._replicas = range(rank * len(devices), (rank + 1) * len(devices))
        self._division = division
        if isinstance(feed, ArrayFeed):
            on_host = feed.batches
        else:  # `FileFeed` transforms the examples itself
            on_host = ArrayBatches(feed.batch_size, feed.examples % feed.batch_size == 0)
        self.batches = PrefetchedBatches(on_host, feed.examples, len(devices), self._replicas.start)

    def start(self, epoch: int, first_batch: int) -> Any:
        parts = self._parts(epoch, first_batch, self._replicas, self._division)
        return tensorflow_internals.device_iterator(parts, self._devices)


@dataclass(frozen=True)
class PrefetchedBatches(Batches):
    """A batch is fetched as the parts of this process's replicas, each on its device, and the size of the batch.

    Attributes:
        on_host: the batches of the same size on the host, whose transform the devices apply to what they receive.
        examples: the number of examples per pass.
        local_replicas: the number of replicas of this process.
        first_replica: the number of the first of them in the job.
    """

    on_host: ArrayBatches
    examples: int
    local_replicas: int
    first_replica: int = 0
    in_parts: ClassVar[bool] = True
    length_known: bool = True

    @property
    def size(self) -> int | None:
        return self.on_host.size

    def fetch(self, state: Any, step: tf.Tensor) -> Any:
        with tf.device("CPU:0"):
            return state.get_next(), self._size_of_step(step)

    def part(self, state: Any, batch: Any, index: int, division: Division) -> tuple[Any, Any]:
        parts, size = batch
        received, extras = parts[index % self.local_replicas]
        data = self.on_host.transformed(received, (None, *extras))
        with tf.device("CPU:0"):
            _, _, share = batch_parts.bounds(self.on_host.size or size, index, division)
        return data, share

    def lengths_of_step(self, step: Any, division: Division) -> list[Any]:
        return batch_parts.rows(self.on_host.size or self._size_of_step(step), division)

    def lengths_of_parts(self, state: Any, batch: Any, division: Division) -> list[Any]:
        return batch_parts.rows(self.on_host.size or batch[1], division)

    def local_examples(self, state: Any, batch: Any, division: Division) -> Any:
        first, lengths = self.first_replica, self.lengths_of_parts(state, batch, division)
        rows = []
        for index in range(first, first + self.local_replicas):
            part, _ = self.part(state, batch, index, division)
            rows.append([None if tensor is None else tensor[: lengths[index]] for tensor in tree.flatten(part)])
        joined = [None if tensors[0] is None else tf.concat(tensors, 0) for tensors in zip(*rows, strict=True)]
        return tree.pack_sequence_as(part, joined)

    def _size_of_step(self, step: Any) -> tf.Tensor:
        size = self.on_host.batch_size
        return tf.minimum(size, self.examples - step * size)


def is_dense(arrays: Any) -> bool:
    """Whether all arrays of a structure are dense and numeric."""
    flat = [array for array in tree.flatten(arrays) if array is not None]
    return all(isinstance(array, tf.Tensor) and array.dtype != tf.string for array in flat)


def size_bytes(arrays: Any) -> int:
    """The size of the arrays of a structure; an array that occurs twice is counted once."""
    tensors = {id(array): array for array in tree.flatten(arrays) if array is not None}.values()
    return sum(array.shape.num_elements() * array.dtype.size for array in tensors)


def _copied(arrays: Any, device: str) -> Any:
    """A copy of `arrays` on `device`; an array that occurs twice, as for autoencoding, is copied once."""
    copies: dict[int, tf.Tensor] = {}

    def copied(array: Any) -> Any:
        if array is None:
            return None
        if id(array) not in copies:
            with tf.device("CPU:0"):
                packed = _packed(array)
            copies[id(array)] = tf.identity(packed)
        return copies[id(array)]

    with tf.init_scope(), tf.device(device):
        return tree.map_structure(copied, arrays)


# The types that a GPU can gather. int32 is not among them: graphs read int32 arguments from the host at each call.
_GATHERED = (tf.bool, tf.bfloat16, tf.float16, tf.float32, tf.float64, tf.int64, tf.complex64, tf.complex128)


def _packed(array: tf.Tensor) -> tf.Tensor:
    """`array` in a type that stays on a GPU: the bytes of each example as float32 `[N, words]`, padded with zeros."""
    if array.dtype in _GATHERED:
        return array
    rows = tf.reshape(tf.bitcast(array, tf.uint8), [array.shape[0], -1])
    missing = -rows.shape[1] % tf.float32.size
    if missing:
        rows = tf.pad(rows, [[0, 0], [0, missing]])
    return tf.bitcast(tf.reshape(rows, [array.shape[0], -1, tf.float32.size]), tf.float32)


def _unpacked(rows: Any, spec: tf.TensorSpec | None) -> Any:
    """Undoes `_packed` for some examples `rows` of an array with this `spec`."""
    if spec is None or spec.dtype in _GATHERED:
        return rows
    shape, examples = spec.shape[1:].as_list(), batch_parts.length(rows)
    size = spec.dtype.size
    used = tf.reshape(tf.bitcast(rows, tf.uint8), [examples, -1])[:, : math.prod(shape) * size]
    if size > 1:
        shape = [*shape, size]
    return tf.bitcast(tf.reshape(used, [examples, *shape]), spec.dtype)
