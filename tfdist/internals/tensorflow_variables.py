"""Reads and assigns variables in pieces, so that a large one is never in memory a second time.

Synopsis:

    >>> variable = tf.Variable(tf.zeros([4, 3]))
    >>> top, bottom = regions(variable, most_bytes=24)
    >>> assign(variable, bottom, np.ones([2, 3], "float32"))
    >>> read(variable, bottom)
    array([[1., 1., 1.],
           [1., 1., 1.]], dtype=float32)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

PIECE_BYTES = 1 << 26
Region = tuple[slice, ...]


def copies(variable: Any) -> list[Any]:
    """The plain variables behind a Keras variable or a `tf.Variable`: one copy per replica of this process."""
    value = getattr(variable, "_value", variable)
    if isinstance(value, tf.distribute.DistributedValues):
        return list(value.distribute_strategy.experimental_local_results(value))
    return [value]


def dtype_of(variable: tf.Variable) -> np.dtype:
    """The dtype of its values in NumPy."""
    return np.dtype(variable.dtype.as_numpy_dtype)


def regions(variable: tf.Variable, most_bytes: int) -> Iterator[Region]:
    """The parts of a variable, of at most `most_bytes` and one after the other in memory; a small one is one part."""
    shape, size = tuple(variable.shape), dtype_of(variable).itemsize
    if math.prod(shape) * size <= most_bytes:
        yield ()
        return
    # The first axis of which one element is small enough; it is cut, and the ones before it are taken one by one.
    axis = next(axis for axis in range(len(shape)) if math.prod(shape[axis + 1 :]) * size <= most_bytes)
    count = most_bytes // (math.prod(shape[axis + 1 :]) * size)
    for index in np.ndindex(*shape[:axis]):
        for begin in range(0, shape[axis], count):
            yield (*(slice(i, i + 1) for i in index), slice(begin, min(begin + count, shape[axis])))


def region_of(variable: tf.Variable, region: Region) -> tf.Tensor:
    """The values of a region, in a graph or outside."""
    value = tf.convert_to_tensor(variable)
    return value[region] if region else value


def read(variable: tf.Variable, region: Region = ()) -> np.ndarray:
    """The values of a region. They may be in the memory of the variable: use them before it changes."""
    value = region_of(variable, region)
    return np.asarray(value if value.shape.rank else value.numpy())  # NumPy refuses scalars of bfloat16


def assign(variable: tf.Variable, region: Region, values: Any) -> None:
    """Assigns the values of a region, in place."""
    if not region:
        variable.assign(values)
        return
    # `variable[region].assign` reads the variable before, and TensorFlow then copies all of it.
    begin, end = ([getattr(part, bound) for part in region] for bound in ("start", "stop"))
    tf.raw_ops.ResourceStridedSliceAssign(
        ref=variable.handle, begin=begin, end=end, strides=[1] * len(region), value=tf.convert_to_tensor(values)
    )


def assign_all(held: Sequence[tf.Variable], values: np.ndarray) -> None:
    """Assigns `values` to each of several variables, which have its shape."""
    for variable in held:
        for region in regions(variable, PIECE_BYTES):
            assign(variable, region, values[region])


@dataclass(frozen=True)
class Piece:
    """A region of the copies of a variable."""

    held: Sequence[tf.Variable]
    region: Region

    @property
    def shape(self) -> list[int]:
        """The shape of the values."""
        return [*(part.stop - part.start for part in self.region), *self.held[0].shape[len(self.region) :]]

    @property
    def size_bytes(self) -> int:
        """The size of the values of one copy."""
        return math.prod(self.shape) * dtype_of(self.held[0]).itemsize


def packs(variables: Iterable[Any], most_bytes: int) -> Iterator[list[Piece]]:
    """The pieces of all variables, in their order, in lists of at most `most_bytes` together."""
    pack: list[Piece] = []
    size = 0
    for held in map(copies, variables):
        for piece in (Piece(held, region) for region in regions(held[0], most_bytes)):
            if pack and size + piece.size_bytes > most_bytes:
                yield pack
                pack, size = [], 0
            pack.append(piece)
            size += piece.size_bytes
    if pack:
        yield pack
