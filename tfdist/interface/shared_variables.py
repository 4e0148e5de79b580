"""Gives the variables and arrays of the chief to all processes: as bytes, so that those of every dtype stay the same.

Small ones travel together and large ones in pieces, so that no process needs memory for more than a message.

Synopsis:

    >>> import tensorflow as tf
    >>> weight = tf.Variable([1.0, 2.0])
    >>> broadcast_variables([weight], lambda values: values, is_chief=True)
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from tfdist.groups import parts
from tfdist.internals import tensorflow_variables
from tfdist.internals.tensorflow_variables import PIECE_BYTES, filled, memory, read, size_bytes

# The chief's bytes `[n]` uint8 in all processes, each of which calls it with as many of its own.
Broadcast = Callable[[np.ndarray], np.ndarray]


def broadcast_variables(variables: Iterable[Any], broadcast: Broadcast, is_chief: bool) -> None:
    """Gives Keras or TensorFlow `variables` the values of the chief's."""
    for pack in tensorflow_variables.packs(variables, PIECE_BYTES):
        if size_bytes(pack[0][0]) > PIECE_BYTES:
            _broadcast_large(pack[0], broadcast, is_chief)
        else:
            _broadcast_pack(pack, broadcast, is_chief)


def _broadcast_large(held: Sequence[Any], broadcast: Broadcast, is_chief: bool) -> None:
    if is_chief:
        broadcast_array(read(held[0]), broadcast)
    else:
        with filled(held[0]) as content:
            broadcast_array(content, broadcast)
    for copy in held[1:]:
        tensorflow_variables.fill(copy, read(held[0]))


def _broadcast_pack(pack: Sequence[Sequence[Any]], broadcast: Broadcast, is_chief: bool) -> None:
    ends = np.cumsum([size_bytes(held[0]) for held in pack])
    if not ends[-1]:
        return
    message = np.concatenate([memory(read(held[0])) for held in pack]) if is_chief else np.zeros(ends[-1], np.uint8)
    for held, part in zip(pack, np.split(broadcast(message), ends[:-1]), strict=True):
        values = part.view(held[0].dtype.as_numpy_dtype).reshape(held[0].shape)
        for variable in held[is_chief:]:
            variable.assign(values)


def checksum(variables: Iterable[Any]) -> int:
    """The CRC-32 of the values."""
    found = 0
    for variable in variables:
        found = zlib.crc32(memory(read(tensorflow_variables.copies(variable)[0])).data, found)
    return found


def divide(variable: Any, whole: np.ndarray | None, broadcast: Broadcast) -> None:
    """Gives each process its part (`tfdist.groups.parts`) of a variable, of which the chief has the `whole`."""
    (held,) = tensorflow_variables.copies(variable)
    value = np.empty(parts.whole_shape(variable), held.dtype.as_numpy_dtype) if whole is None else whole
    value = np.ascontiguousarray(value)
    broadcast_array(value, broadcast)
    parts.fill(variable, value)


def described(variables: Iterable[Any]) -> list[str]:
    """The dtype and shape of each variable, such as "float32 [4,3]"; of a part, those of the whole."""
    held = [(tensorflow_variables.copies(variable)[0], parts.whole_shape(variable)) for variable in variables]
    return [tensorflow_variables.in_words(variable.dtype, shape) for variable, shape in held]


def broadcast_array(array: np.ndarray, broadcast: Broadcast) -> None:
    """Fills a C-contiguous `array` with the values of the chief's, which may be read-only."""
    flat = memory(array)
    for begin in range(0, len(flat), PIECE_BYTES):
        values = broadcast(flat[begin : begin + PIECE_BYTES])
        if flat.flags.writeable:
            flat[begin : begin + PIECE_BYTES] = values
