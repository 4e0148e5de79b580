"""The rules of the partitioner, by family; see `tfdist.spmd.rules.registry`."""

from tfdist.spmd.rules import (  # noqa: F401 - they register their rules
    contractions,
    elementwise,
    images,
    indexing,
    joining,
    lists,
    matrices,
    neural,
    reductions,
    shapes,
    strings,
)
from tfdist.spmd.rules.registry import Cut, Local, Rule, rule, rule_of, types

__all__ = ["Cut", "Local", "Rule", "rule", "rule_of", "types"]
