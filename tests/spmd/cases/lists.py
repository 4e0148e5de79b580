"""Lists of tensors, as loops write and read them."""

from __future__ import annotations

import tensorflow as tf

from tests.spmd.one_operation import Case, real


def pushed(x: tf.Tensor) -> list[tf.Tensor]:
    """Elements put at the end of a list, and taken from there."""
    handle = tf.raw_ops.EmptyTensorList(element_shape=tf.shape(x), max_num_elements=-1, element_dtype=x.dtype)
    for factor in (1.0, 2.0):
        handle = tf.raw_ops.TensorListPushBack(input_handle=handle, tensor=x * factor)
    handle, last = tf.raw_ops.TensorListPopBack(input_handle=handle, element_shape=-1, element_dtype=x.dtype)
    stack = tf.raw_ops.TensorListStack(input_handle=handle, element_shape=tf.shape(x), element_dtype=x.dtype)
    return [last, stack, tf.raw_ops.TensorListLength(input_handle=handle)]


def set_and_read(x: tf.Tensor) -> list[tf.Tensor]:
    """Elements of a reserved list."""
    handle = tf.raw_ops.TensorListReserve(element_shape=tf.shape(x), num_elements=3, element_dtype=x.dtype)
    for index in range(3):
        handle = tf.raw_ops.TensorListSetItem(input_handle=handle, index=index, item=x + float(index))
    item = tf.raw_ops.TensorListGetItem(input_handle=handle, index=1, element_shape=-1, element_dtype=x.dtype)
    some = tf.raw_ops.TensorListGather(input_handle=handle, indices=[2, 0], element_shape=-1, element_dtype=x.dtype)
    return [item, some]


def by_steps(x: tf.Tensor) -> tf.Tensor:
    """The steps of sequences as elements."""
    handle = tf.raw_ops.TensorListFromTensor(tensor=tf.transpose(x, [1, 0, 2]), element_shape=[7, 14])
    doubled = tf.raw_ops.AddN(inputs=[handle, handle])
    zeros = tf.raw_ops.ZerosLike(x=handle)
    joined = tf.raw_ops.AddN(inputs=[doubled, zeros])
    stack = tf.raw_ops.TensorListStack(
        input_handle=joined, element_shape=[7, 14], element_dtype=x.dtype, num_elements=3
    )
    return tf.transpose(stack, [1, 0, 2])


def scattered(x: tf.Tensor) -> tf.Tensor:
    """Elements put in another order."""
    steps = tf.transpose(x, [1, 0, 2])
    handle = tf.raw_ops.TensorListScatterV2(tensor=steps, indices=[2, 0, 1], element_shape=[7, 14], num_elements=3)
    handle = tf.raw_ops.TensorListResize(input_handle=handle, size=2)
    return tf.raw_ops.TensorListStack(input_handle=handle, element_shape=[7, 14], element_dtype=x.dtype)


CASES = [
    Case("TensorListPushBack", (real(7, 14),), "01", function=pushed),
    Case("TensorListSetItem", (real(7, 14),), "01", function=set_and_read),
    Case("TensorListFromTensor", (real(7, 3, 14),), "02", function=by_steps),
    Case("TensorListScatterV2", (real(7, 3, 14),), "02", function=scattered),
]
