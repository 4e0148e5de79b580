"""Towers: replicas of one process that share one copy of the variables, all in one graph.

The threads and contexts of a `MirroredStrategy` trace the towers side by side; it never makes a variable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.core import gradient_reduction
from tfdist.internals.tensorflow import without_strategy
from tfdist.strategies import _results as replica_results
from tfdist.strategies import base


class Tower(base.Replica):
    """A replica that shares the variables with the others, and meets them to add gradients and to update variables."""

    alone = False
    metrics_in_parts = False

    def __init__(self, index: int, count: int, home: str):
        super().__init__(index, count)
        self._home = home

    def all_reduce(self, tensors: list[Any]) -> list[Any]:
        def add(strategy: tf.distribute.Strategy, *parts: Any) -> list[Any]:
            with tf.device(self._home):
                return [self.add(strategy.experimental_local_results(part)) for part in parts]

        return meet(add, tensors) if tensors else []

    def add(self, parts: Sequence[Any]) -> Any:
        """The sum of the tensors of all towers."""
        return gradient_reduction.add(parts)

    def all_gather(self, structure: Any) -> Any:
        def join(strategy: tf.distribute.Strategy, *parts: Any) -> list[Any]:
            with tf.device(self._home):
                return replica_results.joined_parts(strategy, *parts)

        flat = tf.nest.flatten(structure)
        return tf.nest.pack_sequence_as(structure, meet(join, flat) if flat else [])

    def update_each_copy(self, function: Callable[[list[Any]], None], values: list[Any]) -> None:
        def update(strategy: tf.distribute.Strategy, *parts: Any) -> None:
            first = [strategy.experimental_local_results(part)[0] for part in parts]
            with without_strategy(), tf.device(self._home):
                function(first)

        meet(update, values)


def meet(function: Callable[..., Any], values: list[Any]) -> Any:
    """`function(strategy, *values)`, called once for all towers of this process, with their values."""
    return tf.distribute.get_replica_context().merge_call(function, args=tuple(values))
