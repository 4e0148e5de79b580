"""An operation of the one-device step as sharding rules see it: its type, attributes, shapes, and known inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.spmd.lengths import Lengths, Monomial
from tfdist.spmd.placements import Placed, Placement, Shard, dimensions

# Stateful operations that each replica may run: assertions, and calls of functions whose operations are tested singly.
_RUN_EVERYWHERE = frozenset(("Assert", "If", "While", "Case", "NoOp"))


def runs_once(operation: tf.Operation) -> bool:
    """Whether an operation must run once per job: `tf.print`, Python functions, and draws without a seed.

    Operations that read or change a variable run once per copy of the variable instead.
    """
    resources = any(tensor.dtype == tf.resource for tensor in (*operation.inputs, *operation.outputs))
    return operation.op_def.is_stateful and not resources and operation.type not in _RUN_EVERYWHERE


class Operation:
    """An operation, with what is known of its inputs while the graph is built.

    Attributes:
        type: TensorFlow's name of the operation, such as "MatMul".
        input_shapes: the global shapes; `None` for an axis of unknown length, and for a shape of unknown rank.
        output_shapes: the same for the outputs, as far as they were known when the step was traced.
        input_dtypes: of the inputs.
        output_dtypes: of the outputs.
        constants: the value of each input that is known.
        lengths: for each input that is a vector of lengths, what is known of its entries; see `tfdist.spmd.lengths`.
        included: for each input that is a vector of axes, the axes that it surely contains.
        excluded: for each input that is a vector of axes, the axes that it surely does not contain.
        placements: of the inputs.
    """

    def __init__(self, operation: tf.Operation, values: Sequence[Placed], placements: Sequence[Placement]):
        self._operation = operation
        self._values = values
        self.type: str = operation.type
        self.constants: list[np.ndarray | None] = [value.constant for value in values]
        self.lengths: list[Lengths | None] = [value.lengths for value in values]
        self.included = [value.included for value in values]
        self.excluded = [value.excluded for value in values]
        self.placements = list(placements)
        self.input_shapes = [_lengths_of(value.shape) for value in values]
        self.output_shapes = [_lengths_of(tensor.shape) for tensor in operation.outputs]
        self.input_dtypes = [tensor.dtype for tensor in operation.inputs]
        self.output_dtypes = [tensor.dtype for tensor in operation.outputs]

    def attribute(self, name: str) -> Any:
        """An attribute as a Python value; bytes are decoded."""
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

    def dimensions(self, index: int) -> list[Monomial] | None:
        """The lengths of an input's axes, with a symbol for each unknown length; `None` for an unknown rank.

        `Shape` of the same value gives the same symbols.
        """
        return dimensions(self._values[index])

    def elements(self, index: int) -> int:
        """The approximate number of elements of an input: axes of unknown length count as 64."""
        shape = self.input_shapes[index]
        return 0 if shape is None else math.prod(64 if length is None else length for length in shape)

    def is_sharded(self, index: int, shard: Shard, axis: int) -> bool:
        """Whether an input is sharded along `axis` in the proportions of `shard`."""
        return self.placements[index] == shard.moved(axis)

    def axes(self, index: int, rank: int | None) -> set[int] | None:
        """The axes that a constant input lists, counted from 0; `None` if they are unknown."""
        constant = self.constants[index]
        if constant is None or rank is None:
            return None
        return {int(axis) % rank for axis in np.atleast_1d(constant)} if rank else set()

    def axis(self, index: int, rank: int | None) -> int | None:
        """The single axis that a constant input names, counted from 0; `None` if it is unknown."""
        axes = self.axes(index, rank)
        return None if axes is None or len(axes) != 1 else next(iter(axes))


def _lengths_of(shape: tf.TensorShape) -> list[int | None] | None:
    return None if shape.rank is None else shape.as_list()
