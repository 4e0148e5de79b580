"""Cuts a global batch of dense, sparse or ragged tensors into the parts of its replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.data.input.division import Division
from tfdist.errors import DataError

# In place of the number of examples in a part: the tensors of the batch have different lengths.
UNEQUAL = -1
# In place of the number of examples in a part: the processes of the job have batches of different lengths.
DIFFERENT = -2

UNEQUAL_LENGTHS = "The tensors of a batch have different lengths, so that it cannot be divided among replicas"


def unequal_lengths(lengths: str) -> tuple[str, str]:
    """The sentence and the hint of the error for a batch whose tensors have these different `lengths`."""
    return (
        f"{UNEQUAL_LENGTHS}: found {lengths} in one batch",
        "give each tensor of a batch one row per example, or train on one device",
    )


def none_if_empty(value: Any) -> Any:
    """Returns `value`, but `None` for the empty optional that stands for a missing target in Keras' generators."""
    return None if isinstance(value, tf.experimental.Optional) else value


def has_examples(value: Any) -> bool:
    """Whether a tensor of a batch has an axis of examples; every replica gets the whole of a scalar."""
    return value is not None and value.shape.rank != 0


def length(tensor: Any) -> Any:
    """The number of examples in `tensor`: an integer, or an int32 scalar."""
    if isinstance(tensor, tf.SparseTensor):
        return tf.cast(tensor.dense_shape[0], tf.int32)
    if isinstance(tensor, tf.RaggedTensor):
        return tf.cast(tensor.nrows(), tf.int32)
    return tf.shape(tensor)[0] if tensor.shape[0] is None else tensor.shape[0]


def common_length(values: Sequence[Any]) -> Any:
    """The number of examples in a batch: an integer, or an int32 scalar.

    Raises:
        DataError: the tensors have different lengths. In a graph this is checked when it runs.
    """
    lengths = [length(value) for value in values if has_examples(value)]
    if not lengths:
        raise DataError("The batches contain only scalars, which cannot be divided among replicas", "batch the data")
    known = [number for number in lengths if isinstance(number, int)]
    if len(set(known)) > 1:
        raise DataError(*unequal_lengths(", ".join(map(str, known))))
    checks = [
        tf.debugging.assert_equal(number, lengths[0], unequal_lengths("several")[0], summarize=1)
        for number in lengths[1:]
        if not isinstance(number, int) or not known
    ]
    with tf.control_dependencies([check for check in checks if check is not None]):
        return known[0] if known else tf.identity(lengths[0])


def lengths_of_parts(values: Sequence[Any], division: Division) -> list[Any]:
    """The number of examples in each part of a batch: integers, or int32 scalars.

    All are `UNEQUAL` if the tensors have different lengths, so that the batch cannot be divided.
    """
    lengths = [length(value) for value in values if has_examples(value)]
    if not lengths:
        return [UNEQUAL] * division.count
    first, *others = lengths
    if all(isinstance(number, int) for number in lengths):
        return rows(first, division) if set(lengths) == {first} else [UNEQUAL] * division.count
    equal = tf.reduce_all(tf.equal(tf.stack(others or [first]), first))
    return [tf.where(equal, number, UNEQUAL) for number in rows(first, division)]


def rows(examples: Any, division: Division) -> list[Any]:
    """The number of examples in each part of a batch of `examples`."""
    parts = [division.part(examples, index) for index in range(division.count)]
    return [end - begin for begin, end in parts]


def bounds(examples: Any, index: Any, division: Division) -> tuple[Any, Any, Any]:
    """The begin and the end of part `index` of a batch of `examples`, and its share of them.

    A part without examples has the share 0 and the bounds of an example of another part.
    """
    if division.count == 1:
        return 0, examples, 1.0
    begin, end = division.part(examples, index)
    if isinstance(examples, int):
        share = (end - begin) / examples if examples else 0.0
        first = min(begin, max(examples - 1, 0))
        return first, max(end, first + 1), share
    share = tf.math.divide_no_nan(tf.cast(end - begin, tf.float64), tf.cast(examples, tf.float64))
    first = tf.minimum(begin, tf.maximum(examples - 1, 0))
    return first, tf.maximum(end, first + 1), share


def slice_examples(tensor: Any, begin: Any, end: Any) -> Any:
    """The examples `begin` to `end - 1` of a dense, sparse or ragged tensor; the whole of a scalar."""
    if not has_examples(tensor):
        return tensor
    if not isinstance(tensor, tf.SparseTensor):
        return tensor[begin:end]
    start = tf.concat([[tf.cast(begin, tf.int64)], tf.zeros_like(tensor.dense_shape[1:])], 0)
    size = tf.concat([[tf.cast(end - begin, tf.int64)], tensor.dense_shape[1:]], 0)
    return tf.sparse.slice(tensor, start, size)


def of_any_size(spec: Any) -> Any:
    """The spec of batches of any size, from that of one batch; only that of a dense tensor changes."""
    return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype) if isinstance(spec, tf.TensorSpec) else spec


def at_least_one(value: Any) -> Any:
    """Returns `value`, or an example of zeros if it has no examples.

    `bounds` instead repeats an example of another part, which a process cannot do that has only its own part.
    """
    if not has_examples(value) or (isinstance(value, tf.Tensor) and value.shape[0]):
        return value
    missing = tf.maximum(0, 1 - length(value))
    if isinstance(value, tf.SparseTensor):
        shape = tf.concat([value.dense_shape[:1] + tf.cast(missing, tf.int64), value.dense_shape[1:]], 0)
        return tf.SparseTensor(value.indices, value.values, shape)
    if isinstance(value, tf.RaggedTensor):
        splits = value.row_splits
        more = tf.fill([missing], splits[-1])
        return tf.RaggedTensor.from_row_splits(value.values, tf.concat([splits, more], 0), validate=False)
    zeros = tf.zeros([missing, *[size or 1 for size in value.shape[1:]]], value.dtype)
    return tf.concat([value, zeros], 0)
