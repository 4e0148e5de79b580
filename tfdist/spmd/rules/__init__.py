"""The sharding rules of the partitioner, by family; see `tfdist.spmd.rules.registry`."""

from tfdist.spmd.rules import (  # noqa: F401 - they register their rules
    elementwise,
    indexing,
    linear_algebra,
    neural,
    reductions,
    shapes,
)
from tfdist.spmd.rules.neural import PER_REPLICA_PREFIX, per_replica_sharding
from tfdist.spmd.rules.registry import OpSharding, Rule, Sharding, rule, rule_of, types

__all__ = [
    "PER_REPLICA_PREFIX",
    "OpSharding",
    "Rule",
    "Sharding",
    "per_replica_sharding",
    "rule",
    "rule_of",
    "types",
]
