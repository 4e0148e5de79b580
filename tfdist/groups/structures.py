"""Gathers the outputs of a model, of any structure, from all replicas through an all-gather of numeric tensors.

    dense       directly                          ragged    the values, and the lengths of the rows
    strings     the characters and the lengths    sparse    the values, and their indices

Synopsis:

    >>> words = tf.ragged.constant([["a", "bc"], []])
    >>> twice = gathered(words, lambda tensor: tf.concat([tensor, tensor], 0), index=0)
    >>> twice.to_list()
    [[b'a', b'bc'], [], [b'a', b'bc'], []]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

# Concatenates the tensors `[n_replica, ...]` of all replicas, in the order of the replicas.
Gather = Callable[[tf.Tensor], tf.Tensor]


def gathered(structure: Any, gather: Gather, index: int) -> Any:
    """The examples of `structure` of all replicas, in the order of the replicas; `index` is that of this replica."""

    def gather_value(value: Any) -> Any:
        if isinstance(value, tf.RaggedTensor):
            lengths = [gather(row_lengths) for row_lengths in value.nested_row_lengths()]
            return tf.RaggedTensor.from_nested_row_lengths(gather_value(value.flat_values), lengths, validate=False)
        if isinstance(value, tf.SparseTensor):
            return _gathered_sparse(value, gather_value, index)
        value = tf.convert_to_tensor(value)
        if value.shape.rank == 0:  # one per replica, as Keras has one per batch
            value = value[tf.newaxis]
        return _gathered_strings(value, gather) if value.dtype == tf.string else gather(value)

    return tf.nest.map_structure(gather_value, structure)


def _gathered_sparse(sparse: tf.SparseTensor, gather: Gather, index: int) -> tf.SparseTensor:
    rows = gather(sparse.dense_shape[:1])
    offset = tf.concat([[tf.reduce_sum(rows[:index])], tf.zeros_like(sparse.dense_shape[1:])], 0)
    shape = tf.concat([[tf.reduce_sum(rows)], sparse.dense_shape[1:]], 0)
    return tf.SparseTensor(gather(sparse.indices + offset), gather(sparse.values), shape)


def _gathered_strings(strings: tf.Tensor, gather: Gather) -> tf.Tensor:
    # Base64 only has characters below 128, each of which is one byte in UTF-8.
    encoded = tf.io.encode_base64(tf.reshape(strings, [-1]))
    lengths = gather(tf.strings.length(encoded))
    codes = gather(tf.io.decode_raw(tf.strings.reduce_join(encoded), tf.uint8))
    codes_by_string = tf.RaggedTensor.from_row_lengths(tf.cast(codes, tf.int32), lengths, validate=False)
    decoded = tf.io.decode_base64(tf.strings.unicode_encode(codes_by_string, "UTF-8"))
    decoded = tf.reshape(decoded, tf.concat([[-1], tf.shape(strings)[1:]], 0))
    decoded.set_shape([None, *strings.shape[1:]])
    return decoded
