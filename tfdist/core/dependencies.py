"""What a tensor of a step is computed from, read from its graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import tensorflow as tf

T = TypeVar("T")
# Operations that draw no random numbers, though TensorFlow calls some of them stateful.
_OF_VARIABLES = ("VarHandleOp", "ReadVariableOp", "Placeholder", "Const")


def depends_on(tensor: tf.Tensor, examples: Sequence[tf.Tensor], alike: Sequence[tf.Tensor] = ()) -> bool:
    """Whether `tensor`, of a graph, is computed from `examples`, from their number, or from random numbers.

    The lengths of axes other than the first do not count, since they are the same on all replicas.

    Args:
        tensor: of a graph.
        examples: the tensors of a replica's part of the global batch.
        alike: tensors that are the same on all replicas, whatever they were computed from.
    """
    ends = {key(one) for one in examples}
    seen = {key(one) for one in alike}
    waiting = [tensor]
    while waiting:
        one = waiting.pop()
        if key(one) in ends:
            return True
        if key(one) in seen:
            continue
        seen.add(key(one))
        if one.op.op_def.is_stateful and one.op.type not in _OF_VARIABLES:
            return True
        if not is_length_of_other_axis(one):
            waiting += before(one)
    return False


def before(tensor: tf.Tensor) -> list[tf.Tensor]:
    """The tensors that `tensor` is computed from, those of the outer graph too."""
    return [*tensor.op.inputs, *outside(tensor)]


def evaluated(
    tensor: tf.Tensor,
    known: dict[tuple[int, str], T],
    needs: Callable[[tf.Tensor], Sequence[tf.Tensor]],
    value: Callable[[tf.Tensor], T],
) -> T:
    """`value(tensor)`, after those of all tensors that it `needs`; all are noted in `known`, by their keys.

    Not by recursion, since graphs are deeper than Python's stack.
    """
    waiting = [tensor]
    while waiting:
        one = waiting[-1]
        if key(one) in known:
            waiting.pop()
            continue
        missing = [each for each in needs(one) if key(each) not in known]
        if missing:
            waiting += missing
        else:
            known[key(one)] = value(one)
    return known[key(tensor)]


def key(tensor: tf.Tensor) -> tuple[int, str]:
    """The identity of a tensor of a graph, for which TensorFlow may make several Python objects."""
    return id(tensor.graph), tensor.name


def is_random(tensor: tf.Tensor) -> bool:
    """Whether random numbers are drawn for `tensor`."""
    return _any(tensor, draws)


def reads_variable(tensor: tf.Tensor) -> bool:
    """Whether `tensor` is computed from a variable."""
    return _any(tensor, lambda operation: operation.type == "ReadVariableOp")


def draws(operation: tf.Operation) -> bool:
    """Whether an operation draws random numbers."""
    return "Random" in operation.type or operation.type in ("TruncatedNormal", "StatelessTruncatedNormalV2")


def _any(tensor: tf.Tensor, condition: Callable[[tf.Operation], bool]) -> bool:
    """Whether `condition` holds for an operation that `tensor` is computed by."""
    seen: set[tuple[int, str]] = set()
    waiting = [tensor]
    while waiting:
        one = waiting.pop()
        if condition(one.op):
            return True
        if key(one) not in seen:
            seen.add(key(one))
            waiting += before(one)
    return False


def is_length_of_other_axis(tensor: tf.Tensor) -> bool:
    """Whether `tensor` is `tf.shape(...)[axis]`, or a slice of it, without the first axis."""
    if tensor.op.type == "Unpack" and tensor.op.inputs[0].op.type == "Shape":
        return tensor.value_index > 0
    if tensor.op.type != "StridedSlice" or tensor.op.inputs[0].op.type != "Shape":
        return False
    begin = tf.get_static_value(tensor.op.inputs[1])
    return begin is not None and len(begin) == 1 and begin[0] > 0


def outside(tensor: tf.Tensor) -> Iterator[tf.Tensor]:
    """The tensors of the outer graph that an argument of an inner graph stands for."""
    if tensor.op.type == "Placeholder":
        for outside, inside in getattr(tensor.graph, "captures", ()):
            if inside is tensor and tf.is_symbolic_tensor(outside):
                yield outside
