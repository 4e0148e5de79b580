"""Which processes below one in the tree of heartbeats are lost, and how the tree is numbered."""

from __future__ import annotations

import contextlib
import selectors
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from tfdist.jobs.heartbeat.links import Member, Probe
from tfdist.jobs.heartbeat.messages import Loss, Summary

FAN_OUT = 3
PROBES = 10  # of an orphan in the time that it may take to connect


def ancestors_of(rank: int) -> Iterator[int]:
    """The parent of a rank, its parent, and so on to rank 0."""
    while rank:
        rank = (rank - 1) // FAN_OUT
        yield rank


def children_of(rank: int, world_size: int) -> range:
    """The ranks whose parent is `rank`."""
    return range(FAN_OUT * rank + 1, min(FAN_OUT * (rank + 1) + 1, world_size))


@dataclass
class _Orphan:
    """A process whose parent was lost: it connects with an ancestor until a time, or is lost too."""

    loss_of_parent: Loss
    until: float
    probe_at: float = 0.0
    probe: Probe | None = None


class Losses:
    """The lost processes below one process.

    The children of a lost process connect with the next ancestor. One that was killed together with its parent cannot,
    but its machine says that nobody listens there any more.

    Args:
        selector: calls probes back.
        member: describes a process, by its rank.
        world_size: the number of processes.
        connected: the ranks that this process is connected with, always up to date.
        grace_seconds: how long an orphan may take to connect.

    Attributes:
        lost: how each lost rank was lost.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        member: Callable[[int], Member],
        world_size: int,
        connected: Collection[int],
        grace_seconds: float,
    ):
        self.lost: dict[int, Loss] = {}
        self._orphans: dict[int, _Orphan] = {}
        self._selector, self._member = selector, member
        self._world_size, self._connected = world_size, connected
        self._grace = grace_seconds

    def lose(self, rank: int, loss: Loss, said: Summary, until: float) -> None:
        """Counts a process as lost, and expects its children until the time `until`; `said` was its last summary."""
        self.lost.update(said.lost)
        self.lost[rank] = loss
        # It may also have been about to find out about the children of those that it had lost.
        parents = {rank, *said.lost}
        children = (child for parent in parents for child in children_of(parent, self._world_size))
        for child in {*children, *said.adopted}:
            if child not in self.lost and child not in self._orphans and child not in self._connected:
                self._orphans[child] = _Orphan(loss, until)

    def forget(self, ranks: Collection[int]) -> None:
        """These processes are connected with this one or another ancestor: what is below them is known by them."""
        for rank in [*self.lost, *self._orphans]:
            if rank in ranks or not set(ancestors_of(rank)).isdisjoint(ranks):
                self.lost.pop(rank, None)
                self._stop_expecting(rank)

    def step(self, now: float) -> None:
        """Counts the orphans as lost that have not connected in time, and probes the others at intervals."""
        for rank, orphan in list(self._orphans.items()):
            if now >= orphan.until:
                self._stop_expecting(rank)
                self.lose(rank, Loss.SILENT, Summary(), now + self._grace)
            elif now >= orphan.probe_at:
                orphan.probe_at = now + self._grace / PROBES
                self._probe(rank, orphan)

    def close(self) -> None:
        for rank in list(self._orphans):
            self._stop_expecting(rank)

    def _probe(self, rank: int, orphan: _Orphan) -> None:
        def refused() -> None:
            self._stop_expecting(rank)
            # Where a process has ended, the program of its child is likely to have ended as well.
            loss = Loss.ENDED if orphan.loss_of_parent is Loss.ENDED else Loss.CLOSED
            self.lose(rank, loss, Summary(), orphan.until)

        if orphan.probe is not None:
            orphan.probe.close()
        with contextlib.suppress(OSError):  # this process has no more file descriptors
            orphan.probe = Probe(self._selector, self._member(rank), refused)

    def _stop_expecting(self, rank: int) -> None:
        orphan = self._orphans.pop(rank, None)
        if orphan is not None and orphan.probe is not None:
            orphan.probe.close()
