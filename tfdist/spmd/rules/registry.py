"""The rules of the partitioner: how an operation is computed on the parts of its inputs.

A rule says, for one input that is cut along one axis, how the other inputs must be cut, and how the outputs are then.
An operation without a rule, or whose rule answers `None`, is computed whole from gathered inputs. So a rule is never
needed for a right result; a wrong one is found by `tests/spmd/test_rules.py`, which compares each of them, in float64,
with the whole operation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tfdist.internals import tensorflow_functions
from tfdist.spmd.lengths import Lengths
from tfdist.spmd.operation import Operation
from tfdist.spmd.placements import Shard

# How an input or output is cut: along an axis as the leading input is, in another way, or not at all.
Cut = int | Shard | None


@dataclass(frozen=True)
class Local:
    """How each replica computes an operation on its parts.

    Attributes:
        inputs: how each input is cut; `None` for a whole one.
        outputs: how each output is cut, or the reduction whose terms the replicas compute, as "sum"; `None` for an
            output that follows from the whole inputs alone, and so is the same on each replica.
        localized: for an input that is a vector of lengths, or one length, the entry that becomes that of the part.
        attributes: those that differ from the whole operation's.
        lengths: what is known of the axes of an output beyond what was known when the step was traced.
        mean: outputs that are terms of a sum are means over the part, and count with its share of the axis.
    """

    inputs: Sequence[Cut]
    outputs: Sequence[Cut | str]
    localized: Mapping[int, int] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    lengths: Mapping[int, Lengths] = field(default_factory=dict)
    mean: bool = False


# Of an operation, the number of the leading input, and how that is cut.
Rule = Callable[[Operation, int, Shard], Local | None]

_rules: dict[str, tuple[Rule, frozenset[str]]] = {}


def rule(*types: str, attributes: str = "") -> Callable[[Rule], Rule]:
    """Registers a rule for operations of these types.

    Args:
        types: TensorFlow's names of the operations.
        attributes: the names of the attributes, except dtypes, that the rule takes into account, or knows to be
            without effect on how the operation can be cut. An operation with any other attribute has no rule.
    """

    def register(function: Rule) -> Rule:
        for kind in types:
            if kind in _rules:
                raise ValueError(f"two rules for `{kind}`")
            _rules[kind] = function, frozenset(attributes.split())
        return function

    return register


def rule_of(operation: Operation) -> Rule | None:
    """The rule for an operation; `None` if there is none, or if it does not know one of the attributes."""
    found = _rules.get(operation.type)
    if found is None:
        return None
    names = tensorflow_functions.attribute_names(operation.type)
    return found[0] if names is not None and names <= found[1] else None


def types() -> list[str]:
    """The types of operations that have a rule."""
    return sorted(_rules)
