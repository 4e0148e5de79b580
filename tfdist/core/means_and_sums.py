"""Whether a scalar that a step computes is a mean over the examples or a sum, read from its graph.

The mean over a global batch is the sum over the replicas of share * mean; a sum over it is the sum of their sums. The
*degree* of a scalar says how it grows with the number of examples: 0 for a mean, 1 for a sum. It follows from the means
and sums over axes of examples in the graph, and from the divisions by the lengths of such axes.

`tfdist.core.example_axes` says which axes these are. Where the graph does not show the degree, a scalar counts as a
mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist.core import dependencies, example_axes
from tfdist.core.dependence import ALIKE, Dependences
from tfdist.core.example_axes import ExampleAxes

_SAME = ("Identity", "Cast", "Neg", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "CheckNumerics")
_MOVED = ("StridedSlice", "Transpose", "BroadcastTo", "Tile")
_LENGTHS = ("StridedSlice", "Unpack", "Size", "Prod")
_OF_ANY_NUMBER = ("Max", "Min", "All", "Any")


@dataclass(frozen=True)
class Summand:
    """One of the tensors that a scalar is the sum of.

    Attributes:
        tensor: the summand without its factor.
        factor: multiplies it, and does not depend on the examples.
        degree: of the tensor; `None` if the graph does not show it.
    """

    tensor: tf.Tensor
    factor: Any
    degree: int | None

    @property
    def is_sum(self) -> bool:
        """Whether it is a sum over the examples; if not, it is a mean, or of another degree."""
        return self.degree == 1


class Degrees:
    """The degrees of the tensors of a graph.

    Args:
        axes: of the examples.
        dependences: of the tensors on the examples.
    """

    def __init__(self, axes: ExampleAxes, dependences: Dependences):
        self._axes = axes
        self._dependences = dependences
        self._known: dict[tuple[int, str], int | None] = {}

    def know(self, alike: Sequence[tf.Tensor], means: Sequence[tf.Tensor]) -> None:
        """Notes tensors that are the same on all replicas, and others that count as means, whatever made them."""
        self._known |= {dependencies.key(one): 0 for one in (*means, *alike)}

    def summands(self, tensor: tf.Tensor, factor: Any = 1.0) -> list[Summand]:
        """The summands of `tensor`, which has no axis of examples: each is a mean or a sum over the examples."""
        degree = self.of(tensor)
        parts = [] if degree is not None else self._parts(tensor.op.type, list(tensor.op.inputs))
        if not parts:
            return [Summand(tensor, factor, degree)]
        return [found for one, times in parts for found in self.summands(one, factor * times)]

    def _parts(self, kind: str, inputs: Sequence[tf.Tensor]) -> list[tuple[tf.Tensor, Any]]:
        """The summands, with factors, of a tensor that is neither a mean nor a sum; none if the operation is no sum."""
        if kind in ("Identity", "AddV2", "Add", "AddN"):
            return [(one, 1.0) for one in inputs]
        if kind == "Sum" and inputs[0].op.type == "Pack" and inputs[0].shape.rank == 1:  # as Keras adds its losses
            return [(one, 1.0) for one in inputs[0].op.inputs]
        if kind in ("Neg", "Sub"):
            return [(one, sign) for one, sign in zip(inputs, (1.0, -1.0)[-len(inputs) :], strict=True)]
        if kind == "Mul":
            return [(one, other) for one, other in (inputs, inputs[::-1]) if _is_setting(other)][:1]
        return []

    def of(self, tensor: tf.Tensor) -> int | None:
        """The degree of `tensor`; `None` if it has none or the graph does not show it."""
        key = dependencies.key(tensor)
        if key not in self._known:
            self._known[key] = None
            self._known[key] = self._of(tensor)
        return self._known[key]

    def _of(self, tensor: tf.Tensor) -> int | None:
        kind, inputs = tensor.op.type, list(tensor.op.inputs)
        if self._axes.contracts(tensor):
            return self._plus(*map(self.of, inputs), 1)
        if kind in _LENGTHS and (length := self._length(tensor)) is not None:
            return length
        if kind in _RULES:
            return _RULES[kind](self, inputs)
        return self._of_another(tensor, kind, inputs)

    def _of_another(self, tensor: tf.Tensor, kind: str, inputs: Sequence[tf.Tensor]) -> int | None:
        if self._dependences.of(tensor) is ALIKE:
            return 0
        if self._has_examples(tensor):  # a value per example does not grow with their number
            return 0
        if kind not in _OF_ANY_NUMBER and any(map(self._has_examples, inputs)):
            return None
        return 0 if all(self.of(one) == 0 for one in inputs) else None

    def unchanged(self, inputs: Sequence[tf.Tensor]) -> int | None:
        return self.of(inputs[0])

    def total(self, inputs: Sequence[tf.Tensor]) -> int | None:
        axes = example_axes.summed_axes(*inputs)
        return None if axes is None else self._plus(self.of(inputs[0]), int(bool(axes & self._axes.of(inputs[0]))))

    def half_of_squares(self, inputs: Sequence[tf.Tensor]) -> int | None:
        return self._plus(self.of(inputs[0]), int(self._has_examples(inputs[0])))

    def product(self, inputs: Sequence[tf.Tensor]) -> int | None:
        return self._plus(*map(self.of, inputs))

    def quotient(self, inputs: Sequence[tf.Tensor]) -> int | None:
        below = self.of(inputs[1])
        return self._plus(self.of(inputs[0]), None if below is None else -below)

    def addition(self, inputs: Sequence[tf.Tensor]) -> int | None:
        degrees = {self.of(one) for one in inputs if not _is_zero(one)}
        return degrees.pop() if len(degrees) == 1 else None if degrees else 0

    def choice(self, inputs: Sequence[tf.Tensor]) -> int | None:
        return self.addition(inputs[1:])

    def _has_examples(self, tensor: tf.Tensor) -> bool:
        return bool(self._axes.of(tensor))

    def _length(self, tensor: tf.Tensor) -> int | None:
        """The degree of a length of an axis, or of a product of such lengths; `None` of another tensor."""
        source = tensor.op.inputs[0]
        if tensor.op.type == "Size":
            return int(self._has_examples(source))
        if tensor.op.type in ("StridedSlice", "Unpack"):
            axis = example_axes.length_of(tensor)
            return None if axis is None else int(axis[1] in self._axes.of(axis[0]))
        while source.op.type in _SAME:
            source = source.op.inputs[0]
        if source.op.type == "Shape":
            return int(self._has_examples(source.op.inputs[0]))
        return self._plus(*map(self.of, source.op.inputs)) if source.op.type == "Pack" else None

    @staticmethod
    def _plus(*degrees: int | None) -> int | None:
        return None if None in degrees else sum(degree for degree in degrees if degree is not None)


_Rule = Callable[[Degrees, Sequence[tf.Tensor]], int | None]
_RULES: dict[str, _Rule] = {
    "Sum": Degrees.total,
    "L2Loss": Degrees.half_of_squares,
    **dict.fromkeys(("Mean", *_SAME, *_MOVED), Degrees.unchanged),
    **dict.fromkeys(("Mul", "MulNoNan"), Degrees.product),
    **dict.fromkeys(("RealDiv", "DivNoNan", "Div"), Degrees.quotient),
    **dict.fromkeys(("AddV2", "Add", "Sub", "AddN"), Degrees.addition),
    "SelectV2": Degrees.choice,
}


def _is_zero(tensor: tf.Tensor) -> bool:
    """Whether `tensor` is a constant 0, with which Python's `sum` begins."""
    value = tf.get_static_value(tensor)
    return value is not None and not value.any()


def _is_setting(tensor: tf.Tensor) -> bool:
    """Whether `tensor` is a constant or a variable, such as the scale of losses."""
    while tensor.op.type in _SAME:
        tensor = tensor.op.inputs[0]
    return tensor.op.type in ("Const", "ReadVariableOp")
