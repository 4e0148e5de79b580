"""The replicas of a `tf.distribute.Strategy` on the devices of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist import spmd
from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.internals import tensorflow_variables
from tfdist.internals.keras import tf_variable


class MirroredMesh(spmd.Mesh):
    """Replicas of a `tf.distribute.Strategy`, each of which has a copy of the variables.

    Args:
        strategy: makes the variables, and computes the all-reduce.
        devices: the devices of this process's replicas.
    """

    def __init__(self, strategy: tf.distribute.Strategy, devices: Sequence[str]):
        super().__init__(devices)
        self.copies = len(devices)
        self._strategy = strategy

    def begin(self, variables: Sequence[Any]) -> None:
        for first, *others in filter(None, map(copies_of_sum, variables)):
            # A step reads and changes only the first copy.
            first.assign(tf.add_n([copy.read_value() for copy in (first, *others)]))
            for copy in others:
                copy.assign(tf.zeros_like(copy))

    def captured(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        variable = tensorflow_variables.container(tensor)
        if variable is None or tensorflow_variables.is_sum_of_copies(variable):
            return [tensor] * self.copies
        return [copy.handle for copy in tensorflow_variables.copies(variable)]

    def all_reduce(
        self, values: Sequence[Sequence[tf.Tensor]], reduction: str, gradients: bool = False
    ) -> list[list[tf.Tensor]]:
        del gradients
        if reduction != "sum":
            return [self._on_each_copy(spmd.reduced, terms, reduction) for terms in values]
        # TensorFlow adds int32 on the host, and does not reduce it together with other dtypes.
        on_host = [terms[0].dtype == tf.int32 for terms in values]
        sums = {
            key: iter(
                self._sums([terms for terms, is_on_host in zip(values, on_host, strict=True) if is_on_host is key])
            )
            for key in set(on_host)
        }
        return [next(sums[key]) for key in on_host]

    def _sums(self, values: Sequence[Sequence[tf.Tensor]]) -> list[list[tf.Tensor]]:
        with self._strategy.scope():
            per_replica = [tensorflow_internals.per_replica(terms) for terms in values]
            sums = self._strategy.extended.batch_reduce_to(
                tf.distribute.ReduceOp.SUM, [(value, value) for value in per_replica]
            )
        return [list(self._strategy.experimental_local_results(value)) for value in sums]

    def all_gather(self, values: Sequence[Sequence[tf.Tensor]], shards: Sequence[spmd.Shard]) -> list[list[tf.Tensor]]:
        return [self._on_each_copy(spmd.joined, parts, shard) for parts, shard in zip(values, shards, strict=True)]

    def once(self, compute: Callable[[], list[tf.Tensor]], like: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
        del like
        with self.on_copy(0):
            results = compute()
        return [self._on_each_copy(tf.identity, result) for result in results]

    def _on_each_copy(self, compute: Callable[..., tf.Tensor], *arguments: Any) -> list[tf.Tensor]:
        results = []
        for position in range(self.copies):
            with self.on_copy(position):
                results.append(compute(*arguments))
        return results


def copies_of_sum(variable: Any) -> list[Any]:
    """The copies of a variable whose value is their sum, such as the state of a metric; empty for other variables."""
    tf_value = tf_variable(variable)
    return tensorflow_variables.copies(tf_value) if tensorflow_variables.is_sum_of_copies(tf_value) else []
