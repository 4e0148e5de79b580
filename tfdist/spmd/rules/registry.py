"""The registry of sharding rules: how replicas compute an operation on shards of its inputs.

For one input that is sharded along one axis, a rule returns how the other inputs must be sharded, and how the outputs
then are. An operation is computed whole, from gathered inputs, if it has no rule or its rule returns `None`. So no rule
is needed for a correct result, and `tests/spmd/test_rules.py` detects wrong rules: it compares each rule with the whole
operation, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.internals import tensorflow_graphs
from tfdist.spmd.placements import REPLICATE, Lengths, Monomial, Placed, Placement, Shard, dimensions


class Operation:
    """An operation, with what is known of its inputs while the graph is built.

    Attributes:
        type: TensorFlow's name of the operation, such as "MatMul".
        input_shapes: the global shapes; `None` for an axis of unknown length, and for a shape of unknown rank.
        output_shapes: the same for the outputs, as far as they were known when the step was traced.
        input_dtypes: of the inputs.
        output_dtypes: of the outputs.
        constants: the value of each input that is known.
        lengths: for each input that is a vector of lengths, what is known of its entries.
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

    def output_rank(self) -> int | None:
        """The rank of the first output; `None` if it is unknown."""
        shape = self.output_shapes[0]
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


# The sharding of an input or output: the axis for the proportions of the leading input, another placement, or `None`
# for a replicated value.
Sharding = int | Shard | None


@dataclass(frozen=True)
class OpSharding:
    """How each replica computes an operation on its shards.

    Attributes:
        inputs: the sharding of each input.
        outputs: for each output its sharding, or the reduction, such as "sum", if replicas compute partial values.
            `None` is for an output that depends on replicated inputs only, so that replicas compute the same.
        localized: for each input that is a length or a vector of lengths, the entry to replace by the local length.
        attributes: the attributes that differ from those of the whole operation.
        lengths: by output, the lengths of its axes, as far as more is known than when the step was traced.
        mean: whether partial sums are means over the local examples, to be weighted by the replica's share of the axis.
    """

    inputs: Sequence[Sharding]
    outputs: Sequence[Sharding | str]
    localized: Mapping[int, int] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    lengths: Mapping[int, Lengths] = field(default_factory=dict)
    mean: bool = False


# Takes an operation, the number of the leading input, and how that is sharded.
Rule = Callable[[Operation, int, Shard], OpSharding | None]

RULES: dict[str, tuple[Rule, frozenset[str]]] = {}


def rule(*types: str, attributes: str = "") -> Callable[[Rule], Rule]:
    """Registers a rule for operations of these types.

    Args:
        types: TensorFlow's names of the operations.
        attributes: the names of the attributes, except dtypes, that the rule takes into account, or that do not affect
            how the operation can be sharded. An operation with any other attribute has no rule.
    """

    def register(function: Rule) -> Rule:
        for kind in types:
            if kind in RULES:
                raise ValueError(f"two rules for `{kind}`")
            RULES[kind] = function, frozenset(attributes.split())
        return function

    return register


def rule_of(operation: Operation) -> Rule | None:
    """The rule for an operation; `None` if there is none, or if the rule does not cover one of its attributes."""
    registered = RULES.get(operation.type)
    if registered is None:
        return None
    function, covered = registered
    names = tensorflow_graphs.attribute_names(operation.type)
    return function if names is not None and names <= covered else None


def types() -> list[str]:
    """The types of operations that have a rule."""
    return sorted(RULES)


def placement_of(sharding: Sharding, shard: Shard) -> Placement:
    """The placement that a rule describes by `sharding`, with its leading input sharded by `shard`."""
    if sharding is None:
        return REPLICATE
    return sharding if isinstance(sharding, Shard) else shard.moved(sharding)


def is_divisible(operation: Operation, op_sharding: OpSharding, shard: Shard) -> bool:
    """Whether the axes that a rule shards are known to be divisible in these proportions."""
    inputs = zip(op_sharding.inputs, operation.input_dtypes, operation.input_shapes, operation.placements, strict=True)
    for sharding, dtype, shape, current in inputs:
        placement = placement_of(sharding, shard)
        if not isinstance(placement, Shard) or placement == current or dtype == tf.variant:
            continue
        if shape is None or not placement.divides(shape[placement.axis]):
            return False
    outputs = zip(op_sharding.outputs, operation.output_dtypes, operation.output_shapes, strict=True)
    for output, dtype, shape in outputs:
        placement = REPLICATE if isinstance(output, str) else placement_of(output, shard)
        if not isinstance(placement, Shard) or dtype == tf.variant:
            continue
        if shape is None:
            return False
        length = shape[placement.axis]
        if length is not None and not placement.divides(length):
            return False
    return True


def _lengths_of(shape: tf.TensorShape) -> list[int | None] | None:
    return None if shape.rank is None else shape.as_list()
