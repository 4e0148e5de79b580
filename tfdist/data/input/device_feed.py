"""Data for replicas on devices with memory of their own: what a replica uses goes to its device, once.

    arrays up to `device_data_bytes`   each device holds a copy, out of which its replica gathers the examples of a step
    larger arrays                      the host gathers the part of each replica, and copies it to the device while the
                                       step before computes
    files, readers by number           the same, of what this process has read

Examples of a dataset travel, and are held, in the type of their file; the device casts them. The parts are those of
`ArrayFeed`, bit by bit. Arrays of strings, sparse and ragged ones stay on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import tensorflow as tf

from tfdist.data.input import batch_parts
from tfdist.data.input.array_feed import ArrayBatches, ArrayFeed
from tfdist.data.input.division import Division
from tfdist.data.input.feed import Batches, Feed, WrappedFeed
from tfdist.data.input.file_feed import FileFeed
from tfdist.internals import keras_data, tensorflow_data
from tfdist.internals.keras import tree

# The bound for a GPU if the user states none: a small part of its memory, and more than CIFAR-10 as uint8 or MNIST.
GPU_BYTES = 256 << 20


def placed(feed: Feed, devices: Sequence[str], rank: int, division: Division, budget_bytes: int | None) -> Feed:
    """`feed` for the replicas on `devices` of the process `rank`, among which `division` divides batches.

    Batches that the user's own dataset makes stay as they are: a checkpoint holds the place of its iterator, which must
    not be ahead of the steps. The host cuts their parts, and copies those of a step while steps before it compute.
    """
    if budget_bytes is None:
        if all(device.startswith("CPU") for device in devices):
            return feed  # they share the memory of the host
        budget_bytes = GPU_BYTES
    if isinstance(feed, FileFeed):
        return PrefetchedFiles(feed, devices, rank, division)
    if not isinstance(feed, ArrayFeed) or not is_dense(feed.arrays):
        return feed
    if size_bytes(feed.arrays) <= budget_bytes:
        return ResidentFeed(feed, devices)
    return PrefetchedFeed(feed, devices, rank, division)


class PlacedFeed(WrappedFeed):
    """A feed that has a state of its own; any of its batches can be begun with."""

    def resume(self, saved: bytes, epoch: int, first_batch: int) -> Any:
        del saved
        return self.start(epoch, first_batch)


class ResidentFeed(PlacedFeed):
    """Arrays of which each device holds a copy."""

    def __init__(self, feed: ArrayFeed, devices: Sequence[str]):
        super().__init__(feed)
        copies = {device: _copied(feed.arrays, device) for device in dict.fromkeys(devices)}
        self._copies = tuple(copies[device] for device in devices)
        specs = tuple(None if array is None else _spec(array) for array in tree.flatten(feed.arrays))
        self.batches = ResidentBatches(feed.batches, specs)

    def start(self, epoch: int, first_batch: int) -> Any:
        _, positions = self._feed.start(epoch, first_batch)
        return self._copies, positions


@dataclass(frozen=True)
class ResidentBatches(Batches):
    """A batch is fetched as the indices of its examples; each replica gathers its part from the copy on its device.

    Attributes:
        whole: of the arrays on the host.
        specs: of the arrays, flat; `None` for one that is left out.
    """

    at_any_time: ClassVar[bool] = True
    whole: ArrayBatches
    specs: tuple[tf.TensorSpec | None, ...]
    length_known: bool = True

    @property
    def size(self) -> int | None:
        return self.whole.size

    def fetch(self, state: Any, step: tf.Tensor) -> Any:
        return self.whole.fetch(state, step)

    def part(self, state: Any, batch: Any, index: int, division: Division) -> tuple[Any, Any]:
        copies, _ = state
        with tf.device("CPU:0"):
            positions, share = self.whole.positions(batch, index, division)
        data, specs = keras_data.gather(copies[index % len(copies)], positions[0]), iter(self.specs)
        data = tree.map_structure(lambda one: _unpacked(one, next(specs)), data)
        return self.whole.transformed(data, positions), share


class PrefetchedFeed(PlacedFeed):
    """Arrays on the host, of which each device receives the parts of its replica ahead of their use."""

    def __init__(self, feed: ArrayFeed, devices: Sequence[str], rank: int, division: Division):
        super().__init__(feed)
        self._devices = list(devices)
        self._first_replica = rank * len(self._devices)
        self._division = division
        self.batches = PrefetchedBatches(feed.batches, feed.examples, len(self._devices), self._first_replica)
        self._parts = self._make_parts(feed)

    def start(self, epoch: int, first_batch: int) -> Any:
        _, positions = self._feed.start(epoch, first_batch)
        with tf.init_scope(), tf.device("CPU:0"):
            parts = self._parts(tf.constant(first_batch, tf.int64), *positions)
        return tensorflow_data.device_iterator(parts, self._devices)

    def _make_parts(self, feed: ArrayFeed) -> Callable[..., tf.data.Dataset]:
        """A graph, kept for all passes, of the parts of a pass: those of one batch follow each other."""
        division, local = self._division, len(self._devices)

        @tf.function(autograph=False)
        def dataset(first_batch: tf.Tensor, *positions: tf.Tensor) -> tf.data.Dataset:
            @tf.autograph.experimental.do_not_convert
            def part(number: tf.Tensor) -> Any:
                step, replica = tf.cast(number // local, tf.int32), tf.cast(number % local, tf.int32)
                batch = feed.batches.fetch((feed.arrays, positions), step)
                examples = tf.convert_to_tensor(batch_parts.length(batch[0]))
                begin, end, _ = batch_parts.bounds(examples, self._first_replica + replica, division)
                indices, *extras = (of_each[begin:end] for of_each in batch)
                data = keras_data.gather(feed.arrays, indices)
                return tree.map_structure(self._of_known_length, (data, tuple(extras)))

            numbers = tf.data.Dataset.range(first_batch * local, feed.num_batches * local)
            options = tf.data.Options()
            # To rewrite a pipeline, TensorFlow copies the arrays at each start.
            options.experimental_optimization.apply_default_optimizations = False
            return numbers.map(part, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True).with_options(options)

        return dataset

    def _of_known_length(self, tensor: Any) -> Any:
        """`tensor` with a static length where all parts have the same."""
        length = self._division.even_length(self.batch_size) if self._feed.batches.even else None
        return tf.ensure_shape(tensor, [length, *tensor.shape[1:]])


class PrefetchedFiles(PlacedFeed):
    """Batches that this process reads, of which each device receives the parts of its replica ahead of their use."""

    def __init__(self, feed: FileFeed, devices: Sequence[str], rank: int, division: Division):
        super().__init__(feed)
        self._files = feed
        self._devices = list(devices)
        self._replicas = range(rank * len(self._devices), (rank + 1) * len(self._devices))
        self._division = division
        whole = ArrayBatches(feed.batch_size, feed.examples % feed.batch_size == 0)
        self.batches = PrefetchedBatches(whole, feed.examples, len(self._devices), self._replicas.start)

    def start(self, epoch: int, first_batch: int) -> Any:
        self._files.begin(epoch)
        parts = self._files.parts(epoch, first_batch, self._replicas, self._division)
        return tensorflow_data.device_iterator(parts.map(lambda *data: (data, ())), self._devices)


@dataclass(frozen=True)
class PrefetchedBatches(Batches):
    """A batch is fetched as the parts of this process' replicas, each on its device, and what is known of examples.

    Attributes:
        whole: how the device transforms what it has received.
        examples: in a pass.
        local_replicas: replicas of this process.
        first_replica: the number of the first of them in the job.
    """

    whole: ArrayBatches
    examples: int
    local_replicas: int
    first_replica: int = 0
    in_parts: ClassVar[bool] = True
    length_known: bool = True

    @property
    def size(self) -> int | None:
        return self.whole.size

    def lengths_of_step(self, step: Any, division: Division) -> list[Any]:
        return batch_parts.rows(self.whole.size or self._examples_of(step), division)

    def lengths_of_parts(self, state: Any, batch: Any, division: Division) -> list[Any]:
        del state
        return batch_parts.rows(self.whole.size or batch[1], division)

    def mine(self, state: Any, batch: Any, division: Division) -> Any:
        first, lengths = self.first_replica, self.lengths_of_parts(state, batch, division)
        rows = []
        for index in range(first, first + self.local_replicas):
            part, _ = self.part(state, batch, index, division)
            rows.append([None if one is None else one[: lengths[index]] for one in tree.flatten(part)])
        joined = [None if of_all[0] is None else tf.concat(of_all, 0) for of_all in zip(*rows, strict=True)]
        return tree.pack_sequence_as(part, joined)

    def fetch(self, state: Any, step: tf.Tensor) -> Any:
        with tf.device("CPU:0"):
            return state.get_next(), self._examples_of(step)

    def _examples_of(self, step: Any) -> tf.Tensor:
        size = self.whole.batch_size
        return tf.minimum(size, self.examples - step * size)

    def part(self, state: Any, batch: Any, index: int, division: Division) -> tuple[Any, Any]:
        del state
        parts, size = batch
        held, extras = parts[index % self.local_replicas]
        data = self.whole.transformed(held, (None, *extras))
        if division.count == 1:
            return data, 1.0
        if self.whole.even:
            begin, end = division.part(self.whole.batch_size, index)
            return data, (end - begin) / self.whole.batch_size
        with tf.device("CPU:0"):
            begin, end = division.part(size, index)
            return data, (end - begin) / size


def is_dense(arrays: Any) -> bool:
    """Whether all arrays of a structure are dense, and of numbers."""
    flat = [array for array in tree.flatten(arrays) if array is not None]
    return all(isinstance(array, tf.Tensor) and array.dtype != tf.string for array in flat)


def size_bytes(arrays: Any) -> int:
    """The size of the arrays of a structure, of which one may occur twice."""
    tensors = {id(array): array for array in tree.flatten(arrays) if array is not None}.values()
    return sum(array.shape.num_elements() * array.dtype.size for array in tensors)


def _copied(arrays: Any, device: str) -> Any:
    """A copy of `arrays` on `device`; an array that occurs twice, as in autoencoding, is copied once."""
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


# Types of which a GPU can gather examples. A graph takes its int32 arguments from the host, at each call.
_GATHERED = (tf.bool, tf.bfloat16, tf.float16, tf.float32, tf.float64, tf.int64, tf.complex64, tf.complex128)


def _spec(array: tf.Tensor) -> tf.TensorSpec:
    return tf.TensorSpec(array.shape, array.dtype)


def _packed(array: tf.Tensor) -> tf.Tensor:
    """`array` in a type that stays on a GPU: the bytes of each example as float32 `[N, words]`, filled up with 0."""
    if array.dtype in _GATHERED:
        return array
    rows = tf.reshape(tf.bitcast(array, tf.uint8), [array.shape[0], -1])
    missing = -rows.shape[1] % tf.float32.size
    if missing:
        rows = tf.pad(rows, [[0, 0], [0, missing]])
    return tf.bitcast(tf.reshape(rows, [array.shape[0], -1, tf.float32.size]), tf.float32)


def _unpacked(rows: Any, spec: tf.TensorSpec | None) -> Any:
    """Some examples of an array of that `spec`, of which `rows` are packed."""
    if spec is None or spec.dtype in _GATHERED:
        return rows
    shape, examples = spec.shape[1:].as_list(), batch_parts.length(rows)
    size = spec.dtype.size
    used = tf.reshape(tf.bitcast(rows, tf.uint8), [examples, -1])[:, : math.prod(shape) * size]
    if size > 1:
        shape = [*shape, size]
    return tf.bitcast(tf.reshape(used, [examples, *shape]), spec.dtype)
