"""`custom`: data parallelism on the devices of this machine in a graph of our own. The fastest strategy on CPUs.

There is one copy of the variables, on the first device: other CPU devices read it where it is, while other GPUs are
sent it in each step, so that `mirrored` is the choice for several GPUs. Each replica computes the gradients of its part
of the batch on its own device. The gradients are packed, added on the first device, and applied in one fused update,
all inside one graph that runs many steps. One copy cannot drift apart and needs no scope; models and checkpoints are
plain Keras.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.core import gradient_reduction
from tfdist.internals.tensorflow import without_strategy
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
                return [gradient_reduction.add(strategy.experimental_local_results(part)) for part in parts]

        return _meet(add, tensors) if tensors else []

    def all_gather(self, structure: Any) -> Any:
        def join(strategy: tf.distribute.Strategy, *parts: Any) -> list[Any]:
            with tf.device(self._home):
                return base.joined_parts(strategy, *parts)

        flat = tf.nest.flatten(structure)
        return tf.nest.pack_sequence_as(structure, _meet(join, flat) if flat else [])

    def update_each_copy(self, function: Callable[[list[Any]], None], values: list[Any]) -> None:
        def update(strategy: tf.distribute.Strategy, *parts: Any) -> None:
            first = [strategy.experimental_local_results(part)[0] for part in parts]
            with without_strategy(), tf.device(self._home):
                function(first)

        _meet(update, values)


def _meet(function: Callable[..., Any], values: list[Any]) -> Any:
    return tf.distribute.get_replica_context().merge_call(function, args=tuple(values))


class CustomStrategy(base.Strategy):
    """Trains on all GPUs, or on the CPU as one device, unless `devices` is set; one copy of the variables."""

    name = "custom"

    def set_up(self) -> None:
        # Only its threads and contexts are used, to trace the towers side by side; it never makes a variable.
        self._towers = tf.distribute.MirroredStrategy(self.devices) if len(self.devices) > 1 else None

    @property
    def alone(self) -> bool:
        return self._towers is None

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        return tf.device(self.devices[0])

    def run(self, step: base.Step) -> list[Any]:
        if self._towers is None:
            with tf.device(self.devices[0]):
                return [step(base.Replica())]

        def on_tower() -> Any:
            return step(Tower(base.current_index(), len(self.devices), self.devices[0]))

        return base.local_results(self._towers, self._towers.run(on_tower))


STRATEGY = CustomStrategy
