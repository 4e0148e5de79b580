"""The simulated network: messages that pass the same link at the same time share its bandwidth.

The rates of the messages that are on their way are max-min fair, as those of TCP are approximately: all rates grow
together, and a message's rate stops growing when one of its links is full (progressive filling; Bertsekas and Gallager,
Data Networks, 1992, section 6.5.2). A message arrives when its last byte has left and the latencies of its links have
passed.

Synopsis:

    >>> from tfdist.advisor.costs import Link
    >>> from tfdist.simulator.clock import Clock
    >>> clock, arrivals = Clock(), []
    >>> network = Network(clock, Links.of(3, Link(latency_seconds=0.5, bytes_per_second=100.0)))
    >>> network.send(0, 2, 100, lambda: arrivals.append(clock.now))  # shares the downlink of worker 2 for 2 s
    >>> network.send(1, 2, 200, lambda: arrivals.append(clock.now))  # and then has the downlink for itself for 1 s
    >>> clock.run()
    >>> arrivals
    [2.5, 3.5]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tfdist.simulator.clock import Clock
from tfdist.simulator.links import Links

ROUNDING = 1e-9  # the part of a message that is left by rounding when it has passed


@dataclass(eq=False)
class Message:
    """A message on its way.

    Attributes:
        path: the indices of its links.
        latency_seconds: the sum of their latencies.
        size: its bytes.
        event: is called when it has arrived.
    """

    path: tuple[int, ...]
    latency_seconds: float
    size: float
    event: Callable[[], None]


class Network:
    """Carries messages between the workers, by their ranks, and the centre, `CENTRE`.

    Args:
        clock: the simulated time.
        links: the links of all machines.

    Attributes:
        sent_bytes: the size of all messages so far.
    """

    def __init__(self, clock: Clock, links: Links):
        self.sent_bytes = 0
        self._clock, self._links = clock, links
        self._machines = len(links.up)
        every = [*links.up, *links.down, *([links.switch] if links.switch else [])]
        self._capacities = np.array([link.bytes_per_second for link in every])
        self._latencies = [link.latency_seconds for link in every]
        self._messages: list[Message] = []
        self._left = np.zeros(0)  # bytes of each message
        self._rates = np.zeros(0)
        self._paths = np.zeros((0, 3 if links.switch else 2), np.int64)
        self._since = 0.0  # when `_left` was computed
        self._new: list[Message] = []
        self._plan = 0  # the number of the latest plan, which replaces earlier ones

    def send(self, sender: int, receiver: int, bytes_: float, event: Callable[[], None]) -> None:
        """Sends a message; `event` is called when it has arrived."""
        self.sent_bytes += round(bytes_)
        switch = (2 * self._machines,) if self._links.switch else ()
        path = (sender % self._machines, self._machines + receiver % self._machines, *switch)
        self._new.append(Message(path, sum(self._latencies[link] for link in path), bytes_, event))
        if len(self._new) == 1:  # messages that are sent at the same time are added together
            self._clock.after(0.0, self._add_new)

    def all_reduce(self, bytes_: float, event: Callable[[], None]) -> None:
        """Adds up arrays of all workers on a ring; `event` is called when all have the sum.

        The ring of N workers takes 2 (N - 1) rounds, in each of which a worker sends 1 / N of an array to the next one.
        The network has no other messages, so that all rounds take as long as the first one, which is simulated.
        """
        size, began = self._machines - 1, self._clock.now
        rounds = 2 * (size - 1)
        arrived = 0

        def arrive() -> None:
            nonlocal arrived
            arrived += 1
            if arrived == size:
                self._clock.after((rounds - 1) * (self._clock.now - began), event)

        if not rounds:
            self._clock.after(0.0, event)
            return
        before = self.sent_bytes
        for rank in range(size):
            self.send(rank, (rank + 1) % size, bytes_ / size, arrive)
        self.sent_bytes = before + round(rounds * bytes_)

    def _add_new(self) -> None:
        self._pass_time()
        new, self._new = self._new, []
        self._messages += new
        self._left = np.append(self._left, [message.size for message in new])
        self._paths = np.append(self._paths, [message.path for message in new], axis=0)
        self._share()

    def _pass_time(self) -> None:
        self._left = self._left - self._rates * (self._clock.now - self._since)
        self._since = self._clock.now

    def _share(self) -> None:
        """Computes the rates of the messages, and schedules the next end of one."""
        self._plan += 1
        self._rates = fair_rates(self._paths, self._capacities)
        if self._messages:
            plan, seconds = self._plan, float(np.min(self._left / self._rates))
            self._clock.after(max(0.0, seconds), lambda: self._end_messages(plan))

    def _end_messages(self, plan: int) -> None:
        """Removes the messages whose last byte has left; does nothing if a later plan has replaced this one."""
        if plan != self._plan:
            return
        next_end = self._left / self._rates
        ended = next_end <= next_end.min() * (1 + ROUNDING)
        self._pass_time()
        for message, is_ended in zip(self._messages, ended, strict=True):
            if is_ended:
                self._clock.after(message.latency_seconds, message.event)
        self._messages = [message for message, is_ended in zip(self._messages, ended, strict=True) if not is_ended]
        self._left, self._paths = self._left[~ended], self._paths[~ended]
        self._share()


def fair_rates(paths: np.ndarray, capacities: np.ndarray) -> np.ndarray:
    """Returns the max-min fair rate of each message, bytes per second `[n]`.

    Args:
        paths: the links of each message, int64 `[n, links of a path]`.
        capacities: bytes per second of each link.
    """
    rates, rising = np.zeros(len(paths)), np.ones(len(paths), bool)
    left, links = capacities.astype(float), len(capacities)
    while rising.any():
        messages = np.bincount(paths[rising].ravel(), minlength=links)
        shares = np.divide(left, messages, out=np.full(links, np.inf), where=messages > 0)
        lowest = shares.min()
        full = shares <= lowest * (1 + ROUNDING)
        stopped = rising & full[paths].any(axis=1)
        rates[stopped] = lowest
        left = np.maximum(left - lowest * np.bincount(paths[stopped].ravel(), minlength=links), 0.0)
        rising &= ~stopped
    return rates
