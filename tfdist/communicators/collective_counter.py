"""How many collective operations of this process have begun, and how many have ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


class CollectiveCounter:
    """Counts the collectives that began and those that ended, in graphs or outside."""

    def __init__(self) -> None:
        with tf.device("CPU:0"):
            self._begun = tf.Variable(0, trainable=False, dtype=tf.int64)
            self._ended = tf.Variable(0, trainable=False, dtype=tf.int64)

    def counts(self) -> tuple[int, int]:
        """How many collectives have begun, and how many have ended."""
        ended = int(self._ended.numpy())  # first, so that it is never the larger one
        return int(self._begun.numpy()), ended

    def around(self, make: Callable[[], tf.Tensor], inputs: Sequence[tf.Tensor]) -> tf.Tensor:
        """What the collective that `make` adds to the graph, or runs at once, gives; it waits for others, not `inputs`.

        The collective begins when its inputs are there: the time to compute them is not spent waiting.
        """
        with tf.control_dependencies(inputs):
            begun = self._count(self._begun)
        with tf.control_dependencies([begun]):
            result = make()
        with tf.control_dependencies([result]):
            self._count(self._ended)
        return result

    def _count(self, variable: tf.Variable) -> Any:
        # On its own device, not that of the collective. The operation and not the method: it is no assignment of the
        # step, on which replicas would agree.
        with tf.device(variable.device):
            return tf.raw_ops.AssignAddVariableOp(resource=variable.handle, value=tf.constant(1, tf.int64))
