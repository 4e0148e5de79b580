"""The rules of the partitioner, by family; see `tfdist.spmd.rules.registry`."""

from tfdist.spmd.rules import (  # noqa: F401 - they register their rules
    contractions,
    elementwise,
    indexing,
    joining,
    lists,
    neural,
    reductions,
    shapes,
)
from tfdist.spmd.rules.registry import Cut, Local, Rule, rule, rule_of, types

__all__ = ["Cut", "Local", "Rule", "rule", "rule_of", "types"]
