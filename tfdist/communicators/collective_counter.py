"""Counts the collective operations of this process that have begun, and those that have ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


class CollectiveCounter:
    """Counts collectives inside graphs and outside."""

    def __init__(self) -> None:
        with tf.device("CPU:0"):
            self._begun = tf.Variable(0, trainable=False, dtype=tf.int64)
            self._ended = tf.Variable(0, trainable=False, dtype=tf.int64)

    def counts(self) -> tuple[int, int]:
        """How many collectives have begun, and how many have ended."""
        ended = int(self._ended.numpy())  # read first, so that it never exceeds the other
        return int(self._begun.numpy()), ended

    def around(self, make: Callable[[], tf.Tensor], inputs: Sequence[tf.Tensor]) -> tf.Tensor:
        """Counts the collective that `make` adds to the graph, or runs eagerly; returns its result.

        It counts as begun once `inputs` are computed, so that time spent computing them is not taken for waiting.
        """
        with tf.control_dependencies(inputs):
            begun = self._count(self._begun)
        with tf.control_dependencies([begun]):
            result = make()
        with tf.control_dependencies([result]):
            self._count(self._ended)
        return result

    def _count(self, variable: tf.Variable) -> Any:
        # On the variable's device, not that of the collective. The raw operation, because replicas agree on what a
        # step assigns by the method.
        with tf.device(variable.device):
            return tf.raw_ops.AssignAddVariableOp(resource=variable.handle, value=tf.constant(1, tf.int64))
