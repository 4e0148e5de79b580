"""Measures training time without evaluation time, for the callbacks that report seconds.

Synopsis:

    >>> ticks = iter([0.0, 4.0, 5.0, 6.0])
    >>> clock = TrainingClock(now=lambda: next(ticks))
    >>> clock.begin_epoch()       # at 0 s
    >>> clock.begin_evaluation()  # at 4 s
    >>> clock.end_evaluation()    # at 5 s
    >>> clock.end_epoch()         # at 6 s
    >>> clock.train_seconds, clock.evaluation_seconds, clock.total_train_seconds
    (5.0, 1.0, 5.0)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import keras


class TrainingClock:
    """Splits an epoch's wall time into training and evaluation.

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
