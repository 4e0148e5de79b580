"""Events in the order of simulated time.

Synopsis:

    >>> clock, seen = Clock(), []
    >>> clock.after(2.0, lambda: seen.append("late"))
    >>> clock.after(1.0, lambda: clock.after(0.5, lambda: seen.append("early")))
    >>> clock.run()
    >>> seen, clock.now
    (['early', 'late'], 2.0)
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Clock:
    """Runs events; those of the same time in the order in which they were asked for.

    Attributes:
        now: simulated seconds since the beginning.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Has `event` called `seconds` from now."""
        self.at(self.now + seconds, event)

    def at(self, when: float, event: Callable[[], None]) -> None:
        """Has `event` called at the time `when`, which has not passed."""
        heapq.heappush(self._events, (when, next(self._numbers), event))

    def run(self) -> None:
        """Runs all events, and those that they ask for."""
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()
