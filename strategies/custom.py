"""`custom`: data parallelism on the devices of this machine in a graph of our own. The fastest strategy on CPUs.

There is one copy of the variables, on the first device. CPU devices of the host, which share its memory, are computed
by it without sending anything, while other GPUs are sent the copy in each step, so that `mirrored` is the choice for
several GPUs. The step of one device is partitioned (see `tfdist.spmd`): each replica computes the gradients of its part
of the batch, and they are added on the first device and applied there in one fused update, all inside one graph that
runs many steps. One copy cannot drift apart and needs no scope; models and checkpoints are plain Keras.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.spmd import Mesh
from tfdist.strategies import base


class CustomStrategy(base.Strategy):
    """Trains on all GPUs, or on the CPU as one device, unless `devices` is set; one copy of the variables.

    Args:
        speeds: sizes of the replicas' parts of a global batch in proportion to each other, such as "3,1"; "auto"
            measures them; `None` makes them equal. See `tfdist.interface.speeds`.
        options: see `tfdist.strategies.base.Strategy`.
    """

    name = "custom"

    def __init__(self, *, speeds: str | Sequence[int] | None = None, **options: Any):
        super().__init__(**options)
        self.divide_by_speeds(speeds)

    def set_up(self) -> None:
        # CPU devices share the memory of the host: it computes for all of them, so that nothing is sent between them.
        on_host = self.devices[0] == "CPU:0" and all(device.startswith("CPU:") for device in self.devices)
        self._mesh = Mesh(["CPU:0"] * len(self.devices) if on_host else self.devices)

    @property
    def mesh(self) -> Mesh:
        return self._mesh

    @property
    def alone(self) -> bool:
        return len(self.devices) == 1

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        return tf.device(self.devices[0])


STRATEGY = CustomStrategy
