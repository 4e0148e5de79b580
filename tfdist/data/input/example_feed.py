"""The batches of `examples`: each process reads the examples of its part of a batch when they are needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.input.examples import PARTS, Examples, different
from tfdist.data.input.feed import NO_BATCHES, Feed
from tfdist.data.input.file_feed import LargeExamples
from tfdist.data.input.order import OrderOf
from tfdist.errors import DataError, TfdistError, UsageError
from tfdist.internals import keras_data
from tfdist.internals.keras import tree
from tfdist.jobs.world import World


def feed(
    examples: Examples, batch_size: int, order_of: OrderOf, world: World, class_weight: Mapping[int, float] | None
) -> Feed:
    """Batches of `examples` in an order, of which this process, whose place in the job is `world`, reads its part.

    Raises:
        DataError: there are no examples, or the first one cannot be read.
        UsageError: the examples have weights beside `class_weight`.
    """
    if not len(examples):
        raise DataError(*NO_BATCHES)
    reader = _Reader(examples, class_weight)
    result = LargeExamples(reader.in_graph, batch_size, order_of).feed(world, lambda: reader.problem)
    result.sample = examples.sample
    return result


class _Reader:
    """Reads batches, whose examples must all have the shapes and types of the first example of the source.

    Attributes:
        problem: the error of an example that was read, if there was any; TensorFlow transmits only its text.
    """

    def __init__(self, examples: Examples, class_weight: Mapping[int, float] | None):
        self._examples, self._class_weight = examples, class_weight
        self.problem: TfdistError | None = None
        first = self._weighted(examples.read([0]))
        self._structure = tree.map_structure(lambda array: tf.TensorSpec([None, *array.shape[1:]], array.dtype), first)
        self._specs = tree.flatten(self._structure)
        self._names = [PARTS[path[0]] + "".join(f"[{key!r}]" for key in path[1:]) for path in _paths(first)]

    def in_graph(self, numbers: tf.Tensor) -> Any:
        """The examples with these numbers, int `[n]`, in a graph."""
        arrays = tf.numpy_function(self._read, [numbers], [spec.dtype for spec in self._specs])
        tensors = [tf.ensure_shape(array, spec.shape) for array, spec in zip(arrays, self._specs, strict=True)]
        return tree.pack_sequence_as(self._structure, tensors)

    def _read(self, numbers: np.ndarray) -> list[np.ndarray]:
        try:
            return self._checked(self._weighted(self._examples.read(numbers)), numbers)
        except TfdistError as error:
            self.problem = error
            raise

    def _weighted(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        if self._class_weight is None:
            return batch
        if len(batch) != 2:
            raise UsageError(
                f"`class_weight` is set, and the examples have {'no targets' if len(batch) < 2 else 'weights already'}",
                "set `class_weight` for examples of `(x, y)` only",
            )
        return (*batch, keras_data.class_weight_to_sample_weights(batch[1], self._class_weight))

    def _checked(self, batch: Any, numbers: np.ndarray) -> list[np.ndarray]:
        arrays = tree.flatten(batch)
        if len(arrays) != len(self._specs):
            raise DataError(
                f"Example {numbers[0]} has {len(arrays)} arrays, and example 0 has {len(self._specs)}",
                "let `transform` return the same structure for each example",
            )
        for array, spec, name in zip(arrays, self._specs, self._names, strict=True):
            shape, dtype = tuple(spec.shape[1:]), spec.dtype.as_numpy_dtype
            if array.shape[1:] != shape or array.dtype != dtype:
                raise different(name, int(numbers[0]), array[0], 0, shape, dtype)
        return arrays


def _paths(structure: Any) -> list[tuple[Any, ...]]:
    return [path for path, _ in keras_data.flatten_with_path(structure)]
