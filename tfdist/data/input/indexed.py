"""A source whose examples are read by number, batch by batch, for datasets that do not fit into memory.

    order of the epoch, by range ──> this rank's numbers of a batch ──> the user's reader ──> check ──> augment

Synopsis:

    >>> x = np.arange(12.0).reshape(6, 2)
    >>> spec = DataSpec("mine", "classification", (2,), 2, {"train": 6, "validation": 0, "test": 0})
    >>> source = IndexedSource(spec, lambda split, indices: (x[indices], indices % 2))
    >>> source.limit(3).arrays("train")[1]
    array([0, 1, 0], dtype=int32)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdist.data.input import augmentation as augmentations
from tfdist.data.input.arrays import Arrays, ToModelTypes, cast, checked, model_types
from tfdist.data.input.origin import FeedArguments
from tfdist.data.input.source import Source
from tfdist.data.spec import DataSpec
from tfdist.errors import DataError, UsageError
from tfdist.jobs.world import World

if TYPE_CHECKING:
    import tensorflow as tf

    from tfdist.data.input.array_feed import OrderOf
    from tfdist.data.input.feed import Feed

# x and y of the examples of a split with these numbers, integers `[n]`.
ReadAt = Callable[[str, np.ndarray], Arrays]


class IndexedSource(Source):
    """A source that reads the examples of each batch when they are needed; see `Source`.

    A process reads only its own part of each batch, and several batches at the same time, in threads. What the reader
    returns is checked for each batch.
    """

    def __init__(self, spec: DataSpec, read_at: ReadAt):
        """Makes a source of `spec.examples[split]` examples per split.

        Args:
            spec: the facts about the dataset.
            read_at: `read_at(split, indices)` returns the examples with these numbers, in this order, as
                `tfdist.data.spec` describes them: for example rows of arrays from `numpy.load(..., mmap_mode="r")`. It
                is called from several threads.
        """
        super().__init__(spec, lambda split, count: read_at(split, np.arange(count)))
        self._read_at = read_at
        self._problem: DataError | None = None

    def cached(self) -> Source:
        source = Source(self.spec, self._read)
        source.origin = self._origin_with(cached=True)
        return source

    def _feed(self, arguments: FeedArguments, world: World) -> Feed:
        return self.pipelines(arguments).feed(world, lambda: self._problem)

    def _by_range(self, split: str) -> bool:
        self._check_split(split)
        return True

    def _parts_of_feed(self, arguments: FeedArguments) -> tuple[Any, int, OrderOf, ToModelTypes | None]:
        if arguments.stream_positions:
            raise UsageError(
                f"The examples of `{self.spec.name}` are read by number, without their positions in streams",
                "use a source of arrays for a model that keeps a state",
            )
        split, transform, augmentation = arguments.split, None, self.augmentation(arguments.augment)
        if augmentation is not None:
            augmented = augmentations.Augmented(self.spec, augmentation, arguments.seed, self.spec.examples[split])
            transform = ToModelTypes(self.spec, then=augmented)
        order_of = self._order_of(arguments)
        return lambda indices: self._examples_at(split, indices), arguments.global_batch_size, order_of, transform

    def _examples_at(self, split: str, indices: tf.Tensor) -> Any:
        """Reads the examples with these numbers in a graph."""
        import tensorflow as tf

        specs = _specs(self.spec)
        flat_specs = tf.nest.flatten(specs)

        def read(numbers: np.ndarray) -> list[np.ndarray]:
            spec = dataclasses.replace(self.spec, examples={split: len(numbers)})
            try:
                x, y = self._read_at(split, numbers)
                arrays = tf.nest.flatten(checked(spec, split, x, x if spec.task == "autoencoding" else y))
                return [cast(array, of.dtype.as_numpy_dtype) for array, of in zip(arrays, flat_specs, strict=True)]
            except DataError as error:
                self._problem = error
                raise

        arrays = tf.numpy_function(read, [indices], [spec.dtype for spec in flat_specs])
        flat = [tf.ensure_shape(array, spec.shape) for array, spec in zip(arrays, flat_specs, strict=True)]
        return tf.nest.pack_sequence_as(specs, flat)


def _specs(spec: DataSpec) -> Any:
    """The `tf.TensorSpec`s of x and y in a batch, as a model sees them."""
    import tensorflow as tf

    x_type, y_type = model_types(spec)
    x = tf.TensorSpec([None, *spec.input_shape], x_type)
    y = tf.TensorSpec([None, *spec.target_shape], y_type)
    if spec.task == "translation":
        return {"source": x, "target": tf.TensorSpec([None, *spec.target_shape], x_type)}, y
    return x, y
