"""A `tf.distribute.Strategy` over a `ProcessGroup`, for stock Keras: for its `model.fit`, and for custom loops.

    group = tfdist.strategy("horovod").group
    with StockKerasStrategy(group).scope():
        model = ...

tfdist's strategies do not use it: unlike it, they are exact for uneven batches, and merge metrics.
"""

from __future__ import annotations

import weakref
from typing import Any

import tensorflow as tf

from tfdist.groups import ProcessGroup
from tfdist.groups import packing as gradient_reduction
from tfdist.internals import tensorflow as tensorflow_internals


class StockKerasStrategy(tf.distribute.Strategy):
    """One replica per process, which trains on the data of its process.

    Gradients are summed over the processes before they are passed to Keras' optimizer. The logs of `fit` are those of
    the process.

    Args:
        group: the processes of the job.
        packing: how gradients are packed to be sent.
        device: the device of this process's replica.
    """

    def __init__(
        self,
        group: ProcessGroup,
        packing: gradient_reduction.Packing = gradient_reduction.Packing(1 << 20),  # noqa: B008 - frozen
        device: str = "CPU:0",
    ):
        self._group = group
        self._exchanges: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        reduce = gradient_reduction.packed(lambda sent: group.all_reduce(sent, self._next_name()), packing)
        super().__init__(tensorflow_internals.ReducingExtended(self, device, group.rank, group.size, reduce))

    def _next_name(self) -> str:
        """Returns a different name for each exchange in a graph, including the graphs inside it."""
        if tf.executing_eagerly():
            return "eager"
        graph = tf.compat.v1.get_default_graph()
        while (outer := getattr(graph, "outer_graph", None)) is not None and hasattr(outer, "outer_graph"):
            graph = outer
        self._exchanges[graph] = self._exchanges.get(graph, 0) + 1
        return f"keras.{self._exchanges[graph]}"
