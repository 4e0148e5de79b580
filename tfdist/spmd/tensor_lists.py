"""Lists of tensors, which loops read and write; a sharded list has shards of its elements.

An empty list, of whose elements nothing is known yet, becomes sharded when the first shard is appended.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist.internals import tensorflow_functions
from tfdist.spmd import local_shapes, meshes
from tfdist.spmd.cost import Cost
from tfdist.spmd.meshes import Mesh
from tfdist.spmd.placements import REPLICATE, Placed, Placement, Shard

EMPTY = frozenset(("EmptyTensorList", "TensorListReserve"))
# Operations that read a property of a list that follows from one replica's shard of it.
OF_SHAPE = frozenset(("TensorListLength", "TensorListElementShape"))


class EmptyList(Placed):
    """A list that has no elements yet."""

    def __init__(self, operation: tf.Operation, inputs: Sequence[Placed], tensors: Sequence[tf.Tensor]):
        super().__init__(REPLICATE, tensors, element_dtype=operation.get_attr("element_dtype"))
        self.operation = operation
        self.inputs = list(inputs)


def empty(mesh: Mesh, operation: tf.Operation, inputs: Sequence[Placed]) -> EmptyList:
    """A new list; `inputs` of the `operation` are the shape of an element, and a number of elements."""
    tensors = []
    for copy in range(mesh.copies):
        with mesh.on_copy(copy):
            tensors += tensorflow_functions.create(operation, [mesh.tensors(value)[copy] for value in inputs])
    return EmptyList(operation, inputs, tensors)


def split(mesh: Mesh, whole: Placed, shard: Shard) -> Placed:
    """Shards the elements of a replicated list."""
    parts = []
    for position, replica in enumerate(mesh.local):
        with mesh.on_replica(position):
            if isinstance(whole, EmptyList):
                shape, number = (mesh.read(value, position) for value in whole.inputs)
                constant = whole.inputs[0].constant
                if constant is not None and constant.ndim and constant.size <= shard.axis:
                    raise NotImplementedError("the elements of the list do not have the sharded axis")
                shape = local_shapes.local_lengths(shape, whole.inputs[0], shard.axis, shard, replica)
                parts += tensorflow_functions.create(whole.operation, [shape, number])
            else:
                elements = _elements(mesh.read(whole, position), whole.element_dtype)
                if elements.shape.rank is None:
                    raise NotImplementedError("a list of elements of unknown rank cannot be sharded")
                parts.append(_list(meshes.part_of(elements, shard.moved(shard.axis + 1), replica)))
    return Placed(shard, parts, element_dtype=whole.element_dtype)


def gathered(mesh: Mesh, cost: Cost, value: Placed, shard: Shard) -> Placed:
    """Gathers the elements of a sharded list."""
    parts = []
    for position, tensor in enumerate(value.tensors):
        with mesh.on_replica(position):
            parts.append(_elements(tensor, value.element_dtype))
    (copies,) = mesh.all_gather([parts], [shard.moved(shard.axis + 1)])
    cost.gather(copies[0])
    return Placed(REPLICATE, [_list(copy) for copy in copies], repeated=True, element_dtype=value.element_dtype)


def of_shape(operation: tf.Operation, part: tf.Tensor, placement: Placement, replica: int) -> tf.Tensor:
    """The result of an operation in `OF_SHAPE` on a list, from one replica's shard of it."""
    (result,) = tensorflow_functions.create(operation, [part])
    if operation.type == "TensorListLength" or not isinstance(placement, Shard):
        return result
    if result.shape.rank != 1:
        raise NotImplementedError("the shape of elements of unknown rank")
    length = result[placement.axis]
    whole = tf.where(length > 0, placement.whole_length(length, replica), length)
    return tf.tensor_scatter_nd_update(result, [[placement.axis]], [whole])


def _elements(handle: tf.Tensor, dtype: tf.DType | None) -> tf.Tensor:
    assert dtype is not None
    return tf.raw_ops.TensorListStack(input_handle=handle, element_shape=-1, element_dtype=dtype)


def _list(elements: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.TensorListFromTensor(tensor=elements, element_shape=tf.shape(elements)[1:])
