"""What is known of values while the graph is made: constants, and lengths that are multiples of others.

Shapes are computed in the graph from the shapes of other values. Rules need to know them, so integers that follow from
known integers are computed at once, on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tfdist.internals import tensorflow_functions
from tfdist.spmd.lengths import Lengths, product
from tfdist.spmd.placements import REPLICATE, Placed, dimensions

# Larger constants stay operations of the graph.
_ELEMENTS = 4096
_FOLDED = 1024
# Operations that move the entries of these inputs without changing them.
_MOVES: dict[str, Callable[[int], range]] = {
    "Cast": lambda count: range(1),
    "ConcatV2": lambda count: range(count - 1),
    "ExpandDims": lambda count: range(1),
    "GatherV2": lambda count: range(1),
    "Identity": lambda count: range(1),
    "Pack": range,
    "Reshape": lambda count: range(1),
    "Slice": lambda count: range(1),
    "Squeeze": lambda count: range(1),
    "StridedSlice": lambda count: range(1),
}


def known(operation: tf.Operation, values: Sequence[Placed]) -> list[Placed] | None:
    """The outputs of an operation whose results are known; `None` if they are not."""
    shapes = [value.shape for value in values]
    dtypes = [tensor.dtype for tensor in operation.outputs]
    if operation.type == "Const":
        tensor = operation.outputs[0]
        if tensor.dtype == tf.string or (tensor.shape.num_elements() or 0) > _ELEMENTS:
            return None
        value = tf.get_static_value(tensor)
        return None if value is None else [_constant(value, dtypes[0])]
    if operation.type in ("Shape", "ShapeN") and all(shape.is_fully_defined() for shape in shapes):
        return [_constant(shape.as_list(), dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    if operation.type == "Size" and shapes[0].is_fully_defined():
        return [_constant(shapes[0].num_elements(), dtypes[0])]
    if operation.type == "Rank" and shapes[0].rank is not None:
        return [_constant(shapes[0].rank, dtypes[0])]
    return _folded(operation, values)


def _folded(operation: tf.Operation, values: Sequence[Placed]) -> list[Placed] | None:
    constants = [value.constant for value in values if value.constant is not None and value.constant.size <= _FOLDED]
    if not values or len(constants) < len(values) or not _can_fold(operation):
        return None
    try:
        found = tensorflow_functions.evaluated(operation, constants)
    except (tf.errors.OpError, ValueError, TypeError):  # as in the graph, it fails if it is reached when the step runs
        return None
    return [_constant(value, tensor.dtype) for value, tensor in zip(found, operation.outputs, strict=True)]


def _can_fold(operation: tf.Operation) -> bool:
    """Whether an operation computes few integers or truth values from its inputs alone."""
    whole_numbers = all(tensor.dtype.is_integer or tensor.dtype.is_bool for tensor in operation.outputs)
    shapes = [tensor.shape for tensor in operation.outputs]
    small = all(not shape.is_fully_defined() or shape.num_elements() <= _FOLDED for shape in shapes)
    return (
        whole_numbers
        and small
        and not operation.op_def.is_stateful
        and not tensorflow_functions.calls_functions(operation)
    )


def _constant(value: object, dtype: tf.DType) -> Placed:
    return Placed(REPLICATE, constant=np.asarray(value, dtype.as_numpy_dtype))


def lengths(operation: tf.Operation, values: Sequence[Placed]) -> list[Lengths | None]:
    """What is known of the entries of the outputs of an operation that computes lengths from `values`."""
    nothing: list[Lengths | None] = [None] * len(operation.outputs)
    if operation.type == "Shape":
        found = dimensions(values[0])
        return nothing if found is None else [[*found]]
    if operation.type == "Prod" and values[0].lengths is not None and operation.outputs[0].shape.rank == 0:
        return [[product(values[0].lengths)]]
    if operation.type == "Mul" and all(value.lengths is not None and len(value.lengths) == 1 for value in values):
        return [[product([value.lengths[0] for value in values if value.lengths is not None])]]
    if operation.type in _MOVES:
        return _moved(operation, values) or nothing
    return nothing


def _moved(operation: tf.Operation, values: Sequence[Placed]) -> list[Lengths | None] | None:
    """The entries of moved lengths: the operation is computed on their numbers in a list."""
    if not operation.outputs[0].dtype.is_integer or len(operation.outputs) > 1:
        return None
    entries: Lengths = []
    inputs: list[np.ndarray] = []
    moved = _MOVES[operation.type](len(values))
    for index, (value, tensor) in enumerate(zip(values, operation.inputs, strict=True)):
        if index not in moved:
            if value.constant is None:
                return None
            inputs.append(value.constant)
            continue
        if value.lengths is None or not value.shape.is_fully_defined():
            return None
        numbers = np.arange(len(entries), len(entries) + len(value.lengths))
        entries += value.lengths
        inputs.append(numbers.reshape(value.shape.as_list()).astype(tensor.dtype.as_numpy_dtype))
    try:
        (found,) = tensorflow_functions.evaluated(operation, inputs)
    except (tf.errors.OpError, ValueError, TypeError):
        return None
    return [[entries[number] for number in found.ravel()]]
