"""Arrays, as global batches: they stay whole in memory and are indexed, in another order in each pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from tfdist.data.input import batch_parts, order
from tfdist.data.input.division import Division
from tfdist.data.input.feed import Batches, Feed
from tfdist.data.input.transforms import FromHeld
from tfdist.internals import keras_data
from tfdist.internals.keras import tree

# The order in which pass number `epoch` takes the examples.
OrderOf = Callable[[int], order.Order]


def tensors(x: Any, y: Any) -> Any:
    """x and y as `ArrayFeed` takes them, on the host."""
    with tf.init_scope(), tf.device("CPU:0"):
        if x is y:
            x = y = tf.convert_to_tensor(x)
        return keras_data.sliceable(keras_data.get_data_adapter(x=x, y=y))


def held_once(arrays: tuple[Any, Any]) -> tuple[Any, tuple[Any, Any]]:
    """The tensors of x and y as `ArrayFeed` takes them, and x and y again, in the memory of these tensors."""
    held = tensors(*arrays)

    def of(tensor: tf.Tensor, array: np.ndarray) -> np.ndarray:
        return np.asarray(tensor) if tensor.dtype == array.dtype else array

    x = tree.map_structure(of, held[0], arrays[0])
    return held, (x, x if arrays[0] is arrays[1] else of(held[1], arrays[1]))


class ArrayFeed(Feed):
    """Examples in memory, in an order that each pass may have of its own, and that is a tensor as a whole.

    An order too long for that has `LargeArrayFeed`.

    Args:
        arrays: a structure of tensors on the host, as `keras_data.sliceable` gives it; also an attribute.
        batch_size: examples in a full global batch.
        order_of: the order of each pass; all passes take equally many examples.
        transform: what makes of the examples of a batch what a model sees, if they are not that already.
    """

    def __init__(self, arrays: Any, batch_size: int, order_of: OrderOf, transform: FromHeld | None = None):
        self.arrays = arrays
        self._order_of = order_of
        self._transform = transform
        self._datasets: dict[tuple[int, Division, bool], Callable[..., tf.data.Dataset]] = {}
        self.examples = len(order_of(0))
        self.batch_size = batch_size
        self.num_batches = -(-self.examples // batch_size)
        held = keras_data.batch_spec(arrays)
        self.spec = held if transform is None else transform.specs(held)
        self.batches = ArrayBatches(batch_size, self.examples % batch_size == 0, transform)

    def start(self, epoch: int, first_batch: int) -> Any:
        del first_batch  # any batch can be fetched at any time
        indices = self._order_of(epoch)[:]
        extras = () if self._transform is None else self._transform.extras(epoch, indices)
        with tf.device("CPU:0"):
            return self.arrays, tuple(tf.constant(of_each) for of_each in (indices, *extras))

    def dataset(
        self, index: int, division: Division, epoch: int, first_batch: int, deterministic: bool = True
    ) -> tf.data.Dataset:
        """Part `index` of each batch of a pass, from batch `first_batch` on; one gather per batch."""
        asked = (index, division, deterministic)
        with tf.init_scope(), tf.device("CPU:0"):
            if asked not in self._datasets:
                self._datasets[asked] = self._make_datasets(*asked)
            _, positions = self.start(epoch, first_batch)
            return self._datasets[asked](tf.constant(first_batch, tf.int64), *positions)

    def _make_datasets(self, index: int, division: Division, deterministic: bool) -> Callable[..., tf.data.Dataset]:
        """A graph for all epochs: `dataset(first_batch, *positions)`."""

        @tf.function(autograph=False)
        def dataset(first_batch: tf.Tensor, *positions: tf.Tensor) -> tf.data.Dataset:
            @tf.autograph.experimental.do_not_convert
            def gather(step: tf.Tensor) -> Any:
                state = self.arrays, positions
                return self.batches.examples(state, self.batches.fetch(state, step), index, division)

            steps = tf.data.Dataset.range(first_batch, self.num_batches, output_type=tf.int32)
            batches = steps.map(gather, num_parallel_calls=tf.data.AUTOTUNE, deterministic=deterministic)
            return batches.prefetch(tf.data.AUTOTUNE)

        return dataset


@dataclass(frozen=True)
class ArrayBatches(Batches):
    """A batch is fetched as the indices of its examples, and what is known of each; the host gathers each part.

    So the device of a replica receives the examples of its part, and not the arrays.
    """

    at_any_time: ClassVar[bool] = True
    batch_size: int
    even: bool  # the batches are all of one size: a static shape makes a faster graph
    transform: FromHeld | None = None
    length_known: bool = True

    def fetch(self, state: Any, step: tf.Tensor) -> tuple[tf.Tensor, ...]:
        _, positions = state
        with tf.device("CPU:0"):
            return tuple(self._rows(of_each, step) for of_each in positions)

    def _rows(self, of_each: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        if not self.even:
            # Processes that each bring their own arrays step on after the end of theirs, and int32 must not wrap.
            begin = tf.minimum(step, tf.shape(of_each)[0] // self.batch_size + 1) * self.batch_size
            return of_each[begin : begin + self.batch_size]
        begin, rest = step * self.batch_size, of_each.shape[1:]
        return tf.slice(of_each, [begin, *[0] * len(rest)], [self.batch_size, *rest])

    def part(self, state: Any, batch: tuple[tf.Tensor, ...], index: int, division: Division) -> tuple[Any, Any]:
        with tf.device("CPU:0"):
            positions, share = self.positions(batch, index, division)
            return self.gathered(state[0], positions), share

    @property
    def size(self) -> int | None:
        return self.batch_size if self.even else None

    def lengths_of_parts(self, state: Any, batch: tuple[tf.Tensor, ...], division: Division) -> list[Any]:
        del state
        return batch_parts.rows(self.batch_size if self.even else batch_parts.length(batch[0]), division)

    def positions(
        self, batch: tuple[tf.Tensor, ...], index: Any, division: Division
    ) -> tuple[tuple[tf.Tensor, ...], Any]:
        """What `fetch` gave of the examples of part `index`, and the part's share."""
        begin, end, share = batch_parts.bounds(
            self.batch_size if self.even else batch_parts.length(batch[0]), index, division
        )
        return (tuple(of_each[begin:end] for of_each in batch) if division.count > 1 else batch), share

    def examples(self, state: Any, batch: tuple[tf.Tensor, ...], index: int, division: Division) -> Any:
        """The examples of part `index` of a global batch, of which there may be none."""
        begin, end = division.part(batch_parts.length(batch[0]), index)
        return self.gathered(state[0], [of_each[begin:end] for of_each in batch])

    def gathered(self, arrays: Any, positions: Sequence[tf.Tensor]) -> Any:
        """The examples at the `positions` that `fetch` gave, out of `arrays`."""
        return self.transformed(keras_data.gather(arrays, positions[0]), positions)

    def transformed(self, data: Any, positions: Sequence[tf.Tensor]) -> Any:
        """The examples `data` at these `positions`, as the model gets them."""
        return data if self.transform is None else self.transform(data, *positions[1:])
