"""`custom`: data parallelism on the devices of this machine, in one graph. The fastest strategy on CPUs.

There is one copy of the variables, on the first device. Logical CPU devices share the memory of the host, which
computes all their replicas, so that nothing is copied. With several GPUs the variables are copied to the others in each
step; use `mirrored` there. The step of one device is partitioned (see `tfdist.spmd`): each replica computes the
gradients of its part of the batch; they are added on the first device and applied there in one fused update. One graph
runs many steps. The variables need no scope; models and checkpoints are plain Keras.
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
        # The host computes for all logical CPU devices, which share its memory: nothing is copied between them.
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
