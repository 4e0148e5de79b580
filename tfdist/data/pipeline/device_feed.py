"""Arrays for replicas on devices with memory of their own: what a replica uses goes to its device, once.

    arrays up to `device_data_bytes`   each device holds a copy, out of which its replica gathers the examples of a step
    larger arrays                      the host gathers the part of each replica, and copies it to the device while the
                                       step before computes

The parts are those of `ArrayFeed`, bit by bit. Arrays of strings, sparse and ragged ones stay on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfdist.data.pipeline import batch_parts, order
from tfdist.data.pipeline.array_feed import ArrayBatches, ArrayFeed
from tfdist.data.pipeline.feed import Batches, Feed, WrappedFeed
from tfdist.internals import keras_data, tensorflow_data
from tfdist.internals.keras import tree

if TYPE_CHECKING:
    from tfdist.strategies.base import Strategy

# The bound for a GPU if the user states none: a small part of its memory, and more than CIFAR-10 as uint8 or MNIST.
GPU_BYTES = 256 << 20


def placed(feed: Feed, strategy: Strategy) -> Feed:
    """`feed` for the devices of `strategy`; other feeds than of arrays stay as they are: the host cuts their parts."""
    budget_bytes = strategy.device_data_bytes
    if budget_bytes is None:
        if all(device.startswith("CPU") for device in strategy.replica_devices):
            return feed  # they share the memory of the host
        budget_bytes = GPU_BYTES
    if not isinstance(feed, ArrayFeed) or not is_dense(feed.arrays):
        return feed
    if size_bytes(feed.arrays) <= budget_bytes:
        return ResidentFeed(feed, strategy.replica_devices)
    return PrefetchedFeed(feed, strategy.replica_devices, strategy.world.rank, strategy.num_replicas)


class PlacedFeed(WrappedFeed):
    """A feed of arrays that has a state of its own; any of its batches can be begun with."""

    def resume(self, saved: bytes, epoch: int, first_batch: int) -> Any:
        del saved
        return self.start(epoch, first_batch)


class ResidentFeed(PlacedFeed):
    """Arrays of which each device holds a copy."""

    def __init__(self, feed: ArrayFeed, devices: Sequence[str]):
        super().__init__(feed)
        copies = {device: _copied(feed.arrays, device) for device in dict.fromkeys(devices)}
        self._copies = tuple(copies[device] for device in devices)
        dtypes = tuple(None if array is None else array.dtype for array in tree.flatten(feed.arrays))
        self.batches = ResidentBatches(feed.batches, dtypes)

    def start(self, epoch: int, first_batch: int) -> Any:
        _, positions = self._feed.start(epoch, first_batch)
        return self._copies, positions


@dataclass(frozen=True)
class ResidentBatches(Batches):
    """A batch is fetched as the indices of its examples; each replica gathers its part from the copy on its device.

    Attributes:
        whole: of the arrays on the host.
        dtypes: of the arrays, flat; `None` for one that is left out.
    """

    whole: ArrayBatches
    dtypes: tuple[tf.DType | None, ...]
    length_known: bool = True

    def of_any_length(self) -> ResidentBatches:
        return replace(self, whole=self.whole.of_any_length())

    def fetch(self, state: Any, step: tf.Tensor) -> Any:
        return self.whole.fetch(state, step)

    def part(self, state: Any, batch: Any, index: int, count: int) -> tuple[Any, Any]:
        copies, _ = state
        with tf.device("CPU:0"):
            positions, share = self.whole.positions(batch, index, count)
        data, dtypes = keras_data.gather(copies[index % len(copies)], positions[0]), iter(self.dtypes)
        data = tree.map_structure(lambda one: _opened(one, next(dtypes)), data)
        return self.whole.transformed(data, positions), share


class PrefetchedFeed(PlacedFeed):
    """Arrays on the host, of which each device receives the parts of its replica ahead of their use."""

    def __init__(self, feed: ArrayFeed, devices: Sequence[str], rank: int, num_replicas: int):
        super().__init__(feed)
        self._devices = list(devices)
        self._first_replica = rank * len(self._devices)
        self._num_replicas = num_replicas
        self.batches = PrefetchedBatches(feed.batch_size, feed.examples, len(self._devices))
        self._parts = self._make_parts(feed)

    def start(self, epoch: int, first_batch: int) -> Any:
        _, positions = self._feed.start(epoch, first_batch)
        with tf.init_scope(), tf.device("CPU:0"):
            parts = self._parts(tf.constant(first_batch, tf.int64), *positions)
        return tensorflow_data.device_iterator(parts, self._devices)

    def _make_parts(self, feed: ArrayFeed) -> Callable[..., tf.data.Dataset]:
        """A graph, kept for all passes, of the parts of a pass: those of one batch follow each other."""
        count, local = self._num_replicas, len(self._devices)

        @tf.function(autograph=False)
        def dataset(first_batch: tf.Tensor, *positions: tf.Tensor) -> tf.data.Dataset:
            @tf.autograph.experimental.do_not_convert
            def part(number: tf.Tensor) -> Any:
                step, replica = tf.cast(number // local, tf.int32), tf.cast(number % local, tf.int32)
                batch = feed.batches.fetch((feed.arrays, positions), step)
                examples = tf.convert_to_tensor(batch_parts.length(batch[0]))
                begin, end, _ = batch_parts.bounds(examples, self._first_replica + replica, count)
                data = feed.batches.gathered(feed.arrays, [of_each[begin:end] for of_each in batch])
                return tree.map_structure(self._of_known_length, data)

            numbers = tf.data.Dataset.range(first_batch * local, feed.num_batches * local)
            options = tf.data.Options()
            # To rewrite a pipeline, TensorFlow copies the arrays at each start.
            options.experimental_optimization.apply_default_optimizations = False
            return numbers.map(part, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True).with_options(options)

        return dataset

    def _of_known_length(self, tensor: Any) -> Any:
        """`tensor` with a static length where all parts have the same."""
        even = self._feed.batches.even and self.batch_size % self._num_replicas == 0
        length = self.batch_size // self._num_replicas if even else None
        return tf.ensure_shape(tensor, [length, *tensor.shape[1:]])


@dataclass(frozen=True)
class PrefetchedBatches(Batches):
    """A batch is fetched as the parts of this process' replicas, each on its device."""

    batch_size: int
    examples: int
    local_replicas: int
    length_known: bool = True
    length_is_known: bool = True

    def of_any_length(self) -> PrefetchedBatches:
        return replace(self, length_is_known=False)

    def fetch(self, state: Any, step: tf.Tensor) -> Any:
        with tf.device("CPU:0"):
            return state.get_next(), tf.minimum(self.batch_size, self.examples - step * self.batch_size)

    def part(self, state: Any, batch: Any, index: int, count: int) -> tuple[Any, Any]:
        del state
        parts, size = batch
        data = parts[index % self.local_replicas]
        if not self.length_is_known:
            data = tree.map_structure(batch_parts.of_any_length, data)
        if count == 1:
            return data, 1.0
        if self.examples % self.batch_size == 0:
            begin, end = order.part(self.batch_size, index, count)
            return data, (end - begin) / self.batch_size
        with tf.device("CPU:0"):
            begin, end = order.part(size, index, count)
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
            copies[id(array)] = tf.identity(_closed(array))
        return copies[id(array)]

    with tf.init_scope(), tf.device(device):
        return tree.map_structure(copied, arrays)


def _closed(tensor: tf.Tensor) -> tf.Tensor:
    """`tensor` in a type that stays on a GPU: a graph takes its int32 arguments from the host, at each call."""
    return tf.bitcast(tensor, tf.float32) if tensor.dtype == tf.int32 else tensor


def _opened(tensor: Any, dtype: tf.DType | None) -> Any:
    return tensor if tensor is None or tensor.dtype == dtype else tf.bitcast(tensor, dtype)
