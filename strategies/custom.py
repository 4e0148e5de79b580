"""`custom`: data parallelism on the devices of this machine in a graph of our own. The fastest strategy on CPUs.

There is one copy of the variables, on the first device: other CPU devices read it where it is, while other GPUs are
sent it in each step, so that `mirrored` is the choice for several GPUs. Each replica computes the gradients of its part
of the batch on its own device. The gradients are packed, added on the first device, and applied in one fused update,
all inside one graph that runs many steps. One copy cannot drift apart and needs no scope; models and checkpoints are
plain Keras.
"""

from __future__ import annotations

import contextlib
from typing import Any

import tensorflow as tf

from tfdist.spmd import Mesh
from tfdist.strategies import base
from tfdist.strategies._towers import Tower
from tfdist.strategies._traits import Traits


class CustomStrategy(base.Strategy):
    """Trains on all GPUs, or on the CPU as one device, unless `devices` is set; one copy of the variables."""

    name = "custom"
    takes_speeds = True

    def set_up(self) -> None:
        # Only its threads and contexts are used, to trace the towers side by side; it never makes a variable.
        self._towers = tf.distribute.MirroredStrategy(self.devices) if len(self.devices) > 1 else None
        self._mesh = Mesh(self.devices)

    @property
    def mesh(self) -> Mesh:
        return self._mesh

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
TRAITS = Traits(options=("speeds",))
