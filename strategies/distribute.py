"""What the strategies over one of TensorFlow's own synchronous strategies share.

Their scope makes the variables, a copy on each device, and their `run` calls the step on each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.strategies import base
from tfdist.tensorflow_internals import replica_local_updates


class MirroredReplica(base.Replica):
    """A replica inside `tf.distribute.Strategy.run`, with its own copy of the variables."""

    alone = False

    def all_reduce(self, tensors: list[Any]) -> list[Any]:
        if not tensors:
            return []
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tensors)

    def once_a_copy(self, function: Callable[[list[Any]], None], values: list[Any]) -> None:
        with replica_local_updates(tf.distribute.get_strategy()):
            function(values)


class DistributeStrategy(base.Strategy):
    """A strategy over one of TensorFlow's synchronous strategies, whose variables its scope makes."""

    tf_strategy: tf.distribute.Strategy

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        return self.tf_strategy.scope()

    def run(self, step: base.Step) -> list[Any]:
        def on_replica() -> Any:
            return step(MirroredReplica(base.current_index(), self.num_replicas))

        return base.local_results(self.tf_strategy, self.tf_strategy.run(on_replica))

    def check(self, model: Any) -> None:
        optimizer = getattr(model, "optimizer", None)
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        variables = [*model.variables, *(inner.variables if inner is not None else [])]
        outside = [v for v in variables if not self._is_ours(v)]
        if model.distribute_strategy is not self.tf_strategy or outside:
            what = f"variable `{outside[0].path}`" if outside else f"model `{model.name}`"
            raise UsageError(
                f"The {what} was made outside the scope of the strategy `{self.name}`",
                "make and compile the model, and make its optimizer, inside `with strategy.scope():`",
            )
        if inner is not None and inner._distribution_strategy is not self.tf_strategy:
            raise UsageError(
                f"The optimizer `{inner.name}` was made outside the scope of the strategy `{self.name}`",
                "make the optimizer, or pass its name to `compile`, inside `with strategy.scope():`",
            )

    def _is_ours(self, variable: Any) -> bool:
        return self.tf_strategy.extended.variable_created_in_scope(variable.value)
