"""Examples per second and seconds per step in the logs of each epoch.

Synopsis:

    model.fit(x, y, batch_size=128, callbacks=[Throughput(global_batch_size=128)])
    # History, the progress bar, TensorBoard and every callback that comes later in the list see
    # `examples_per_second` and `step_seconds` beside `loss`.
"""

from __future__ import annotations

from typing import Any

from tfdist.callbacks.clock import ClockedCallback
from tfdist.callbacks.steps import StepCounter
from tfdist.errors import UsageError


class Throughput(ClockedCallback):
    """Adds `examples_per_second` and `step_seconds` to the epoch's logs.

    Only training time is counted: evaluation within the epoch is subtracted, and available as `evaluation_seconds`. The
    first epoch includes the tracing of the training function.

    Args:
        global_batch_size: examples per step over all replicas. It is needed in stock `fit`, which does not pass the
            number of examples per epoch to callbacks; a smaller last batch then counts as a full batch. tfdist's loop
            passes the number, so that the argument is not needed and the count is exact.

    Raises:
        UsageError: before the first step, if the number of examples per step is unknown.
    """

    def __init__(self, global_batch_size: int | None = None):
        super().__init__()
        if global_batch_size is not None and global_batch_size < 1:
            raise UsageError(
                f"Throughput(global_batch_size=...) is the number of examples per step. "
                f"Received: `{global_batch_size}`",
                "pass the number of examples of a batch over all replicas and processes",
            )
        self.global_batch_size = global_batch_size
        self._counter = StepCounter()

    @property
    def train_seconds(self) -> float:
        """Training time of the last epoch."""
        return self.clock.train_seconds

    @property
    def evaluation_seconds(self) -> float:
        """Evaluation time within the last epoch."""
        return self.clock.evaluation_seconds

    def batches_until_hook(self, batch: int) -> int | None:
        return None  # chunks may have any length

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        if self.global_batch_size is None and not self.params.get("examples"):
            raise UsageError(
                "Throughput does not know the number of examples per step: "
                "`fit` does not pass it, and `global_batch_size` is not set",
                "pass `Throughput(global_batch_size=...)`: the examples of a batch over all replicas and processes",
            )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self._counter.begin_epoch(self.params.get("steps"))

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._counter.chunk_begins(batch)  # a resumed epoch may begin at any batch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._counter.chunk_ended(batch)  # an epoch may end early

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        steps = self._counter.steps
        if logs is None or not steps or self.train_seconds <= 0:
            return
        logs["examples_per_second"] = self._examples(steps) / self.train_seconds
        logs["step_seconds"] = self.train_seconds / steps

    def _examples(self, steps: int) -> float:
        announced, epoch_steps = self.params.get("examples"), self.params.get("steps")
        if not announced:
            assert self.global_batch_size is not None  # checked by `on_train_begin`
            return float(steps * self.global_batch_size)
        return announced * steps / epoch_steps if epoch_steps else float(announced)
