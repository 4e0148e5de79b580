"""Constant propagation: constants, and symbolic lengths, that are known while the graph is built.

A graph computes shapes from the shapes of other values. Rules need to know them, so integers that depend on known
integers only are computed immediately, on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tfdist.internals import tensorflow_graphs
from tfdist.spmd.placements import ONE, REPLICATE, Lengths, Placed, dimensions, product

# Constants with more elements than this stay operations of the graph.
_MAX_CONSTANT = 4096
_MAX_FOLDED = 1024
# Operations that move entries of their inputs without changing them, and the numbers of these inputs.
_MOVES: dict[str, Callable[[int], range]] = {
    **dict.fromkeys(
        ("Cast", "ExpandDims", "GatherV2", "Identity", "Reshape", "Slice", "Squeeze", "StridedSlice"),
        lambda count: range(1),
    ),
    "ConcatV2": lambda count: range(count - 1),
    "Pack": range,
}


def known(operation: tf.Operation, values: Sequence[Placed]) -> list[Placed] | None:
    """The outputs of an operation if they are constants; `None` if they are unknown."""
    shapes = [value.shape for value in values]
    dtypes = [tensor.dtype for tensor in operation.outputs]
    if operation.type == "Const":
        tensor = operation.outputs[0]
        if tensor.dtype == tf.string or (tensor.shape.num_elements() or 0) > _MAX_CONSTANT:
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
    constants = [value.constant for value in values if value.constant is not None]
    if not values or len(constants) < len(values) or not _can_fold(operation, constants):
        return None
    results = _evaluated(operation, constants)
    if results is None:
        return None
    return [_constant(value, tensor.dtype) for value, tensor in zip(results, operation.outputs, strict=True)]


def _can_fold(operation: tf.Operation, constants: Sequence[np.ndarray]) -> bool:
    """Whether an operation computes a few integers or booleans from its inputs alone."""
    shapes = [tensor.shape for tensor in operation.outputs]
    return (
        all(constant.size <= _MAX_FOLDED for constant in constants)
        and all(tensor.dtype.is_integer or tensor.dtype.is_bool for tensor in operation.outputs)
        and all(not shape.is_fully_defined() or shape.num_elements() <= _MAX_FOLDED for shape in shapes)
        and not operation.op_def.is_stateful
        and not tensorflow_graphs.calls_functions(operation)
    )


def _evaluated(operation: tf.Operation, inputs: Sequence[np.ndarray]) -> list[np.ndarray] | None:
    """The results of an operation; `None` if it fails, as it then does in the graph if the step reaches it."""
    try:
        return tensorflow_graphs.evaluated(operation, inputs)
    except (tf.errors.OpError, ValueError, TypeError):
        return None


def _constant(value: object, dtype: tf.DType) -> Placed:
    return Placed(REPLICATE, constant=np.asarray(value, dtype.as_numpy_dtype))


def note(operation: tf.Operation, values: Sequence[Placed], outputs: Sequence[Placed]) -> None:
    """Records on `outputs` the lengths and axes that follow from what is known of the inputs."""
    for value, lengths in zip(outputs, _lengths(operation, values), strict=True):
        if lengths is not None and value.lengths is None:
            value.lengths = lengths
    if operation.type == "BroadcastGradientArgs":
        _note_axes(values, outputs)


def _lengths(operation: tf.Operation, values: Sequence[Placed]) -> list[Lengths | None]:
    """What is known of the entries of each output of an operation that computes lengths from `values`."""
    if operation.type == "Shape" and (axes := dimensions(values[0])) is not None:
        return [[*axes]]
    if operation.type == "Prod" and values[0].lengths is not None and operation.outputs[0].shape.rank == 0:
        return [[product(values[0].lengths)]]
    if operation.type == "Mul" and all(value.lengths is not None and len(value.lengths) == 1 for value in values):
        return [[product([value.lengths[0] for value in values if value.lengths is not None])]]
    moved = _moved(operation, values) if operation.type in _MOVES else None
    return [None] * len(operation.outputs) if moved is None else [moved]


def _note_axes(values: Sequence[Placed], outputs: Sequence[Placed]) -> None:
    """Records the axes along which the gradient of each broadcast value is summed, as far as they are known.

    These are the axes of the common shape in which the value has length 1, or which it does not have.
    """
    if any(value.lengths is None for value in values):
        return
    rank = max(len(value.lengths or ()) for value in values)
    for value, output in zip(values, outputs, strict=True):
        lengths = [ONE] * (rank - len(value.lengths or ())) + list(value.lengths or ())
        output.included = frozenset(axis for axis, length in enumerate(lengths) if length == ONE)
        output.excluded = frozenset(axis for axis, length in enumerate(lengths) if length and length.factor > 1)


def _moved(operation: tf.Operation, values: Sequence[Placed]) -> Lengths | None:
    """The moved lengths: the operation is computed on the indices of the lengths in a list."""
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
    results = _evaluated(operation, inputs)
    return None if results is None else [entries[number] for number in results[0].ravel()]
