"""How the coordinator waits for closures: those of a silent worker are given to another one."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from typing import Any

from tfdist.errors import ClusterError
from tfdist.internals import tensorflow_coordinator

# How often the coordinator looks whether any closure has ended, while it waits for the last one.
SECONDS_BETWEEN_LOOKS = 1.0
# The time that TensorFlow takes to notice that a worker was dropped, and to give its steps to others.
SECONDS_TO_GO_ON = 30.0


def results_of(strategy: Any, scheduled: Sequence[Any]) -> list[Any]:
    """The results of `scheduled` closures, as NumPy arrays; closures of a silent worker are given to another one.

    Raises:
        ClusterError: no worker has finished a closure for too long.
    """
    waiting, left = Waiting(strategy), len(scheduled)
    while not strategy.wait_for_schedule(SECONDS_BETWEEN_LOOKS):
        before, left = left, sum(not tensorflow_coordinator.finished(value, 0) for value in scheduled)
        if left < before:
            waiting = Waiting(strategy)
        waiting.look()
    return [value.fetch() for value in scheduled]


class Waiting:
    """Waits for closures of which none has ended since it was made; those of a silent worker go to another one."""

    def __init__(self, strategy: Any):
        self._strategy = strategy
        self._began, self._patience = time.monotonic(), strategy.timeout_seconds

    def look(self) -> None:
        """Called again and again; drops the workers that are silent.

        Raises:
            ClusterError: no worker has finished a closure for too long.
        """
        waited, timeout = time.monotonic() - self._began, self._strategy.timeout_seconds
        if waited < self._patience:
            return
        if self._patience > timeout:
            names = self._strategy.unreachable("worker") or self._strategy.names_of("worker")
            raise ClusterError.lost(f"No worker has finished a step for {waited:.0f} s: {', '.join(names)}")
        silent = self._strategy.drop_silent_workers()
        if silent:
            warnings.warn(f"Silent for {timeout:g} s: {', '.join(silent)}", stacklevel=2)
        self._patience += max(timeout, SECONDS_TO_GO_ON)
