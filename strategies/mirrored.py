"""`mirrored`: `tf.distribute.MirroredStrategy`, a copy of every variable on each device of this machine.

TensorFlow keeps the copies and computes the all-reduce; the step of one device is partitioned (see `tfdist.spmd`).
"""

from __future__ import annotations

import tensorflow as tf

from tfdist.data_parallel import distribute
from tfdist.interface.traits import Traits


class MirroredStrategy(distribute.DistributeStrategy):
    """Trains on several devices of this machine: all GPUs, or two logical CPU devices, unless `devices` is set."""

    name = "mirrored"
    takes_speeds = True
    default_cpus = 2

    def set_up(self) -> None:
        # Between logical CPU devices, which share their memory, a plain sum is the cheapest reduction.
        on_cpu = all(device.startswith("CPU") for device in self.devices)
        operations = tf.distribute.ReductionToOneDevice() if on_cpu else None
        self.tf_strategy = tf.distribute.MirroredStrategy(self.devices, cross_device_ops=operations)
        self._mesh = distribute.MirroredMesh(self.tf_strategy, self.devices)

    @property
    def mesh(self) -> distribute.MirroredMesh:
        return self._mesh


STRATEGY = MirroredStrategy
TRAITS = Traits(options=("speeds",))
