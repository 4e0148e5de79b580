"""Packs tensors into few buffers, which are sent and summed over the processes of a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

AllReduce = Callable[[list[Any]], list[Any]]


@dataclass(frozen=True)
class Packing:
    """How tensors are packed to be sent.

    Attributes:
        buffer_bytes: dense tensors smaller than this are sent together, in buffers of at most this size; `None` packs
            all tensors into one buffer. Copying a large tensor into a buffer and out again costs more than it saves.
            Buffers are filled from the last tensor to the first, the order in which back-propagation computes
            gradients, so that a buffer is sent while the next gradients are computed.
        wire_dtype: the dtype in which float32 gradients are sent; `None` does not cast them.
    """

    buffer_bytes: int | None = 1 << 16
    wire_dtype: tf.DType | None = None


def without_none(all_reduce: AllReduce) -> AllReduce:
    """An all-reduce of a list in which some tensors may be `None`, which stay `None`."""

    def reduce(tensors: list[Any]) -> list[Any]:
        reduced = iter(all_reduce([tensor for tensor in tensors if tensor is not None]))
        return [None if tensor is None else next(reduced) for tensor in tensors]

    return reduce


def packed(all_reduce: AllReduce, packing: Packing) -> AllReduce:
    """An all-reduce that packs dense tensors of one dtype into buffers."""

    def reduce(tensors: list[Any]) -> list[Any]:
        groups = buffers(tensors, packing.buffer_bytes)
        sent = [joined([tensors[index] for index in members]) for members in groups]
        reduced = all_reduce([to_wire(tensor, packing.wire_dtype) for tensor in sent])
        results: list[Any] = [None] * len(tensors)
        for members, buffer, original in zip(groups, reduced, sent, strict=True):
            pieces = split(from_wire(buffer, original.dtype), [tensors[index] for index in members])
            for index, piece in zip(members, pieces, strict=True):
                results[index] = piece
        return results

    return reduce


def summed(group: Any, tensors: Sequence[tf.Tensor], name: str) -> list[Any]:
    """The sums of `tensors` over the processes of `group`, sent in one buffer per dtype; `name` is the exchange's."""
    return packed(lambda sent: group.all_reduce(sent, name), Packing(None))(list(tensors))


def buffers(tensors: Sequence[Any], buffer_bytes: int | None) -> list[list[int]]:
    """The indices of the tensors in each buffer, see `Packing`."""
    result: list[list[int]] = []
    filling: dict[Any, tuple[list[int], int]] = {}
    for index in reversed(range(len(tensors))):
        tensor = tensors[index]
        size = _packed_bytes(tensor, buffer_bytes)
        if size is None:
            result.append([index])
            continue
        members, filled = filling.get(tensor.dtype, ([], 0))
        if not members or (buffer_bytes is not None and filled + size > buffer_bytes):
            members, filled = [], 0
            result.append(members)
        members.append(index)
        filling[tensor.dtype] = members, filled + size
    return result


def _packed_bytes(tensor: Any, buffer_bytes: int | None) -> int | None:
    """The size of a tensor that is packed; `None` for a tensor that is sent by itself."""
    if isinstance(tensor, tf.IndexedSlices) or not tensor.shape.is_fully_defined():
        return None
    size = tensor.shape.num_elements() * tensor.dtype.size
    return size if buffer_bytes is None or size < buffer_bytes else None


def joined(tensors: list[Any]) -> Any:
    """The tensors of a buffer as one flat tensor; a single tensor keeps its shape."""
    return tensors[0] if len(tensors) == 1 else tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)


def split(buffer: Any, like: list[Any]) -> list[Any]:
    """The tensors of a buffer, in the shapes of the tensors `like`, which were joined."""
    if len(like) == 1:
        return [buffer]
    pieces = tf.split(buffer, [tensor.shape.num_elements() for tensor in like])
    return [tf.reshape(piece, tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


def to_wire(tensor: Any, dtype: tf.DType | None) -> Any:
    """A gradient in the dtype in which it is sent, see `Packing`."""
    is_dense = not isinstance(tensor, tf.IndexedSlices)
    return tf.cast(tensor, dtype) if dtype is not None and is_dense and tensor.dtype == tf.float32 else tensor


def from_wire(tensor: Any, dtype: tf.DType) -> Any:
    """A received gradient in its own `dtype`."""
    return tensor if isinstance(tensor, tf.IndexedSlices) else tf.cast(tensor, dtype)


def add(tensors: Sequence[Any]) -> Any:
    """The sum of dense tensors, or of `tf.IndexedSlices`, which stay sparse."""
    if not any(isinstance(tensor, tf.IndexedSlices) for tensor in tensors):
        return tf.add_n(list(tensors))
    if not all(isinstance(tensor, tf.IndexedSlices) for tensor in tensors):
        return tf.add_n([tf.convert_to_tensor(tensor) for tensor in tensors])
    values = tf.concat([tensor.values for tensor in tensors], 0)
    indices = tf.concat([tensor.indices for tensor in tensors], 0)
    return tf.IndexedSlices(values, indices, tensors[0].dense_shape)
