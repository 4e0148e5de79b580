"""Lists of tensors, which loops read and write, in placements of their own.

A list of which nothing is known yet, since it is empty, becomes a list of parts when the first part is put in.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdist.internals import tensorflow_functions
from tfdist.spmd import meshes
from tfdist.spmd.cost import Cost
from tfdist.spmd.meshes import Mesh
from tfdist.spmd.placements import REPLICATE, Placed, Placement, Shard

EMPTY = frozenset(("EmptyTensorList", "TensorListReserve"))
# What follows from the parts of a list as well.
OF_SHAPE = frozenset(("TensorListLength", "TensorListElementShape"))


class Empty(Placed):
    """A list that has no elements yet."""

    def __init__(self, operation: tf.Operation, inputs: Sequence[Placed], tensors: Sequence[tf.Tensor]):
        super().__init__(REPLICATE, tensors, element_dtype=operation.get_attr("element_dtype"))
        self.operation = operation
        self.inputs = list(inputs)


def empty(mesh: Mesh, operation: tf.Operation, inputs: Sequence[Placed]) -> Empty:
    """A new list, from the inputs of the `operation` that makes it: the shape of an element, and a number."""
    tensors = []
    for copy in range(mesh.copies):
        with mesh.on_copy(copy):
            reads = [mesh.tensors(value)[copy] for value in inputs]
            tensors += tensorflow_functions.create(operation, reads)
    return Empty(operation, inputs, tensors)


def cut(mesh: Mesh, whole: Placed, shard: Shard) -> Placed:
    """A list of the parts of elements."""
    parts = []
    for position, replica in enumerate(mesh.local):
        with mesh.on_replica(position):
            if isinstance(whole, Empty):
                shape, number = (mesh.read(value, position) for value in whole.inputs)
                shape = _part_shape(shape, whole.inputs[0].constant, shard, replica)
                parts += tensorflow_functions.create(whole.operation, [shape, number])
            else:
                elements = _elements(mesh.read(whole, position), whole.element_dtype)
                if elements.shape.rank is None:
                    raise NotImplementedError("a list whose elements have an unknown rank is not cut")
                parts.append(_list(meshes.cut(elements, shard.moved(shard.axis + 1), replica)))
    return Placed(shard, parts, element_dtype=whole.element_dtype)


def gathered(mesh: Mesh, cost: Cost, value: Placed, shard: Shard) -> Placed:
    """A list of whole elements."""
    parts = []
    for position, tensor in enumerate(value.tensors):
        with mesh.on_replica(position):
            parts.append(_elements(tensor, value.element_dtype))
    (copies,) = mesh.all_gather([parts], [shard.moved(shard.axis + 1)])
    cost.gather(copies[0])
    return Placed(REPLICATE, [_list(copy) for copy in copies], repeated=True, element_dtype=value.element_dtype)


def of_shape(operation: tf.Operation, part: tf.Tensor, placement: Placement, replica: int) -> tf.Tensor:
    """The length of a list, or the shape of its elements, from the list of one replica's parts."""
    (found,) = tensorflow_functions.create(operation, [part])
    if operation.type == "TensorListLength" or not isinstance(placement, Shard):
        return found
    if found.shape.rank != 1:
        raise NotImplementedError("the shape of elements of an unknown rank")
    length = found[placement.axis]
    whole = tf.where(length > 0, placement.whole_length(length, replica), length)
    return tf.tensor_scatter_nd_update(found, [[placement.axis]], [whole])


def _part_shape(shape: tf.Tensor, constant: np.ndarray | None, shard: Shard, replica: int) -> tf.Tensor:
    """The shape of an element's part; -1 is an unknown rank or length."""
    if constant is not None:
        lengths = constant.copy()
        if lengths.ndim and lengths.size <= shard.axis:
            raise NotImplementedError("elements that have no such axis are not cut")
        if lengths.ndim and lengths[shard.axis] > 0:
            lengths[shard.axis] = shard.part(lengths[shard.axis], replica)
        return tf.constant(lengths)
    if shape.shape.rank == 0:
        return shape
    length = shape[shard.axis]
    part = tf.where(length > 0, shard.part(length, replica), length)
    return tf.tensor_scatter_nd_update(shape, [[shard.axis]], [part])


def _elements(handle: tf.Tensor, dtype: tf.DType | None) -> tf.Tensor:
    assert dtype is not None
    return tf.raw_ops.TensorListStack(input_handle=handle, element_shape=-1, element_dtype=dtype)


def _list(elements: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.TensorListFromTensor(tensor=elements, element_shape=tf.shape(elements)[1:])
