"""The values of several variables in one array, as they are exchanged: one copy instead of one for each variable."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def packed(variables: Sequence[Any]) -> tf.Tensor:
    """The values of variables, or tensors, one after the other: float32 `[n]`."""
    return tf.concat([tf.reshape(tf.cast(variable, tf.float32), [-1]) for variable in variables], 0)


def unpacked(flat: tf.Tensor, variables: Sequence[Any]) -> list[tf.Tensor]:
    """The values for `variables`, in their shapes, out of what `packed` would make of them."""
    parts = tf.split(flat, [math.prod(variable.shape) for variable in variables])
    return [tf.reshape(part, variable.shape) for part, variable in zip(parts, variables, strict=True)]
