"""The compression and packing of weights for an exchange: many variables in one array, and float32 in fewer bytes.

    bf16, fp16      2 bytes per number, rounded to 8 or 11 bits
    int8            1 byte per number, and 4 bytes per block: numbers are multiples of the block's maximum / 127

What rounding loses can be added to what is sent next (error feedback: Seide et al., 1-bit stochastic gradient descent,
Interspeech 2014; Karimireddy et al., Error feedback fixes SignSGD, ICML 2019).

Synopsis:

    >>> sent = encode("int8", np.array([1.0, -0.5, 0.004], np.float32))
    >>> len(sent), [round(float(number), 3) for number in decode("int8", sent, 3)]
    (7, [1.0, -0.504, 0.008])
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import tensorflow as tf

from tfdist.internals import tensorflow_variables

ENCODINGS = ("none", "bf16", "fp16", "int8")
BLOCK = 1024  # numbers that share a scale
_TYPES = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}


def packed(variables: Sequence[Any]) -> tf.Tensor:
    """The values of variables or tensors, concatenated: float32 `[n]`."""
    return tf.concat([tf.reshape(tf.cast(variable, tf.float32), [-1]) for variable in variables], 0)


def unpacked(flat: tf.Tensor, variables: Sequence[Any]) -> list[tf.Tensor]:
    """The parts of `flat`, which `packed` made from `variables`, in the shapes of the variables."""
    parts = tf.split(flat, [math.prod(variable.shape) for variable in variables])
    return [tf.reshape(part, variable.shape) for part, variable in zip(parts, variables, strict=True)]


class PackedVariables:
    """Reads and assigns several variables as one array, with one copy instead of one per variable."""

    def __init__(self, variables: Sequence[Any]):
        self._variables = list(variables)
        self._pack = tf.function(lambda: packed(self._variables), autograph=False)
        self._unpack = tf.function(self._assign, autograph=False)

    def read(self) -> np.ndarray:
        """The values: float32 `[n]`."""
        values: np.ndarray = self._pack().numpy()
        return values

    def assign(self, flat: np.ndarray) -> None:
        """Assigns the values in `flat`, float32 `[n]`, each cast to the dtype of its variable."""
        self._unpack(tf.constant(flat, tf.float32))

    def _assign(self, flat: tf.Tensor) -> None:
        for variable, value in zip(self._variables, unpacked(flat, self._variables), strict=True):
            variable.assign(tf.cast(value, variable.dtype))


def pieces(array: np.ndarray) -> Iterator[np.ndarray]:
    """Views of consecutive parts of an array `[n]`, each of at most `PIECE_BYTES`."""
    length = max(tensorflow_variables.PIECE_BYTES // array.itemsize, 1)
    return (array[begin : begin + length] for begin in range(0, array.size, length))


def weighted_sum(arrays: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    """The sum of float32 arrays of the same shape, each times its weight."""
    total = np.zeros_like(arrays[0])
    for array, weight in zip(arrays, weights, strict=True):
        total += array * np.float32(weight)
    return total


def squared_norm(array: np.ndarray) -> float:
    """The squared norm of an array `[n]`."""
    return float(np.dot(array, array))


def encode(encoding: str, values: np.ndarray) -> bytes:
    """`values`, float32 `[n]`, as bytes; `encoding` is one of `ENCODINGS`, except "none"."""
    if encoding in _TYPES:
        return values.astype(_TYPES[encoding]).tobytes()
    blocks = _blocks(values)
    scales = (np.abs(blocks).max(axis=1, keepdims=True, initial=0) / 127).astype(np.float32)
    steps = np.rint(np.divide(blocks, scales, out=np.zeros_like(blocks), where=scales > 0))
    return scales.tobytes() + steps.astype(np.int8).reshape(-1)[: len(values)].tobytes()


def decode(encoding: str, message: bytes, size: int) -> np.ndarray:
    """The rounded values that `encode` made `message` from: float32 `[size]`."""
    if encoding in _TYPES:
        return np.frombuffer(message, _TYPES[encoding]).astype(np.float32)
    count = -(-size // BLOCK)
    scales = np.frombuffer(message, np.float32, count)[:, np.newaxis]
    steps = _blocks(np.frombuffer(message, np.int8, size, offset=scales.nbytes).astype(np.float32))
    return (steps * scales).reshape(-1)[:size]


def _blocks(values: np.ndarray) -> np.ndarray:
    return np.pad(values, (0, -len(values) % BLOCK)).reshape(-1, BLOCK)
