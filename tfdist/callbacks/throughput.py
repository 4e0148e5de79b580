"""Throughput and time to a target: training time without evaluation, and the steps that run in it.

Synopsis:

    timer = TimeToTarget(0.90)
    throughput = Throughput(global_batch_size=128)
    model.fit(x, y, batch_size=128, validation_data=(x_val, y_val), epochs=50, callbacks=[throughput, timer])
    # History, the progress bar, TensorBoard and every callback that comes later in the list see
    # `examples_per_second` and `step_seconds` beside `loss`.
    timer.seconds, timer.epoch  # (41.7, 6), or (None, None) if 90 % was never reached
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import keras

from tfdist.errors import UnknownNameError, UsageError
from tfdist.options import Finite, checks_arguments


class TrainingClock:
    """Splits an epoch's wall time into training and evaluation.

    Synopsis:

        >>> ticks = iter([0.0, 4.0, 5.0, 6.0])
        >>> clock = TrainingClock(now=lambda: next(ticks))
        >>> clock.begin_epoch()       # at 0 s
        >>> clock.begin_evaluation()  # at 4 s
        >>> clock.end_evaluation()    # at 5 s
        >>> clock.end_epoch()         # at 6 s
        >>> clock.train_seconds, clock.evaluation_seconds, clock.total_train_seconds
        (5.0, 1.0, 5.0)

    Attributes:
        train_seconds: training time of the last finished epoch; the first epoch includes the tracing of the training
            function.
        evaluation_seconds: evaluation time within that epoch.
        total_train_seconds: training time of all finished epochs.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self._now = now
        self.reset()

    def reset(self) -> None:
        self.train_seconds = 0.0
        self.evaluation_seconds = 0.0
        self.total_train_seconds = 0.0
        self._epoch_began: float | None = None
        self._evaluation_began: float | None = None

    def begin_epoch(self) -> None:
        self._epoch_began = self._now()
        self.evaluation_seconds = 0.0

    def begin_evaluation(self) -> None:
        """Notes the begin of an evaluation; outside of an epoch it is not counted."""
        if self._epoch_began is not None:
            self._evaluation_began = self._now()

    def end_evaluation(self) -> None:
        if self._evaluation_began is not None:
            self.evaluation_seconds += self._now() - self._evaluation_began
            self._evaluation_began = None

    def end_epoch(self) -> None:
        assert self._epoch_began is not None, "end_epoch without begin_epoch"
        self.train_seconds = self._now() - self._epoch_began - self.evaluation_seconds
        self.total_train_seconds += self.train_seconds
        self._epoch_began = None


class ClockedCallback(keras.callbacks.Callback):
    """A callback with a `TrainingClock`; a subclass calls `super()` first in the hooks that it overrides."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = TrainingClock()

    def restore_train_seconds(self, seconds: float) -> None:
        """Sets the training time that a resumed run had before."""
        self.clock.total_train_seconds = seconds

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self.clock.reset()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.clock.begin_epoch()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self.clock.begin_evaluation()

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        self.clock.end_evaluation()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.clock.end_epoch()


class StepCounter:
    """Counts the training steps that this `fit` has run, in batch hooks, which may be called once for many steps.

    Stock Keras with `steps_per_execution` and tfdist's loop call `on_train_batch_begin(first)` and
    `on_train_batch_end(last)` around a chunk of steps, and may not call them at all for a callback that does not need
    them. In that case the counter uses the announced length of the epoch.

    Synopsis:

        >>> counter = StepCounter()
        >>> counter.begin_epoch(steps=10)
        >>> counter.chunk_begins(0)
        >>> counter.chunk_ended(7)
        >>> counter.chunk_begins(8)
        >>> counter.chunk_ended(11)  # Keras rounds the last chunk up
        >>> counter.steps
        10
        >>> counter.end_epoch()
        >>> counter.begin_epoch(steps=10)
        >>> counter.chunk_begins(4)
        >>> counter.number(4), counter.number(6)  # a resumed epoch may begin at any batch
        (10, 12)

    Attributes:
        steps_before_epoch: the number of steps before the current epoch.
    """

    def __init__(self) -> None:
        self.steps_before_epoch = 0
        self._announced: int | None = None
        self._first: int | None = None
        self._end = 0

    def begin_epoch(self, steps: int | None) -> None:
        """Starts to count an epoch; `steps` is its length if it is known (`params["steps"]`)."""
        self._announced, self._first, self._end = steps, None, 0

    def chunk_begins(self, first: int) -> None:
        """Called before the step with index `first` in this epoch is run."""
        if self._first is None:
            self._first = first

    def chunk_ended(self, last: int) -> None:
        """Called after the step with index `last` in this epoch has been run."""
        self._end = last + 1

    def number(self, batch: int) -> int:
        """The number over the whole `fit`, from 0, of the step with index `batch` in this epoch."""
        return self.steps_before_epoch + batch - (self._first or 0)

    @property
    def steps(self) -> int | None:
        """The number of steps of this epoch: as counted, or as announced, or `None`."""
        if not self._end:
            return self._announced
        end = min(self._end, self._announced) if self._announced else self._end
        return end - (self._first or 0)

    def end_epoch(self) -> None:
        self.steps_before_epoch += self.steps or 0
        self._announced, self._first, self._end = None, None, 0


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

    @checks_arguments
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
        UsageError: an argument is of another type, or the mode is unknown; or, at the end of the first epoch with such
            metrics, `monitor` is not in the logs.
    """

    @checks_arguments
    def __init__(self, target: Finite, monitor: str = "val_accuracy", mode: str = "max", stop: bool = True):
        super().__init__()
        if mode not in ("max", "min"):
            raise UnknownNameError("mode", mode, ["max", "min"])
        self.target = target
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

    def checkpoint_state(self) -> dict[str, Any]:
        """The state that `tfdist.callbacks.Checkpoint` stores."""
        return {"seconds": self.seconds, "epoch": self.epoch, "seen": self._seen}

    def restore_checkpoint_state(self, state: dict[str, Any]) -> None:
        """Goes on with what the run before has reached."""
        self.seconds, self.epoch, self._seen = state["seconds"], state["epoch"], state["seen"]

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
