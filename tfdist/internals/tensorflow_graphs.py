"""Reads and changes operations of a graph that is still being traced, and computes the sizes of their results.

Written for TensorFlow 2.21.0; `tests/test_recomputation.py` fails when TensorFlow changes a part that this uses.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import keras
import tensorflow as tf

# Operations whose result shares the memory of their first argument.
_ALIASING = frozenset(
    ("Identity", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "PreventGradient", "IdentityN", "EnsureShape")
)
# Operations that read only the shape of their arguments; they run or are folded before the memory is needed.
OF_SHAPE = frozenset(("Shape", "ShapeN", "Size", "Rank", "BroadcastGradientArgs"))
# Operations without side effects that must not be copied because they belong to the graph itself.
_FRAME = frozenset(("Const", "Placeholder", "PlaceholderWithDefault", "NoOp"))


@functools.cache
def _is_of_tensorflow(kind: str) -> bool:
    return hasattr(tf.raw_ops, kind)


def is_pure(operation: tf.Operation) -> bool:
    """Whether the operation is deterministic and has no side effects.

    Operations of other packages, such as Horovod's collectives, may have effects that TensorFlow does not know.
    """
    if operation.type in _FRAME or operation.op_def.is_stateful or not _is_of_tensorflow(operation.type):
        return False
    return not any(tensor.dtype == tf.resource for tensor in (*operation.inputs, *operation.outputs))


def root(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor whose memory `tensor` shares; `tensor` if it shares none."""
    while tensor.op.type in _ALIASING:
        tensor = tensor.op.inputs[tensor.value_index if tensor.op.type == "IdentityN" else 0]
    return tensor


def bytes_of(tensor: tf.Tensor, unknown_length: int) -> int:
    """The size of a tensor in bytes; an axis of unknown length counts as `unknown_length`, and a variant as nothing."""
    if tensor.shape.rank is None:
        return unknown_length * max(1, tensor.dtype.size)
    lengths = (unknown_length if length is None else length for length in tensor.shape)
    return math.prod(lengths) * tensor.dtype.size


def barrier(tensor: tf.Tensor, name: str, after: Sequence[tf.Operation]) -> tf.Tensor:
    """Returns `tensor` once the operations `after` have run.

    TensorFlow's graph optimizer merges operations with the same inputs even if their control inputs differ, and removes
    `tf.identity`. It keeps this operation, which has the same kernel.
    """
    with (
        tensor.graph.as_default(),
        tf.control_dependencies(None),
        tf.control_dependencies(list(after)),
        tf.name_scope(f"{name}/"),
        tf.device(tensor.device),
    ):
        return tf.raw_ops.PreventGradient(input=tensor, message="held for a recomputation")


def copy(operation: tf.Operation, inputs: Sequence[tf.Tensor], name: str) -> tf.Operation:
    """A copy of the operation on other inputs, in the same graph and on the same device."""
    attributes = {key: value for key, value in operation.node_def.attr.items() if key != "_class"}
    dtypes = [tensor.dtype for tensor in operation.outputs]
    with operation.graph.as_default(), tf.control_dependencies(None):
        result = operation.graph._create_op_internal(
            operation.type, list(inputs), dtypes, name=f"{name}/", attrs=attributes, op_def=operation.op_def
        )
    result._set_device(operation.device)
    return result


def set_input(operation: tf.Operation, index: int, tensor: tf.Tensor) -> None:
    """Replaces input number `index` of an operation of a graph by a tensor of the same shape and dtype.

    The tensor may have been made after the operation; a negative index counts from the end.
    """
    operation._update_input(index % len(operation.inputs), tensor)


# Operations whose result has the values of an argument.
_PASSING_ON = ("Identity", "Reshape", "SelectV2", "Cast")


def compute_after(tensor: tf.Tensor, earlier: tf.Tensor) -> None:
    """Makes the graph compute `tensor` after `earlier`, unless `earlier` depends on it."""
    operation = tensor.op
    while operation.type in _PASSING_ON:
        same = [value for value in operation.inputs if value.shape.num_elements() == tensor.shape.num_elements()]
        if not same or tensor.shape.num_elements() is None:
            break
        operation = same[0].op
    if not _depends_on(earlier.op, operation):
        add_control_input(operation, earlier.op)


def _depends_on(operation: tf.Operation, wanted: tf.Operation) -> bool:
    seen, waiting = {operation.name}, [operation]
    while waiting:
        visited = waiting.pop()
        if visited.name == wanted.name:
            return True
        predecessors = {predecessor.name: predecessor for predecessor in sources(visited)}
        waiting += [predecessor for name, predecessor in predecessors.items() if name not in seen]
        seen |= set(predecessors)
    return False


def add_control_input(operation: tf.Operation, before: tf.Operation) -> None:
    """Makes an operation of a graph wait for another one, which may have been made after it."""
    operation._add_control_input(before)


def sources(operation: tf.Operation) -> list[tf.Operation]:
    """The operations for which `operation` waits."""
    return [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]


def effective(operations: Sequence[tf.Operation]) -> set[str]:
    """The names of the operations on which a side effect depends, such as the update of a variable."""
    waiting = [operation for operation in operations if operation.op_def.is_stateful]
    names = {operation.name for operation in waiting}
    while waiting:
        for source in sources(waiting.pop()):
            if source.name not in names:
                names.add(source.name)
                waiting.append(source)
    return names


def place(operation: tf.Operation) -> str:
    """The type of an operation, and the line of the user's code that made it."""
    frames = [frame for frame in operation.traceback or () if not _is_in_library(frame.filename)]
    where = f" in {Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else ""
    return f"`{operation.type}`{where}"


def _is_in_library(file: str) -> bool:
    return any(Path(file).is_relative_to(folder) for folder in _libraries())


@functools.cache
def _libraries() -> tuple[Path, ...]:
    packages = [Path(module.__file__ or "").parent for module in (tf, keras)]
    return Path(__file__).parents[1], *packages, Path(sys.prefix), Path(sys.base_prefix)
