"""Gives the variables and arrays of the chief to all processes: as bytes, so that those of every dtype stay the same.

Small ones travel together and large ones in pieces, so that no process needs memory for more than a message.

Synopsis:

    >>> import tensorflow as tf
    >>> weight = tf.Variable([1.0, 2.0])
    >>> broadcast_variables([weight], lambda values: values, is_chief=True)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from tfdist.internals import tensorflow_variables
from tfdist.internals.tensorflow_variables import PIECE_BYTES, Piece

# The chief's bytes `[n]` uint8 in all processes, each of which calls it with as many of its own.
Broadcast = Callable[[np.ndarray], np.ndarray]


def broadcast_variables(variables: Iterable[Any], broadcast: Broadcast, is_chief: bool) -> None:
    """Gives Keras or TensorFlow `variables` the values of the chief's."""
    for pieces in tensorflow_variables.packs(variables, PIECE_BYTES):
        ends = np.cumsum([piece.size_bytes for piece in pieces])
        message = np.empty(ends[-1], np.uint8)
        if is_chief:
            for piece, part in zip(pieces, np.split(message, ends[:-1]), strict=True):
                part[:] = _bytes(tensorflow_variables.read(piece.held[0], piece.region))
        message = broadcast(message) if len(message) else message
        for piece, part in zip(pieces, np.split(message, ends[:-1]), strict=True):
            _assign(piece, part)


def described(variables: Iterable[Any]) -> list[str]:
    """The dtype and shape of each variable, such as "float32 [4,3]"."""
    held = [tensorflow_variables.copies(variable)[0] for variable in variables]
    return [f"{variable.dtype.name} [{','.join(map(str, variable.shape))}]" for variable in held]


def broadcast_array(array: np.ndarray, broadcast: Broadcast) -> None:
    """Fills a C-contiguous `array` with the values of the chief's, which may be read-only."""
    flat = _bytes(array)
    for begin in range(0, len(flat), PIECE_BYTES):
        values = broadcast(flat[begin : begin + PIECE_BYTES])
        if flat.flags.writeable:
            flat[begin : begin + PIECE_BYTES] = values


def _assign(piece: Piece, message: np.ndarray) -> None:
    values = message.copy().view(tensorflow_variables.dtype_of(piece.held[0])).reshape(piece.shape)
    for variable in piece.held:
        tensorflow_variables.assign(variable, piece.region, values)


def _bytes(values: np.ndarray) -> np.ndarray:
    """The memory of a C-contiguous array, as an array `[n]` of bytes."""
    return values.reshape(-1).view(np.uint8)
