"""Training on parameter servers with bounded staleness.

    rounds     S + 1 steps at a time; the next round starts when all of them are done, so no step is staler than S
    clocks     a worker may be S steps ahead of the slowest one (Ho et al., NIPS 2013); with W workers no step is staler
               than (2 S + 1) (W - 1)

A clock is not tied to a process: any free process may take a clock's next steps. If a process is lost or slow, another
one continues its clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tfdist.interface.program import Steps
from tfdist.internals import tensorflow_coordinator
from tfdist.parameter_server import closure_data as data
from tfdist.parameter_server import closures
from tfdist.parameter_server.workers import SECONDS_BETWEEN_CHECKS, Watchdog


class RoundsProgram(closures.ClosureProgram):
    """Trains in rounds.

    Args:
        strategy: the strategy whose workers run the steps.
        steps: the steps of the training.
        staleness: S.
    """

    def __init__(self, strategy: Any, steps: Steps, staleness: int):
        self._steps_of_a_round = staleness + 1
        super().__init__(strategy, steps, measures_staleness=staleness > 0)
        self._sequential = staleness == 0

    def _rounds(self, count: int) -> list[int]:
        return [min(self._steps_of_a_round, count - begin) for begin in range(0, count, self._steps_of_a_round)]


@dataclass
class Clock:
    """The clock of one worker.

    Attributes:
        done: the number of steps that are done.
        running: the handle of the running closure; `None` while the worker is idle.
        steps: the number of steps of the running closure.
    """

    done: int = 0
    running: Any = None
    steps: int = 0


def next_clock(clocks: Sequence[Clock], steps: int, slack: int) -> Clock | None:
    """Returns the clock that takes the next `steps`; `None` if all are busy or it would get more than `slack` ahead."""
    idle = [clock for clock in clocks if clock.running is None]
    slowest = min(clock.done for clock in clocks)
    candidate = min(idle, key=lambda clock: clock.done, default=None)
    return None if candidate is None or candidate.done + steps - 1 - slowest > slack else candidate


class ClocksProgram(closures.ClosureProgram):
    """Trains with one clock per worker.

    Args:
        strategy: the strategy whose workers run the steps.
        steps: the steps of the training.
        slack: S.
    """

    def __init__(self, strategy: Any, steps: Steps, slack: int):
        self._slack = slack
        # With closures of half the slack, a worker that is one closure ahead need not wait.
        self._length = max(1, min(data.STEPS_OF_A_CLOSURE, (slack + 1) // 2))
        super().__init__(strategy, steps)

    def _results_in_turn(self, state: Any, first: int, count: int) -> Iterator[tuple[list[closures.Result], bool]]:
        # A call ends when all its steps are done and visible to all workers, so each call starts with new clocks.
        clocks = [Clock() for _ in range(self._strategy.workers.count)]
        work = data.closures(self._feed_batches, state, first, count, self._length)
        scheduled, finite = 0, True
        results: list[closures.Result] = []
        closure = next(work, None)
        while closure is not None or any(clock.running is not None for clock in clocks):
            while closure is not None and finite:
                clock = next_clock(clocks, closure.steps, self._slack)
                if clock is None:
                    break
                clock.running, clock.steps = self._schedule(closure), closure.steps
                scheduled += closure.steps
                closure = next(work, None)
            finished = self._wait_for_any(clocks)
            results += finished
            finite = finite and all(result.finite for result in finished)
            if not finite:
                closure = None
        yield results, scheduled < count

    def _wait_for_any(self, clocks: list[Clock]) -> list[closures.Result]:
        """Waits until a closure has finished; returns the results of all that have."""
        watchdog = Watchdog(self._strategy.workers)
        busy = [clock for clock in clocks if clock.running is not None]
        while True:
            finished = [clock for clock in busy if tensorflow_coordinator.finished(clock.running, 0)]
            if finished:
                return [self._result(clock) for clock in finished]
            tensorflow_coordinator.finished(busy[0].running, SECONDS_BETWEEN_CHECKS)
            watchdog.check()

    def _result(self, clock: Clock) -> closures.Result:
        result: closures.Result = self._codec.unpack(clock.running.fetch())
        clock.running = None
        clock.done += clock.steps
        return result
