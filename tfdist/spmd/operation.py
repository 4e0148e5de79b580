"""What a rule sees of an operation of the one-device step: type, attributes, shapes, and what is known of inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.spmd.lengths import Lengths, Monomial
from tfdist.spmd.placements import Placed, Placement, Shard, dimensions


class Operation:
    """An operation and what is known of its inputs while the graph is made.

    Attributes:
        type: TensorFlow's name of the operation, such as "MatMul".
        input_shapes: of the whole inputs, `None` for an axis of unknown length; `None` for an unknown rank.
        output_shapes: the same for the outputs, as far as they were known when the step was traced.
        input_dtypes: of the inputs.
        output_dtypes: of the outputs.
        constants: the value of each input, where it is known.
        lengths: for each input that is a vector of lengths, what is known of its entries; see `tfdist.spmd.lengths`.
        placements: of the inputs.
    """

    def __init__(self, operation: tf.Operation, values: Sequence[Placed], placements: Sequence[Placement]):
        self._operation = operation
        self._values = values
        self.type: str = operation.type
        self.constants: list[np.ndarray | None] = [value.constant for value in values]
        self.lengths: list[Lengths | None] = [value.lengths for value in values]
        self.placements = list(placements)
        self.input_shapes = [_dims(value.shape) for value in values]
        self.output_shapes = [_dims(tensor.shape) for tensor in operation.outputs]
        self.input_dtypes = [tensor.dtype for tensor in operation.inputs]
        self.output_dtypes = [tensor.dtype for tensor in operation.outputs]

    def attribute(self, name: str) -> Any:
        """An attribute as Python's value; strings are decoded."""
        value = self._operation.get_attr(name)
        return value.decode() if isinstance(value, bytes) else value

    def rank(self, index: int = 0) -> int | None:
        """The rank of an input; `None` if it is unknown."""
        shape = self.input_shapes[index]
        return None if shape is None else len(shape)

    def output_rank(self, index: int = 0) -> int | None:
        """The rank of an output; `None` if it is unknown."""
        shape = self.output_shapes[index]
        return None if shape is None else len(shape)

    def length(self, index: int, axis: int) -> int | None:
        """The length of an axis of an input; `None` if it is unknown."""
        shape = self.input_shapes[index]
        return None if shape is None else shape[axis]

    def own_lengths(self, index: int) -> list[Monomial]:
        """The lengths of an input's axes; an unknown one is a symbol, which `Shape` of the same value gives too."""
        return dimensions(self._values[index]) or []

    def elements(self, index: int) -> int:
        """About how many elements an input has: axes of unknown length count as 64."""
        shape = self.input_shapes[index]
        return 0 if shape is None else math.prod(64 if length is None else length for length in shape)

    def is_cut(self, index: int, shard: Shard, axis: int) -> bool:
        """Whether an input is placed as `shard` is, on `axis`."""
        return self.placements[index] == shard.moved(axis)

    def axes(self, index: int, rank: int | None) -> set[int] | None:
        """The axes that a constant input names, counted from 0; `None` if they are not known."""
        constant = self.constants[index]
        if constant is None or rank is None:
            return None
        return {int(axis) % rank for axis in np.atleast_1d(constant)} if rank else set()

    def axis(self, index: int, rank: int | None) -> int | None:
        """The one axis that a constant input names, counted from 0; `None` if it is not known."""
        axes = self.axes(index, rank)
        return None if axes is None or len(axes) != 1 else next(iter(axes))


def _dims(shape: tf.TensorShape) -> list[int | None] | None:
    return None if shape.rank is None else shape.as_list()
