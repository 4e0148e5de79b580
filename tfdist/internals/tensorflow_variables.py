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
from collections.abc import Iterator, Sequence
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


def read(variable: tf.Variable, region: Region = ()) -> np.ndarray:
    """The values of a region. They may be in the memory of the variable: use them before it changes."""
    value = tf.convert_to_tensor(variable)
    value = value[region] if region else value
    return np.asarray(value if value.shape.rank else value.numpy())  # NumPy refuses scalars of bfloat16


def assign(variable: tf.Variable, region: Region, values: np.ndarray) -> None:
    """Assigns the values of a region, in place."""
    if not region:
        variable.assign(values)
        return
    # `variable[region].assign` reads the variable before, and TensorFlow then copies all of it.
    begin, end = ([getattr(part, bound) for part in region] for bound in ("start", "stop"))
    tf.raw_ops.ResourceStridedSliceAssign(
        ref=variable.handle, begin=begin, end=end, strides=[1] * len(region), value=tf.convert_to_tensor(values)
    )


def region_shape(variable: tf.Variable, region: Region) -> list[int]:
    """The shape of the values of a region."""
    return [*(part.stop - part.start for part in region), *variable.shape[len(region) :]]


def assign_all(held: Sequence[tf.Variable], values: np.ndarray) -> None:
    """Assigns `values` to each of several variables, which have its shape."""
    for variable in held:
        for region in regions(variable, PIECE_BYTES):
            assign(variable, region, values[region])
