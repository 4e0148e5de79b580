"""How Keras reads the data for `fit`: its adapters, and the arrays inside them."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from keras.src import tree
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters import array_slicing, data_adapter_utils
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter

__all__ = ["ArrayDataAdapter", "GeneratorDataAdapter"]

# How many batches Keras reads from data of unknown shapes, to learn which dimensions change.
BATCHES_FOR_SPEC = data_adapter_utils.NUM_BATCHES_FOR_TENSOR_SPEC

# Functions of Keras' own `fit` that tfdist's loop uses too.
class_weight_to_sample_weights = data_adapter_utils.class_weight_to_sample_weights
get_data_adapter = data_adapters.get_data_adapter
flatten_with_path = tree.flatten_with_path
is_grain_dataset = data_adapters.is_grain_dataset
is_tf_dataset = data_adapters.is_tf_dataset
train_validation_split = array_slicing.train_validation_split
unpack_x_y_sample_weight = data_adapter_utils.unpack_x_y_sample_weight


def without_optionals(spec: Any) -> Any:
    """`spec` with `None` in place of the empty optionals that Keras' generators yield."""
    return tree.map_structure(lambda leaf: None if isinstance(leaf, tf.OptionalSpec) else leaf, spec)


def spec_of_batches(batches: list[Any]) -> Any:
    """The spec of data of which these are the first batches, as `as_yielded` returns them."""
    return tree.lists_to_tuples(data_adapter_utils.get_tensor_spec(batches))


def as_yielded(batch: Any) -> Any:
    """A batch of a Grain dataset as Keras' `from_generator` yields it, with an empty optional for each `None`."""

    def value_of(leaf: Any) -> Any:
        if leaf is None:
            return tf.experimental.Optional.empty(None)
        return data_adapter_utils.scipy_sparse_to_tf_sparse(leaf) if data_adapter_utils.is_scipy_sparse(leaf) else leaf

    return tree.lists_to_tuples(tree.map_structure(value_of, batch))


def traced_spec(spec: Any, examples: int | None) -> Any:
    """The spec of the batches for which a step is traced; `examples` is the size of every batch, if it is known."""

    def with_examples(leaf: Any) -> Any:
        if leaf is None or isinstance(leaf, tf.OptionalSpec):
            return None
        if examples is None or not isinstance(leaf, tf.TensorSpec) or not leaf.shape.rank:
            return leaf
        return tf.TensorSpec([examples, *leaf.shape[1:]], leaf.dtype)

    return tree.map_structure(with_examples, spec)


def standardized(adapter: Any, batch: Any) -> Any:
    """A batch of a `PyDataset` as its adapter yields it: `(x, y, sample_weight)` with the class weights applied."""
    return adapter._standardize_batch(batch)


def sliceable(adapter: ArrayDataAdapter) -> Any:
    """The arrays of an adapter as TensorFlow tensors of Keras' types, in the structure `(x, y, sample_weight)`."""
    arrays = array_slicing.convert_to_sliceable(adapter._inputs, target_backend="tensorflow")

    def to_tensor(array: Any) -> Any:
        return tf.convert_to_tensor(array) if isinstance(array, np.ndarray) else array

    return tree.map_structure(to_tensor, tree.lists_to_tuples(arrays))


def gather(arrays: Any, indices: tf.Tensor) -> Any:
    """The examples `indices` (int `[n]`) of every array of a structure that `sliceable` made."""

    def rows_of(array: Any) -> Any:
        if isinstance(array, array_slicing.TensorflowSparseWrapper):
            return array_slicing.slice_tensorflow_sparse_wrapper(array, tf.cast(indices, tf.int64))
        if isinstance(array, list | tuple | dict):
            return None  # Keras' `traverse` then descends into the structure
        return tf.gather(array, indices, axis=0) if tf.is_tensor(array) else array

    return tree.traverse(rows_of, arrays)


def batch_spec(arrays: Any) -> Any:
    """The specs of a batch of any size, from the arrays that `sliceable` made."""

    def spec_of(array: Any) -> Any:
        if isinstance(array, array_slicing.TensorflowSparseWrapper):
            return tf.SparseTensorSpec([None, *array.sparse.shape[1:]], array.sparse.dtype)
        if isinstance(array, list | tuple | dict):
            return None
        if isinstance(array, tf.RaggedTensor):
            shape = [None, *array.shape[1:]]
            return tf.RaggedTensorSpec(shape, array.dtype, array.ragged_rank, array.row_splits.dtype)
        return tf.TensorSpec([None, *array.shape[1:]], array.dtype)

    return tree.traverse(spec_of, arrays)


def number_of_examples(adapter: ArrayDataAdapter) -> int:
    """The length of the adapter's first array."""
    first = next(array for array in tree.flatten(adapter._inputs) if array is not None)
    return int(first.shape[0])
