"""Training seconds until a metric reaches a target.

Synopsis:

    timer = TimeToTarget(0.90)
    model.fit(x, y, validation_data=(x_val, y_val), epochs=50, callbacks=[timer])
    timer.seconds, timer.epoch  # (41.7, 6), or (None, None) if 90 % was never reached
"""

from __future__ import annotations

import warnings
from typing import Any

from tfdist.callbacks.clock import ClockedCallback
from tfdist.errors import UnknownNameError, UsageError


class TimeToTarget(ClockedCallback):
    """Measures the training time, without evaluation, until `monitor` reaches `target` at the end of an epoch.

    Args:
        target: the value to reach, in the unit of the metric.
        monitor: the name of the metric in the epoch's logs.
        mode: "max" if larger is better, "min" if smaller is.
        stop: whether training stops when the target is reached.

    Attributes:
        seconds: training seconds from the first step to the end of the epoch that reached the target; None until then.
        epoch: the number of that epoch, from 1; None until then.

    Raises:
        UsageError: the mode is unknown; or, at the end of the first epoch with such metrics, `monitor` is not in
            the logs.
    """

    def __init__(self, target: float, monitor: str = "val_accuracy", mode: str = "max", stop: bool = True):
        super().__init__()
        if mode not in ("max", "min"):
            raise UnknownNameError("mode", mode, ["max", "min"])
        self.target = float(target)
        self.monitor = monitor
        self.mode = mode
        self.stop = stop
        self.seconds: float | None = None
        self.epoch: int | None = None
        self._seen = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self.seconds, self.epoch = None, None
        self._seen = False

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        logs = logs or {}
        if self.monitor not in logs:
            self._refuse_unless_validation_is_due_later(logs)
            return
        self._seen = True
        if self.seconds is None and self._reached(float(logs[self.monitor])):
            self.seconds, self.epoch = self.clock.total_train_seconds, epoch + 1
            if self.stop:
                self.model.stop_training = True

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Warns if the metric was never in the logs."""
        if not self._seen:
            warnings.warn(
                f"TimeToTarget never saw `{self.monitor}`: nothing was evaluated during training",
                stacklevel=2,
            )

    def _reached(self, value: float) -> bool:
        return value >= self.target if self.mode == "max" else value <= self.target

    def _refuse_unless_validation_is_due_later(self, logs: dict[str, Any]) -> None:
        # With `validation_freq` most epochs have no `val_` metrics, which is not an error.
        if self.monitor.startswith("val_") and not any(name.startswith("val_") for name in logs):
            return
        names = ", ".join(f"`{name}`" for name in sorted(logs))
        raise UsageError(
            f"TimeToTarget monitors `{self.monitor}`, but the epoch's logs have {names}",
            "compile the model with that metric, or set `monitor` to one of these",
        )
