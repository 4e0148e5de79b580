"""Steps on parameter servers whose staleness has a bound.

    rounds     S + 1 steps at a time, and the next ones when all of them are done: no step is staler than S
    clocks     a worker may be S steps ahead of the slowest one, as Ho et al., NIPS 2013, have it: with W workers no
               step is staler than (2 S + 1) (W - 1)

A worker here is whichever process takes the next steps of one clock. So the steps of a process that is lost, or slow to
come back, go on elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tfdist.interface.program import Steps
from tfdist.internals import tensorflow_coordinator
from tfdist.parameter_server import closure_data as data
from tfdist.parameter_server import closures as loop
from tfdist.parameter_server.workers import SECONDS_BETWEEN_LOOKS, Waiting


class RoundsProgram(loop.ClosureProgram):
    """Trains in rounds.

    Args:
        strategy: whose workers run the steps.
        steps: of the training.
        staleness: S.
    """

    def __init__(self, strategy: Any, steps: Steps, staleness: int):
        self._each = staleness + 1
        super().__init__(strategy, steps, measures_staleness=staleness > 0)
        self._one_by_one = staleness == 0

    def _rounds(self, count: int) -> list[int]:
        return [min(self._each, count - begin) for begin in range(0, count, self._each)]


@dataclass
class Clock:
    """The clock of one worker: how many steps it has done, and the closure that it runs, which has `steps` steps."""

    done: int = 0
    running: Any = None
    steps: int = 0


def next_clock(clocks: Sequence[Clock], steps: int, slack: int) -> Clock | None:
    """The clock that is to take the next `steps`; `None` if all are busy, or the last step would be too far ahead."""
    idle = [clock for clock in clocks if clock.running is None]
    slowest = min(clock.done for clock in clocks)
    free = min(idle, key=lambda clock: clock.done, default=None)
    return None if free is None or free.done + steps - 1 - slowest > slack else free


class ClocksProgram(loop.ClosureProgram):
    """Trains with a clock for each worker.

    Args:
        strategy: whose workers run the steps.
        steps: of the training.
        slack: S.
    """

    def __init__(self, strategy: Any, steps: Steps, slack: int):
        self._slack = slack
        # Of half the slack: a worker that is a closure ahead need not wait.
        self._length = max(1, min(data.STEPS_OF_A_CLOSURE, (slack + 1) // 2))
        super().__init__(strategy, steps)

    def _results_in_turn(self, state: Any, first: int, count: int) -> Iterator[tuple[list[loop.Result], bool]]:
        # A call ends when all its steps are done, and all workers see them: the clocks start anew.
        clocks = [Clock() for _ in range(self._strategy.workers.count)]
        work = data.closures(self._given, state, first, count, self._length)
        given, finite = 0, True
        results: list[loop.Result] = []
        next_one = next(work, None)
        while next_one is not None or any(clock.running is not None for clock in clocks):
            while next_one is not None and finite:
                free = next_clock(clocks, next_one.steps, self._slack)
                if free is None:
                    break
                free.running, free.steps = self._schedule(next_one), next_one.steps
                given += next_one.steps
                next_one = next(work, None)
            ended = self._ended(clocks)
            results += ended
            finite = finite and all(result.finite for result in ended)
            if not finite:
                next_one = None
        yield results, given < count

    def _ended(self, clocks: list[Clock]) -> list[loop.Result]:
        """Waits until a closure has ended; returns the results of those that have."""
        waiting = Waiting(self._strategy.workers)
        busy = [clock for clock in clocks if clock.running is not None]
        while True:
            ended = [clock for clock in busy if tensorflow_coordinator.finished(clock.running, 0)]
            if ended:
                return [self._result(clock) for clock in ended]
            tensorflow_coordinator.finished(busy[0].running, SECONDS_BETWEEN_LOOKS)
            waiting.look()

    def _result(self, clock: Clock) -> loop.Result:
        result: loop.Result = self._codec.unpack(clock.running.fetch())
        clock.running = None
        clock.done += clock.steps
        return result
