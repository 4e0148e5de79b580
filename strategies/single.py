"""`single`: one device. For a small model or one GPU, and as the baseline for all other strategies.

There is no `tf.distribute.Strategy`: variables are plain, and a step is Keras' own `train_step` in the shared loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.interface import devices as device_choice
from tfdist.strategies import base


class SingleStrategy(base.Strategy):
    """Trains on one device: unless `devices` is set, the first GPU, or the CPU if there is none.

    Args:
        exclusive: hides all other GPUs from TensorFlow, which would reserve their memory. No other strategy in this
            process can use them.
        options: see `tfdist.strategies.base.Strategy`.
    """

    name = "single"
    one_device = True

    def __init__(self, *, exclusive: bool = False, **options: Any):
        self._exclusive = exclusive
        super().__init__(**options)

    def choose_devices(self, wanted: int | str | Sequence[str] | None) -> list[str]:
        wanted = 1 if wanted is None else wanted
        return super().choose_devices(device_choice.hide_other_gpus(wanted) if self._exclusive else wanted)

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        return tf.device(self.devices[0])


STRATEGY = SingleStrategy
