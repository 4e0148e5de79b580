"""The registry of sharding rules: how replicas compute an operation on shards of its inputs.

For one input that is sharded along one axis, a rule returns how the other inputs must be sharded, and how the outputs
then are. An operation is computed whole, from gathered inputs, if it has no rule or its rule returns `None`. So no rule
is needed for a correct result, and `tests/spmd/test_rules.py` detects wrong rules: it compares each rule with the whole
operation, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tfdist.internals import tensorflow_functions
from tfdist.spmd.lengths import Lengths
from tfdist.spmd.operation import Operation
from tfdist.spmd.placements import Shard

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

_rules: dict[str, tuple[Rule, frozenset[str]]] = {}


def rule(*types: str, attributes: str = "") -> Callable[[Rule], Rule]:
    """Registers a rule for operations of these types.

    Args:
        types: TensorFlow's names of the operations.
        attributes: the names of the attributes, except dtypes, that the rule takes into account, or that do not affect
            how the operation can be sharded. An operation with any other attribute has no rule.
    """

    def register(function: Rule) -> Rule:
        for kind in types:
            if kind in _rules:
                raise ValueError(f"two rules for `{kind}`")
            _rules[kind] = function, frozenset(attributes.split())
        return function

    return register


def rule_of(operation: Operation) -> Rule | None:
    """The rule for an operation; `None` if there is none, or if the rule does not cover one of its attributes."""
    registered = _rules.get(operation.type)
    if registered is None:
        return None
    function, covered = registered
    names = tensorflow_functions.attribute_names(operation.type)
    return function if names is not None and names <= covered else None


def types() -> list[str]:
    """The types of operations that have a rule."""
    return sorted(_rules)
