"""Counts the collective operations of this process: how many have begun and ended, their time, and their bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.groups import ExchangeTotals


class CollectiveCounter:
    """Counts collectives inside graphs and outside.

    The counts are one vector, so that a collective needs only two small additional operations: the numbers of
    collectives that have begun and ended, their seconds, and the bytes sent and received.
    """

    def __init__(self) -> None:
        with tf.device("CPU:0"):
            self._counts = tf.Variable(tf.zeros([5], tf.float64), trainable=False)

    def counts(self) -> tuple[int, int]:
        """How many collectives have begun, and how many have ended."""
        begun, ended, *_ = self._counts.numpy()
        return int(begun), int(ended)

    def exchanged(self) -> ExchangeTotals:
        """The exchanges so far; to be called while no collective is running."""
        _, ended, seconds, sent, received = self._counts.numpy().tolist()
        return ExchangeTotals(int(ended), seconds, int(sent), int(received))

    def around(self, make: Callable[[], tf.Tensor], inputs: Sequence[tf.Tensor]) -> tf.Tensor:
        """Counts the collective that `make` adds to the graph, or runs eagerly; returns its result.

        It counts as begun once `inputs` are computed, so that computing them does not count as waiting.
        """
        with tf.control_dependencies(inputs):
            began = self._now()
            begun = self._add([1, 0, 0, sum(map(_size_bytes, inputs)), 0])
        with tf.control_dependencies([begun, began]):
            result = make()
        # This counts when the graph runs. It also keeps a collective whose result this process does not use, if only
        # another process prints it: TensorFlow would prune it here, and the other process would wait forever.
        received = tf.raw_ops.Size(input=result, out_type=tf.int64) * result.dtype.size
        with tf.control_dependencies([result]):
            self._add([0, 1, self._now() - began, 0, received])
        return result

    def _now(self) -> tf.Tensor:
        with tf.device(self._counts.device):
            return tf.timestamp()

    def _add(self, counts: Sequence[Any]) -> Any:
        # On the variable's device, not that of the collective. The raw operation, because replicas synchronize what a
        # step assigns by the method.
        with tf.device(self._counts.device):
            if any(map(tf.is_tensor, counts)):
                value = tf.stack([tf.cast(count, tf.float64) for count in counts])
            else:
                value = tf.constant(counts, tf.float64)
            return tf.raw_ops.AssignAddVariableOp(resource=self._counts.handle, value=value)


def _size_bytes(tensor: tf.Tensor) -> Any:
    count = tensor.shape.num_elements()
    return tf.size(tensor, tf.int64) * tensor.dtype.size if count is None else count * tensor.dtype.size
