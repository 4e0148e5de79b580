"""Arrays as global batches: they stay whole in memory, and each pass gathers their examples in its own order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from tfdist.data.input import batch_parts, order
from tfdist.data.input.arrays import ToModelTypes
from tfdist.data.input.division import Division
from tfdist.data.input.feed import Batches, Feed, graph_function
from tfdist.internals import keras_data
from tfdist.internals.keras import tree


def tensors(x: Any, y: Any) -> Any:
    """x and y as `ArrayFeed` takes them, on the host."""
    with tf.init_scope(), tf.device("CPU:0"):
        if x is y:
            x = y = tf.convert_to_tensor(x)
        return keras_data.sliceable(keras_data.get_data_adapter(x=x, y=y))


def tensors_and_views(arrays: tuple[Any, Any]) -> tuple[Any, tuple[Any, Any]]:
    """The tensors of x and y as `ArrayFeed` takes them, and x and y as arrays that share the memory of the tensors."""
    converted = tensors(*arrays)

    def view(tensor: tf.Tensor, array: np.ndarray) -> np.ndarray:
        return np.asarray(tensor) if tensor.dtype == array.dtype else array

    x = tree.map_structure(view, converted[0], arrays[0])
    return converted, (x, x if arrays[0] is arrays[1] else view(converted[1], arrays[1]))


class ArrayFeed(Feed):
    """Examples in memory, in an order that may differ in each pass, and that is one tensor.

    For an order that is too long for one tensor see `tfdist.data.input.file_feed.LargeExamples`.

    Args:
        arrays: a structure of tensors on the host, as `keras_data.sliceable` returns it; also an attribute.
        batch_size: the number of examples in a full global batch.
        order_of: the order of each pass; all passes have the same number of examples.
        transform: turns the gathered examples into those that a model sees; `None` leaves them as they are.
    """

    def __init__(self, arrays: Any, batch_size: int, order_of: order.OrderOf, transform: ToModelTypes | None = None):
        self.arrays = arrays
        self._order_of = order_of
        self._transform = transform
        self._dataset_of_part = functools.cache(self._make_dataset_of_part)
        self._dataset_of_parts = functools.cache(self._make_dataset_of_parts)
        self.examples = len(order_of(0))
        self.batch_size = batch_size
        self.num_batches = -(-self.examples // batch_size)
        stored_spec = keras_data.batch_spec(arrays)
        self.spec = stored_spec if transform is None else transform.specs(stored_spec)
        self.batches = ArrayBatches(batch_size, self.examples % batch_size == 0, transform)

    def start(self, epoch: int, first_batch: int) -> Any:
        # Any batch can be fetched at any time, so that `first_batch` does not matter.
        indices = self._order_of(epoch)[:]
        extras = () if self._transform is None else self._transform.extras(epoch, indices)
        with tf.device("CPU:0"):
            return self.arrays, tuple(tf.constant(column) for column in (indices, *extras))

    def dataset(
        self, index: int, division: Division, epoch: int, first_batch: int, deterministic: bool = True
    ) -> tf.data.Dataset:
        """Part `index` of each batch of a pass, from batch `first_batch` on, as a model sees it; it may be empty."""
        with tf.init_scope(), tf.device("CPU:0"):
            _, positions = self.start(epoch, first_batch)
            dataset = self._dataset_of_part(index, division, deterministic)
            return dataset(tf.constant(first_batch, tf.int64), *positions)

    def parts(self, epoch: int, first_batch: int, replicas: range, division: Division) -> tf.data.Dataset:
        """The parts of these `replicas`, batch by batch, from batch `first_batch` of a pass on.

        Returns:
            A dataset of the examples in the types in which they are stored, and a tuple of the transform's extras. An
            empty part contains an example of another part.
        """
        with tf.init_scope(), tf.device("CPU:0"):
            _, positions = self.start(epoch, first_batch)
            return self._dataset_of_parts(replicas, division)(tf.constant(first_batch, tf.int64), *positions)

    def _make_dataset_of_part(
        self, index: int, division: Division, deterministic: bool
    ) -> Callable[..., tf.data.Dataset]:
        def dataset(first_batch: tf.Tensor, *positions: tf.Tensor) -> tf.data.Dataset:
            @tf.autograph.experimental.do_not_convert
            def gather(step: tf.Tensor) -> Any:
                state = self.arrays, positions
                return self.batches.examples(state, self.batches.fetch(state, step), index, division)

            steps = tf.data.Dataset.range(first_batch, self.num_batches, output_type=tf.int32)
            batches = steps.map(gather, num_parallel_calls=tf.data.AUTOTUNE, deterministic=deterministic)
            return batches.prefetch(tf.data.AUTOTUNE)

        return graph_function(dataset)

    def _make_dataset_of_parts(self, replicas: range, division: Division) -> Callable[..., tf.data.Dataset]:
        local = len(replicas)
        length = division.even_length(self.batch_size) if self.batches.even else None

        def with_length(tensor: Any) -> Any:
            return tf.ensure_shape(tensor, [length, *tensor.shape[1:]])

        def dataset(first_batch: tf.Tensor, *positions: tf.Tensor) -> tf.data.Dataset:
            @tf.autograph.experimental.do_not_convert
            def part(number: tf.Tensor) -> Any:
                step, replica = tf.cast(number // local, tf.int32), tf.cast(number % local, tf.int32)
                batch = self.batches.fetch((self.arrays, positions), step)
                examples = tf.convert_to_tensor(batch_parts.length(batch[0]))
                begin, end, _ = batch_parts.bounds(examples, replicas.start + replica, division)
                indices, *extras = (column[begin:end] for column in batch)
                data = keras_data.gather(self.arrays, indices)
                return tree.map_structure(with_length, (data, tuple(extras)))

            numbers = tf.data.Dataset.range(first_batch * local, self.num_batches * local)
            options = tf.data.Options()
            # To rewrite a pipeline, TensorFlow copies the arrays at each start.
            options.experimental_optimization.apply_default_optimizations = False
            return numbers.map(part, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True).with_options(options)

        return graph_function(dataset)


def repeated(feed: Feed) -> ArrayFeed:
    """A feed of the same length as `feed` that reads nothing: every batch has the examples of the first batch."""
    (batch,) = feed.first(1)
    examples = feed.examples
    repeating = ArrayFeed(tensors(*batch), feed.batch_size, lambda epoch: order.as_stored(examples))
    repeating.batches = RepeatedBatches(feed.batch_size, repeating.batches.even, rows=len(batch[1]))
    return repeating


@dataclass(frozen=True)
class ArrayBatches(Batches):
    """A batch is fetched as positions: the indices of its examples, and the transform's extras for each of them.

    The host gathers the examples of each part, so that a replica's device receives its examples and not the arrays.

    Attributes:
        batch_size: the number of examples in a full batch.
        even: whether all batches are full; a static shape makes a faster graph.
        transform: see `ArrayFeed`.
    """

    at_any_time: ClassVar[bool] = True
    batch_size: int
    even: bool
    transform: ToModelTypes | None = None
    length_known: bool = True

    def fetch(self, state: Any, step: tf.Tensor) -> tuple[tf.Tensor, ...]:
        _, positions = state
        with tf.device("CPU:0"):
            return tuple(self._rows(column, step) for column in positions)

    def _rows(self, column: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        if not self.even:
            # With `per_process`, a process also runs steps after the end of its own arrays, and int32 must not wrap.
            begin = tf.minimum(step, tf.shape(column)[0] // self.batch_size + 1) * self.batch_size
            return column[begin : begin + self.batch_size]
        begin, other_axes = step * self.batch_size, column.shape[1:]
        return tf.slice(column, [begin, *[0] * len(other_axes)], [self.batch_size, *other_axes])

    def part(self, state: Any, batch: tuple[tf.Tensor, ...], index: int, division: Division) -> tuple[Any, Any]:
        with tf.device("CPU:0"):
            positions, share = self.positions(batch, index, division)
            return self.gathered(state[0], positions), share

    @property
    def size(self) -> int | None:
        return self.batch_size if self.even else None

    def lengths_of_parts(self, state: Any, batch: tuple[tf.Tensor, ...], division: Division) -> list[Any]:
        return batch_parts.rows(self._length(batch), division)

    def positions(
        self, batch: tuple[tf.Tensor, ...], index: Any, division: Division
    ) -> tuple[tuple[tf.Tensor, ...], Any]:
        """The positions of part `index` of a fetched batch, and the share of the part."""
        begin, end, share = batch_parts.bounds(self._length(batch), index, division)
        return (tuple(column[begin:end] for column in batch) if division.count > 1 else batch), share

    def examples(self, state: Any, batch: tuple[tf.Tensor, ...], index: int, division: Division) -> Any:
        """The examples of part `index` of a global batch, of which there may be none."""
        begin, end = division.part(batch_parts.length(batch[0]), index)
        return self.gathered(state[0], [column[begin:end] for column in batch])

    def gathered(self, arrays: Any, positions: Sequence[tf.Tensor]) -> Any:
        """The examples of `arrays` at these `positions`, as a model sees them."""
        return self.transformed(keras_data.gather(arrays, positions[0]), positions)

    def transformed(self, data: Any, positions: Sequence[tf.Tensor]) -> Any:
        """The gathered examples `data`, which are at these `positions`, as a model sees them."""
        return data if self.transform is None else self.transform(data, *positions[1:])

    def _length(self, batch: tuple[tf.Tensor, ...]) -> Any:
        return self.batch_size if self.even else batch_parts.length(batch[0])


@dataclass(frozen=True)
class RepeatedBatches(ArrayBatches):
    """`ArrayBatches` of arrays with only `rows` examples, which repeat.

    The state still has the numbers of all examples, since `mpi_split` divides those among the processes.
    """

    rows: int = field(kw_only=True)

    def fetch(self, state: Any, step: tf.Tensor) -> tuple[tf.Tensor, ...]:
        numbers, *extras = super().fetch(state, step)
        return (numbers % self.rows, *extras)

    def gathered(self, arrays: Any, positions: Sequence[tf.Tensor]) -> Any:
        # `mpi_split` does not call `fetch`.
        return super().gathered(arrays, [positions[0] % self.rows, *positions[1:]])
