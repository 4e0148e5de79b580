"""How a global batch is cut into the parts of its replicas, whatever its tensors are: dense, sparse or ragged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.data.input.division import Division
from tfdist.errors import DataError


def none_if_empty(value: Any) -> Any:
    """Keras' generators carry an absent target or weight as an empty optional."""
    return None if isinstance(value, tf.experimental.Optional) else value


def at_least_one(value: Any) -> Any:
    """`value`, or an example of zeros where it has none, and those of other processes are not here."""
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


def has_examples(value: Any) -> bool:
    """Whether a part of a batch has an axis of examples; a number beside them belongs to each replica."""
    return value is not None and value.shape.rank != 0


def common_length(values: Sequence[Any]) -> Any:
    """How many examples a batch has: an integer, or an int32 scalar.

    Raises:
        DataError: its tensors differ in their first axes. In a graph that is only found when it runs.
    """
    lengths = [length(value) for value in values if has_examples(value)]
    if not lengths:
        raise DataError(
            "The batches hold nothing but scalars, which cannot be divided among replicas", "batch the data"
        )
    known = [one for one in lengths if isinstance(one, int)]
    if len(set(known)) > 1:
        raise DataError(*unequal_lengths(", ".join(map(str, known))))
    checks = [
        tf.debugging.assert_equal(one, lengths[0], unequal_lengths("several")[0], summarize=1)
        for one in lengths[1:]
        if not isinstance(one, int) or not known
    ]
    with tf.control_dependencies([check for check in checks if check is not None]):
        return known[0] if known else tf.identity(lengths[0])


def unequal_lengths(found: str) -> tuple[str, str]:
    """The sentence and the hint of the error for a batch whose tensors have the lengths `found`."""
    return (
        f"{UNEQUAL_LENGTHS}: found {found} in one batch",
        "give each tensor of a batch one row per example, or train on one device",
    )


UNEQUAL_LENGTHS = "The tensors of a batch have different lengths, so that it cannot be divided among replicas"


# Instead of the number of examples in a part, where the tensors of a batch have different lengths.
UNEQUAL = -1
# The same, where the processes of a job have batches of different lengths, which should be alike.
DIFFERENT = -2


def lengths_of_parts(values: Sequence[Any], division: Division) -> list[Any]:
    """The number of examples in each part of a batch: integers, or int32 scalars; `UNEQUAL` if there are no parts."""
    lengths = [length(value) for value in values if has_examples(value)]
    if not lengths:
        return [UNEQUAL] * division.count
    first, *others = lengths
    if all(isinstance(one, int) for one in lengths):
        return rows(first, division) if set(lengths) == {first} else [UNEQUAL] * division.count
    equal = tf.reduce_all(tf.equal(tf.stack(others or [first]), first))
    return [tf.where(equal, one, UNEQUAL) for one in rows(first, division)]


def rows(examples: Any, division: Division) -> list[Any]:
    """The number of examples in each part of a batch of so many."""
    parts = [division.part(examples, index) for index in range(division.count)]
    return [end - begin for begin, end in parts]


def bounds(examples: Any, index: Any, division: Division) -> tuple[Any, Any, Any]:
    """Where part `index` of so many examples begins and ends, and its share.

    A part without examples has the share 0, and is where another one is.
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


def length(tensor: Any) -> Any:
    """How many examples `tensor` has: an integer, or an int32 scalar."""
    if isinstance(tensor, tf.SparseTensor):
        return tf.cast(tensor.dense_shape[0], tf.int32)
    if isinstance(tensor, tf.RaggedTensor):
        return tf.cast(tensor.nrows(), tf.int32)
    return tf.shape(tensor)[0] if tensor.shape[0] is None else tensor.shape[0]


def slice_examples(tensor: Any, begin: Any, end: Any) -> Any:
    """The examples from number `begin` to `end` of a dense, sparse or ragged tensor; all of one without examples."""
    if not has_examples(tensor):
        return tensor
    if not isinstance(tensor, tf.SparseTensor):
        return tensor[begin:end]
    rest = tf.zeros_like(tensor.dense_shape[1:])
    start = tf.concat([[tf.cast(begin, tf.int64)], rest], 0)
    size = tf.concat([[tf.cast(end - begin, tf.int64)], tensor.dense_shape[1:]], 0)
    return tf.sparse.slice(tensor, start, size)
