"""`mirrored`: `tf.distribute.MirroredStrategy`, with a copy of every variable on each device of this machine. For
several GPUs of one machine.

TensorFlow manages the copies and computes the all-reduce; the step of one device is partitioned (see `tfdist.spmd`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.data_parallel.tf_distribute import MirroredMesh, TensorFlowVariables
from tfdist.strategies import base


class MirroredStrategy(base.Strategy):
    """Trains on several devices of this machine: all GPUs, or two logical CPU devices, unless `devices` is set.

    Args:
        speeds: sizes of the replicas' parts of a global batch in proportion to each other, such as "3,1"; "auto"
            measures them; `None` makes them equal. See `tfdist.interface.speeds`.
        options: see `tfdist.strategies.base.Strategy`.
    """

    name = "mirrored"
    default_cpus = 2

    def __init__(self, *, speeds: str | Sequence[int] | None = None, **options: Any):
        super().__init__(**options)
        self.divide_by_speeds(speeds)

    def set_up(self) -> None:
        # Logical CPU devices share their memory, so that a plain sum is the cheapest all-reduce.
        on_cpu = all(device.startswith("CPU") for device in self.devices)
        operations = tf.distribute.ReductionToOneDevice() if on_cpu else None
        strategy = tf.distribute.MirroredStrategy(self.devices, cross_device_ops=operations)
        self.variables = TensorFlowVariables(strategy, self.name)
        self._mesh = MirroredMesh(strategy, self.devices)

    @property
    def mesh(self) -> MirroredMesh:
        return self._mesh


STRATEGY = MirroredStrategy
