"""What a partitioned step costs: the floating-point operations that every replica repeats, and the exchanged bytes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import tensorflow as tf

from tfdist.spmd.placements import Placed

_FREE = frozenset(
    ("Const", "ReadVariableOp", "Shape", "Reshape", "ExpandDims", "Squeeze", "Transpose", "Pack", "ConcatV2", "Slice")
)
_REDUCTIONS = frozenset(("Sum", "Mean", "Max", "Min", "Prod", "BiasAddGrad", "L2Loss"))


@dataclass
class Cost:
    """What is counted while a step is partitioned.

    Attributes:
        flops: of the one-device step, as far as its shapes are known.
        repeated_flops: of those, what each replica computes whole from gathered values.
        repeated: the operations that do so, with their floating-point operations.
        gathered_bytes: of the values that replicas gather in a step.
        reduced_bytes: of the values that replicas add up in a step.
        gathers: how many values are gathered.
        reductions: how many values are reduced.
        refused: operations whose rule gave parts of other shapes than the whole, and were computed whole.
    """

    flops: int = 0
    repeated_flops: int = 0
    repeated: list[tuple[tf.Operation, int]] = field(default_factory=list)
    gathered_bytes: int = 0
    reduced_bytes: int = 0
    gathers: int = 0
    reductions: int = 0
    refused: list[str] = field(default_factory=list)

    @property
    def repeated_share(self) -> float:
        """The share of the floating-point operations of a step that every replica repeats."""
        return self.repeated_flops / max(1, self.flops)

    def compute(
        self, operation: tf.Operation, inputs: Sequence[Placed], outputs: Sequence[Placed], *, repeated: bool
    ) -> None:
        """Counts an operation."""
        flops = estimated_flops(operation, [one.shape for one in inputs], [one.shape for one in outputs])
        self.flops += flops
        if repeated:
            self.repeated_flops += flops
            self.repeated.append((operation, flops))

    def gather(self, tensor: tf.Tensor) -> None:
        """Counts a gathered value."""
        self.gathers += 1
        self.gathered_bytes += _bytes(tensor)

    def reduce(self, tensor: tf.Tensor) -> None:
        """Counts a reduced value."""
        self.reductions += 1
        self.reduced_bytes += _bytes(tensor)


def _bytes(tensor: tf.Tensor) -> int:
    return _elements(tensor.shape) * tensor.dtype.size


def _elements(shape: tf.TensorShape) -> int:
    return 0 if shape.rank is None else math.prod(length or 1 for length in shape)


Shapes = Sequence[tf.TensorShape]


def estimated_flops(operation: tf.Operation, inputs: Shapes, outputs: Shapes) -> int:
    """The floating-point operations of an operation; an axis of unknown length counts as 1."""
    if operation.type in _FREE or not outputs or any(shape.rank is None for shape in inputs[:1]):
        return 0
    if operation.type in _REDUCTIONS:
        return _elements(inputs[0])
    of_kind = next((count for kind, count in _PRODUCTS.items() if operation.type.startswith(kind)), None)
    return _elements(outputs[0]) if of_kind is None else 2 * of_kind(operation, inputs, outputs)


def _matrices(operation: tf.Operation, inputs: Shapes, outputs: Shapes, transposed: str) -> int:
    """Of a product of matrices."""
    summed = inputs[0][-2 if operation.get_attr(transposed) else -1]
    return _elements(outputs[0]) * (summed or 1)


def _einsum(operation: tf.Operation, inputs: Shapes, outputs: Shapes) -> int:
    del outputs
    labels = operation.get_attr("equation").decode().split("->")[0].replace(".", "").split(",")
    lengths: dict[str, int] = {}
    for one, shape in zip(labels, inputs, strict=True):
        lengths |= dict(zip(reversed(one), reversed(list(shape)), strict=False))
    return math.prod(length or 1 for length in lengths.values())


def _convolution(operation: tf.Operation, inputs: Shapes, outputs: Shapes) -> int:
    """Of a convolution, or of one of its gradients: the elements of its result, times those of the filter's window."""
    backward = len(inputs) == 3
    of_filter = backward and "Filter" in operation.type
    result = inputs[2] if backward else outputs[0]
    window = outputs[0] if of_filter else inputs[1]
    if window.rank is None:
        return _elements(result)
    return _elements(result) * math.prod(length or 1 for length in window[:-1])


_PRODUCTS: dict[str, Callable[[tf.Operation, Shapes, Shapes], int]] = {
    "MatMul": functools.partial(_matrices, transposed="transpose_a"),
    "BatchMatMul": functools.partial(_matrices, transposed="adj_x"),
    "Einsum": _einsum,
    "Conv2D": _convolution,
    "Conv3D": _convolution,
    "DepthwiseConv2d": _convolution,
}
