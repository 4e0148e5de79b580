"""Gathers the outputs of a model, of any structure, from all replicas through an all-gather of numeric tensors.

    dense       as it is                          ragged    the values, and the lengths of the rows
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

# The tensors `[n_replica, ...]` of all replicas along the first axis, in the order of the replicas.
Gather = Callable[[tf.Tensor], tf.Tensor]


def gathered(structure: Any, gather: Gather, index: int) -> Any:
    """The examples of `structure` of all replicas, in the order of the replicas; `index` is that of this replica."""

    def one(value: Any) -> Any:
        if isinstance(value, tf.RaggedTensor):
            lengths = [gather(of_rows) for of_rows in value.nested_row_lengths()]
            return tf.RaggedTensor.from_nested_row_lengths(one(value.flat_values), lengths, validate=False)
        if isinstance(value, tf.SparseTensor):
            return _gathered_sparse(value, one, index)
        value = tf.convert_to_tensor(value)
        if value.shape.rank == 0:  # one per replica, as Keras has one per batch
            value = value[tf.newaxis]
        return _gathered_strings(value, gather) if value.dtype == tf.string else gather(value)

    return tf.nest.map_structure(one, structure)


def _gathered_sparse(sparse: tf.SparseTensor, gather: Gather, index: int) -> tf.SparseTensor:
    rows = gather(sparse.dense_shape[:1])
    before = tf.concat([[tf.reduce_sum(rows[:index])], tf.zeros_like(sparse.dense_shape[1:])], 0)
    shape = tf.concat([[tf.reduce_sum(rows)], sparse.dense_shape[1:]], 0)
    return tf.SparseTensor(gather(sparse.indices + before), gather(sparse.values), shape)


def _gathered_strings(strings: tf.Tensor, gather: Gather) -> tf.Tensor:
    # Base64 has characters below 128 alone, each of which is one byte in UTF-8.
    letters = tf.io.encode_base64(tf.reshape(strings, [-1]))
    lengths = gather(tf.strings.length(letters))
    numbers = gather(tf.io.decode_raw(tf.strings.reduce_join(letters), tf.uint8))
    of_each = tf.RaggedTensor.from_row_lengths(tf.cast(numbers, tf.int32), lengths, validate=False)
    found = tf.io.decode_base64(tf.strings.unicode_encode(of_each, "UTF-8"))
    found = tf.reshape(found, tf.concat([[-1], tf.shape(strings)[1:]], 0))
    found.set_shape([None, *strings.shape[1:]])
    return found
