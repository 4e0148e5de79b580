"""The cost of a partitioned step: FLOPs, those that every replica repeats, and the bytes that are exchanged."""

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
    """Counts that are taken while a step is partitioned.

    Attributes:
        flops: the FLOPs of the one-device step, as far as its shapes are known.
        repeated_flops: the part of `flops` that each replica computes redundantly from gathered values.
        repeated: the operations that are computed redundantly, with their FLOPs.
        gathered_bytes: the bytes of the values that are gathered in a step.
        reduced_bytes: the bytes of the values that are reduced in a step.
        gathers: the number of values that are gathered.
        reductions: the number of values that are reduced.
        refused: operations that were computed whole because their rule failed or did not fit their shapes.
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
        """The fraction of the FLOPs of a step that every replica repeats."""
        return self.repeated_flops / max(1, self.flops)

    def compute(
        self, operation: tf.Operation, inputs: Sequence[Placed], outputs: Sequence[Placed], *, repeated: bool
    ) -> None:
        """Counts an operation."""
        flops = estimated_flops(operation, [value.shape for value in inputs], [value.shape for value in outputs])
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
    """The FLOPs of an operation; an axis of unknown length counts as 1."""
    if operation.type in _FREE or not outputs or any(shape.rank is None for shape in inputs[:1]):
        return 0
    if operation.type in _REDUCTIONS:
        return _elements(inputs[0])
    return flops_of_product(operation, inputs, outputs) or _elements(outputs[0])


def flops_of_product(operation: tf.Operation, inputs: Shapes, outputs: Shapes) -> int:
    """The FLOPs of a matrix product or a convolution, and 0 for other operations; an unknown length counts as 1."""
    product = next((count for prefix, count in _PRODUCTS.items() if operation.type.startswith(prefix)), None)
    return 0 if product is None else 2 * product(operation, inputs, outputs)


def _matmul(operation: tf.Operation, inputs: Shapes, outputs: Shapes, transposed: str) -> int:
    summed = inputs[0][-2 if operation.get_attr(transposed) else -1]
    return _elements(outputs[0]) * (summed or 1)


def _einsum(operation: tf.Operation, inputs: Shapes, outputs: Shapes) -> int:
    labels = operation.get_attr("equation").decode().split("->")[0].replace(".", "").split(",")
    lengths: dict[str, int] = {}
    for letters, shape in zip(labels, inputs, strict=True):
        lengths |= dict(zip(reversed(letters), reversed(list(shape)), strict=False))
    return math.prod(length or 1 for length in lengths.values())


def _convolution(operation: tf.Operation, inputs: Shapes, outputs: Shapes) -> int:
    """The multiplications of a convolution or of one of its gradients: one per output element and filter weight."""
    backward = len(inputs) == 3
    result = inputs[2] if backward else outputs[0]
    kernel = outputs[0] if backward and "Filter" in operation.type else inputs[1]
    if kernel.rank is None:
        return _elements(result)
    # The filters of a depthwise convolution, [height, width, channels, multiplier], each see one channel.
    summed = kernel[:-2] if operation.type.startswith("Depthwise") else kernel[:-1]
    return _elements(result) * math.prod(length or 1 for length in summed)


_PRODUCTS: dict[str, Callable[[tf.Operation, Shapes, Shapes], int]] = {
    "MatMul": functools.partial(_matmul, transposed="transpose_a"),
    "BatchMatMul": functools.partial(_matmul, transposed="adj_x"),
    "Einsum": _einsum,
    "Conv2D": _convolution,
    "Conv3D": _convolution,
    "DepthwiseConv2d": _convolution,
}
