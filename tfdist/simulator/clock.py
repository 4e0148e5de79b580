"""Simulated time: a clock that runs events in the order of their time.

Synopsis:

    >>> clock, events = Clock(), []
    >>> clock.after(2.0, lambda: events.append("late"))
    >>> clock.after(1.0, lambda: clock.after(0.5, lambda: events.append("early")))
    >>> clock.run()
    >>> events, clock.now
    (['early', 'late'], 2.0)
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Clock:
    """Runs events in the order of their time; events of the same time in the order in which they were scheduled.

    Attributes:
        now: simulated seconds since the beginning.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Schedules `event` to be called `seconds` from now."""
        self.at(self.now + seconds, event)

    def at(self, time: float, event: Callable[[], None]) -> None:
        """Schedules `event` to be called at a time that has not passed."""
        heapq.heappush(self._events, (time, next(self._numbers), event))

    def run(self) -> None:
        """Runs all events, including those that events schedule."""
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()
