"""The examples of the steps of an epoch as a `tf.data.Dataset` that asks for them range by range.

    order of the epoch ──> rows of a range of steps, in NumPy, one range ahead ──> each step's rows, or each example's

The graph is traced once for all epochs, which it gets as a number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

# `rows(epoch, begin, end)`: arrays with one row per example of the steps from `begin` to `end`.
Rows = Callable[[int, int, int], Sequence[np.ndarray]]

# Examples that are asked for together: a few milliseconds, and some hundred KB.
AT_ONCE = 1 << 16


def by_step(rows: Rows, specs: Sequence[tf.TensorSpec], length: int, steps: tuple[tf.Tensor, ...]) -> tf.data.Dataset:
    """The rows of each step, as a tuple of tensors `[length, ...]`; the last step may have fewer.

    Args:
        rows: gives `length` rows per step, the last step may have fewer.
        specs: the rows' types and shapes.
        length: at least 1.
        steps: the epoch, the first step, and the one after the last: int64 scalars.
    """

    def cut(*joined: tf.Tensor) -> tf.data.Dataset:
        begins = tf.data.Dataset.range(0, tf.shape(joined[0], tf.int64)[0], length)
        return begins.map(lambda begin: tuple(of_each[begin : begin + length] for of_each in joined))

    return _joined(rows, specs, length, steps).flat_map(cut)


def by_example(
    rows: Rows,
    specs: Sequence[tf.TensorSpec],
    length: int,
    steps: tuple[tf.Tensor, ...],
    examples_at_once: int = AT_ONCE,
) -> tf.data.Dataset:
    """As `by_step`, but the row of each example."""
    return _joined(rows, specs, length, steps, examples_at_once).flat_map(
        lambda *joined: tf.data.Dataset.from_tensor_slices(joined)
    )


def _joined(
    rows: Rows,
    specs: Sequence[tf.TensorSpec],
    length: int,
    steps: tuple[tf.Tensor, ...],
    examples_at_once: int = AT_ONCE,
) -> tf.data.Dataset:
    epoch, begin, end = steps
    at_once = max(1, examples_at_once // length)

    def asked(first: tf.Tensor) -> tuple[tf.Tensor, ...]:
        last = tf.minimum(first + at_once, end)
        found = tf.numpy_function(_called(rows), [epoch, first, last], [spec.dtype for spec in specs])
        return tuple(tf.ensure_shape(of_each, spec.shape) for of_each, spec in zip(found, specs, strict=True))

    asked = tf.autograph.experimental.do_not_convert(asked)
    return tf.data.Dataset.range(begin, end, at_once).map(asked).prefetch(1)


def _called(rows: Rows) -> Callable[..., Sequence[np.ndarray]]:
    return lambda *numbers: rows(*map(int, numbers))
