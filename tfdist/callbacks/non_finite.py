"""Stops training when the loss becomes NaN or infinite, and names the step.

Synopsis:

    checkpoint = Checkpoint("run/checkpoints", every_steps=100)
    model.fit(x, y, callbacks=[checkpoint, StopAtNonFiniteLoss(checkpoint)])
"""

from __future__ import annotations

import math
from typing import Any

import keras

from tfdist.callbacks.checkpoint import Checkpoint
from tfdist.errors import NonFiniteLossError
from tfdist.options import checks_arguments


class StopAtNonFiniteLoss(keras.callbacks.Callback):
    """Raises an error at the first step after which the loss is NaN or infinite.

    Args:
        checkpoint: the error names its last checkpoint.

    Raises:
        NonFiniteLossError: with the epoch and the step, both counted from 1.
    """

    raises_at_nan = True  # tfdist's loop then finds the step by itself, without a call of the hook at every step

    @checks_arguments
    def __init__(self, checkpoint: Checkpoint | None = None):
        super().__init__()
        self.checkpoint = checkpoint
        self._epoch = 0

    def batches_until_hook(self, batch: int) -> int | None:
        return None  # the loop calls the hook because of `raises_at_nan`

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        loss = (logs or {}).get("loss")
        if loss is None or math.isfinite(loss):
            return
        saved = self.checkpoint.saved if self.checkpoint is not None else None
        last_checkpoint = f"; the last good checkpoint is `{saved}`" if saved is not None else ""
        raise NonFiniteLossError(
            f"The loss became `{float(loss)}` in epoch {self._epoch + 1} at step {batch + 1}{last_checkpoint}",
            "lower the learning rate, clip the gradients (`clipnorm`), or look for bad values in the data",
        )
