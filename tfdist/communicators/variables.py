"""Gives the variables and arrays of the chief to all processes: as bytes, so that those of every dtype stay the same.

Small ones travel together and large ones in pieces, so that no process needs memory for more than a message.

Synopsis:

    >>> weight = tf.Variable([1.0, 2.0])
    >>> broadcast_variables([weight], lambda values: values, is_chief=True)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.internals import tensorflow_variables
from tfdist.internals.tensorflow_variables import PIECE_BYTES, Region

# The chief's bytes `[n]` uint8 in all processes, each of which calls it with as many of its own.
Broadcast = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class _Piece:
    """A region of the copies of a variable."""

    held: Sequence[tf.Variable]
    region: Region

    @property
    def size_bytes(self) -> int:
        shape = tensorflow_variables.region_shape(self.held[0], self.region)
        return math.prod(shape) * tensorflow_variables.dtype_of(self.held[0]).itemsize

    def read_into(self, message: np.ndarray) -> None:
        message[:] = _bytes(tensorflow_variables.read(self.held[0], self.region))

    def assign(self, message: np.ndarray) -> None:
        shape = tensorflow_variables.region_shape(self.held[0], self.region)
        values = message.copy().view(tensorflow_variables.dtype_of(self.held[0])).reshape(shape)
        for variable in self.held:
            tensorflow_variables.assign(variable, self.region, values)


def broadcast_variables(variables: Iterable[Any], broadcast: Broadcast, is_chief: bool) -> None:
    """Gives Keras or TensorFlow `variables` the values of the chief's."""
    for pieces in _messages(variables):
        ends = np.cumsum([piece.size_bytes for piece in pieces])
        message = np.empty(ends[-1], np.uint8)
        if is_chief:
            for piece, part in zip(pieces, np.split(message, ends[:-1]), strict=True):
                piece.read_into(part)
        message = broadcast(message)
        for piece, part in zip(pieces, np.split(message, ends[:-1]), strict=True):
            piece.assign(part)


def described(variables: Iterable[Any]) -> list[str]:
    """The dtype and shape of each variable, such as "float32 [4,3]"."""
    held = [tensorflow_variables.copies(variable)[0] for variable in variables]
    return [f"{variable.dtype.name} [{','.join(map(str, variable.shape))}]" for variable in held]


def broadcast_array(array: np.ndarray, broadcast: Broadcast) -> None:
    """Fills a C-contiguous `array` with the values of the chief's."""
    flat = _bytes(array)
    for begin in range(0, len(flat), PIECE_BYTES):
        flat[begin : begin + PIECE_BYTES] = broadcast(flat[begin : begin + PIECE_BYTES])


def _messages(variables: Iterable[Any]) -> Iterator[list[_Piece]]:
    """The pieces of all variables, in messages of at most `PIECE_BYTES`."""
    message: list[_Piece] = []
    size = 0
    for held in map(tensorflow_variables.copies, variables):
        for piece in (_Piece(held, region) for region in tensorflow_variables.regions(held[0], PIECE_BYTES)):
            if message and size + piece.size_bytes > PIECE_BYTES:
                yield message
                message, size = [], 0
            message.append(piece)
            size += piece.size_bytes
    if size:
        yield message


def _bytes(values: np.ndarray) -> np.ndarray:
    """The memory of a C-contiguous array, as an array `[n]` of bytes."""
    return values.reshape(-1).view(np.uint8)
