"""Heartbeats go over a tree (`tfdist.jobs.tree`): each process is connected only with its parent and its children.

At intervals each process sends its parent a summary of what it and all processes below it do, and rank 0 sends the
summary of the whole job down. A summary has bounded length. So each process hears from at most five others, and knows
of all after one interval.

A neighbour is lost if its connection has closed, or if it is silent for too long; news of that goes up and down at
once. A process that has lost its parent connects with the next ancestor that answers. If none answers, it becomes the
root of the processes below it.

Time is counted in looks, so that time in which this process was stopped does not count as silence of the others.
"""

from __future__ import annotations

import contextlib
import functools
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic import BaseModel, StrictInt, ValidationError

from tfdist.jobs.connections import (
    SECONDS_TO_IDENTIFY,
    Candidate,
    Hello,
    LineConnection,
    Loss,
    Member,
    Probe,
    Reception,
    Search,
    addresses,
    as_line,
)
from tfdist.jobs.tree import ancestors, children, subtree

INTERVALS_OF_SILENCE = 4  # how many summaries a neighbour leaves out, at least, before it counts as silent
LONGEST_INTERVAL_SECONDS = 2.0
LOOKS_PER_INTERVAL = 4
LONGEST_GRACE_SECONDS = 5.0
SECONDS_BETWEEN_NEWS = 0.1
PROBES = 10  # how often an orphan is probed in the time that it may take to connect
MOST_BUSY = 8
MOST_RANKS = 1024  # in each list of ranks


class Activity(NamedTuple):
    """What a process reports of its work, if its engine knows more than that it waits.

    Attributes:
        text: what follows "is" in a message, such as "waiting for the gradients".
        operations: the names of the exchanges in which it waits; `SOME` is an exchange in which not all processes take
            part.
        stage: how many stages that all processes pass together have begun and ended: 2n - 1 within the nth stage, 2n
            after it.
    """

    text: str = ""
    operations: tuple[str, ...] = ()
    stage: int = 0


SOME = ""


class State(NamedTuple):
    """Whether a process waits or is busy, and for how many seconds it has done so."""

    waits: bool
    seconds: float
    activity: Activity = Activity()


class Summary(BaseModel):
    """What some processes of the job do, and which processes were lost.

    Attributes:
        processes: the number of these processes.
        waiting: how many of them wait in an exchange.
        least_seconds: the shortest time for which a waiting process has waited; 0 if none waits.
        longest_seconds: the longest such time.
        busy: the processes that have been busy for the longest time, with these times, the longest first.
        lost: how each lost rank was lost.
        adopted: the ranks that are connected with an ancestor other than their parent, and the ancestor of each.
        ends: whether the program of the sender has ended.
        operations: how many waiting processes wait in each operation.
        texts: what processes report of their work, and some of the ranks that report it.
        last_stage: the stage of the process that is furthest, see `Activity`.
    """

    processes: StrictInt = 0
    waiting: StrictInt = 0
    least_seconds: float = 0.0
    longest_seconds: float = 0.0
    busy: list[tuple[int, float]] = []
    lost: dict[int, Loss] = {}
    adopted: dict[int, int] = {}
    ends: bool = False
    operations: dict[str, int] = {}
    texts: dict[str, list[int]] = {}
    last_stage: int = 0

    @property
    def news(self) -> object:
        """The part that is passed on at once when it changes."""
        return self.lost, self.adopted


def of_process(rank: int, state: State) -> Summary:
    """The summary of one process."""
    text, operations, stage = state.activity
    report: dict[str, Any] = {"texts": {text: [rank]} if text else {}, "last_stage": stage}
    if state.waits:
        report["operations"] = dict.fromkeys(operations, 1)
        return Summary(processes=1, waiting=1, least_seconds=state.seconds, longest_seconds=state.seconds, **report)
    return Summary(processes=1, busy=[(rank, state.seconds)], **report)


def merged(parts: Collection[Summary], connected: Iterable[int] = (), adopted: Mapping[int, int] = {}) -> Summary:
    """The summary of all processes of `parts`.

    Args:
        parts: summaries of different processes.
        connected: ranks that are alive, whatever the parts report.
        adopted: those of them that are newly connected with an ancestor other than their parent, and the ancestors.
    """
    waiting = [part for part in parts if part.waiting]
    busy = sorted((entry for part in parts for entry in part.busy), key=lambda entry: -entry[1])
    adopted = {rank: ancestor for part in parts for rank, ancestor in part.adopted.items()} | dict(adopted)
    lost = {rank: loss for part in parts for rank, loss in part.lost.items()}
    # A process that its parent reports as lost may be connected with another ancestor.
    for rank in (*connected, *adopted):
        lost.pop(rank, None)
    return Summary(
        processes=sum(part.processes for part in parts),
        waiting=sum(part.waiting for part in parts),
        least_seconds=min((part.least_seconds for part in waiting), default=0.0),
        longest_seconds=max((part.longest_seconds for part in waiting), default=0.0),
        busy=busy[:MOST_BUSY],
        lost={rank: lost[rank] for rank in sorted(lost)[:MOST_RANKS]},
        adopted={rank: adopted[rank] for rank in sorted(adopted)[:MOST_RANKS]},
        operations=_summed_counts(part.operations for part in parts),
        texts=_merged_texts(part.texts for part in parts),
        last_stage=max((part.last_stage for part in parts), default=0),
    )


def _summed_counts(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for part in parts:
        counts.update(part)
    return dict(counts.most_common(MOST_BUSY))


def _merged_texts(parts: Iterable[Mapping[str, list[int]]]) -> dict[str, list[int]]:
    texts: dict[str, list[int]] = {}
    for part in parts:
        for text, ranks in part.items():
            texts[text] = sorted([*texts.get(text, []), *ranks])[:MOST_BUSY]
    return {text: texts[text] for text in sorted(texts, key=lambda text: texts[text])[:MOST_BUSY]}


@dataclass
class _Orphan:
    """A process whose parent was lost; it is lost too if it has not connected with an ancestor by the time `until`."""

    loss_of_parent: Loss
    until: float
    probe_at: float = 0.0
    probe: Probe | None = None


class Losses:
    """The lost processes below one process.

    The children of a lost process connect with the next ancestor. A child that was killed together with its parent
    cannot, but its machine answers a probe that nobody listens there any more.

    Args:
        selector: calls probes back.
        member: returns how a rank describes itself.
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

    def lose(self, rank: int, loss: Loss, summary: Summary, until: float) -> None:
        """Counts a process as lost, and expects its children until the time `until`; `summary` is its last one."""
        self.lost.update(summary.lost)
        self.lost[rank] = loss
        # It may also have been waiting for the children of the processes that it had lost.
        parents = {rank, *summary.lost}
        below = (child for parent in parents for child in children(parent, self._world_size))
        for child in {*below, *summary.adopted}:
            if child not in self.lost and child not in self._orphans and child not in self._connected:
                self._orphans[child] = _Orphan(loss, until)

    def forget(self, ranks: Collection[int]) -> None:
        """Forgets what is below `ranks`, which are connected with this process or another ancestor, and report it."""
        for rank in [*self.lost, *self._orphans]:
            if not {rank, *ancestors(rank, self._world_size)}.isdisjoint(ranks):
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
            # If the program of the parent has ended, the program of its child is likely to have ended as well.
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


@dataclass(eq=False)
class _Neighbour:
    """The parent, or a child."""

    rank: int
    connection: LineConnection
    heard: float  # when it last sent something
    fresh: bool = False  # whether its last summary has not been passed on
    summary: Summary = field(default_factory=Summary)  # the last one

    @property
    def loss(self) -> Loss:
        """How it was lost if its connection has closed."""
        return Loss.ENDED if self.summary.ends else Loss.CLOSED


class Tree:
    """The connections of one process, and what it learns by them. Only one thread calls it.

    Args:
        rank: the rank of this process.
        members: how the processes describe themselves, by rank, each as `Member.message`.
        listener: where this process listens.
        seconds: how long a neighbour may be silent.

    Attributes:
        whole: the summary of the whole job; may be read from any thread.
        unreachable: the ancestors that could not be reached at the start, with the reasons, if none could be reached.
        last_texts: what processes last reported of their work, by rank, as far as this process has received it.
        look_seconds: how long one look takes.
        grace_seconds: how long a process may need to connect again.
    """

    def __init__(self, rank: int, members: Sequence[bytes], listener: socket.socket, seconds: float):
        self.whole = Summary()
        self.unreachable: dict[int, str] = {}
        self.last_texts: dict[int, str] = {}
        self._interval = min(seconds / INTERVALS_OF_SILENCE, LONGEST_INTERVAL_SECONDS)
        self.look_seconds = self._interval / LOOKS_PER_INTERVAL
        self.grace_seconds = min(seconds, LONGEST_GRACE_SECONDS)
        self._rank, self._members, self._seconds = rank, members, seconds
        self._below = subtree(rank, len(members))[1:]
        self._listener = listener
        self._own = Summary()
        self._clock, self._last_look = 0.0, time.monotonic()
        self._selector = selectors.DefaultSelector()
        self._reception = Reception(
            self._selector, listener, Hello, self._identify, self._member(rank).key.encode(), clock=lambda: self._clock
        )
        self._children: dict[int, _Neighbour] = {}
        self._losses = Losses(self._selector, self._member, len(members), self._children.keys(), self.grace_seconds)
        self._parent: _Neighbour | None = None
        self._ancestors: list[Candidate] = []
        self._search: Search | None = None
        self._has_joined = False
        self._is_root = rank == 0
        self._lost_ancestors: dict[int, Loss] = {}
        self._search_again_at = 0.0
        # The times of `time.monotonic` at which something was last sent, and is to be sent next.
        self._sent_up_at = self._sent_down_at = 0.0
        self._send_up_at = self._send_down_at = 0.0
        self._has_news_up = self._has_news_down = False

    def join(self) -> None:
        """Connects with the nearest ancestor that answers."""
        self._own = of_process(self._rank, State(False, 0.0))
        if self._rank == 0:
            return
        self._ancestors = _candidates({rank: self._member(rank) for rank in ancestors(self._rank, len(self._members))})
        self._begin_search(self._ancestors, SECONDS_TO_IDENTIFY)
        while self._parent is None and not self._is_root:
            self._handle_events(self.look_seconds)

    def run_for(self, seconds: float, state: State) -> None:
        """Exchanges messages with the neighbours for this time; `state` is what this process does."""
        self.update(state)
        until = time.monotonic() + seconds
        while self._reception.is_open and (left := until - time.monotonic()) > 0:
            self._handle_events(left)

    def update(self, state: State) -> None:
        """Notes what this process does now."""
        self._own = of_process(self._rank, state)

    def close(self, has_ended: bool = False) -> None:
        """Closes all connections.

        Args:
            has_ended: whether to announce that the program has ended; otherwise the neighbours assume that the process
                was killed.
        """
        neighbours = [*self._children.values(), *filter(None, [self._parent])]
        if has_ended:
            for neighbour in neighbours:
                summary = self._summary() if neighbour is self._parent else self.whole
                neighbour.connection.send(as_line(summary.model_copy(update={"ends": True})))
        for neighbour in neighbours:
            neighbour.connection.close()
        if self._search is not None:
            self._search.close()
        self._losses.close()
        self._reception.close()
        self._listener.close()
        self._selector.close()

    def _member(self, rank: int) -> Member:
        return Member.parse(self._members[rank])

    def _handle_events(self, seconds: float) -> None:
        """Waits for messages, at most for `seconds`, handles them, and does what is due."""
        now = time.monotonic()
        due = [self._send_up_at, self._send_down_at]
        due += [self._sent_up_at + SECONDS_BETWEEN_NEWS] * self._has_news_up
        due += [self._sent_down_at + SECONDS_BETWEEN_NEWS] * self._has_news_down
        for key, events in self._selector.select(max(0.0, min(seconds, self.look_seconds, min(due) - now))):
            key.data(events)
        now = time.monotonic()
        self._clock += min(now - self._last_look, 2 * self.look_seconds)
        self._last_look = now
        self._find_losses()
        self._repair()
        self._send(now)

    # Receiving.

    def _identify(self, connection: LineConnection, hello: Hello) -> bool:
        rank = hello.rank
        if rank not in self._below:
            return False
        if rank in self._children:
            self._children[rank].connection.close()
        child = self._children[rank] = _Neighbour(rank, connection, self._clock)
        connection.received = functools.partial(self._receive, child)
        connection.ended = functools.partial(self._lose_child, child)
        self._has_news_up |= rank in self._losses.lost or self._is_adopted(rank)
        self._losses.forget([rank])
        return True

    def _is_adopted(self, rank: int) -> bool:
        return ancestors(rank, len(self._members))[0] != self._rank

    def _receive(self, neighbour: _Neighbour, line: bytes) -> None:
        try:
            summary = Summary.model_validate_json(line)
        except ValidationError:  # a line of another version of this program, or a broken one
            return
        neighbour.heard, neighbour.fresh = self._clock, True
        self.last_texts.update((rank, text) for text, ranks in summary.texts.items() for rank in ranks)
        previous, neighbour.summary = neighbour.summary, summary
        if neighbour is not self._parent:
            self._has_news_up |= summary.news != previous.news
        elif not summary.ends:
            self.whole = summary
            self._has_news_down = True
            # Adoptions by this process come back from above, and may be older than what this process knows now.
            elsewhere = [
                rank
                for rank, ancestor in summary.adopted.items()
                if ancestor != self._rank and rank not in self._children
            ]
            self._losses.forget([rank for rank in elsewhere if rank in self._below])

    # Finding losses, and repairing the tree.

    def _find_losses(self) -> None:
        self._reception.close_late()
        silent_since = self._clock - self._seconds
        for child in [child for child in self._children.values() if child.heard <= silent_since]:
            self._lose_child(child, Loss.SILENT)
        if self._parent is not None and self._parent.heard <= silent_since:
            self._lose_parent(self._parent, Loss.SILENT)
        count = len(self._losses.lost)
        self._losses.step(self._clock)
        self._has_news_up |= len(self._losses.lost) != count

    def _lose_child(self, child: _Neighbour, loss: Loss | None = None) -> None:
        child.connection.close()
        del self._children[child.rank]
        until = max(child.heard + self._seconds, self._clock) + self.grace_seconds
        self._losses.lose(child.rank, loss or child.loss, child.summary, until)
        self._has_news_up = True

    def _lose_parent(self, parent: _Neighbour, loss: Loss | None = None) -> None:
        loss = loss or parent.loss
        parent.connection.close()
        self._parent = None
        # A parent that has only closed the connection may answer again.
        self._lost_ancestors = {} if loss is Loss.CLOSED else {parent.rank: loss}
        others = [candidate for candidate in self._ancestors if candidate.rank not in self._lost_ancestors]
        self._begin_search(others, self.grace_seconds)

    def _begin_search(self, candidates: Sequence[Candidate], patience_seconds: float) -> None:
        self._search = Search(
            self._selector,
            candidates,
            as_line(Hello(rank=self._rank)),
            self._join_at,
            now=self._clock,
            patience_seconds=patience_seconds,
            between_seconds=self._interval,
        )

    def _join_at(self, rank: int, connection: LineConnection) -> None:
        parent = self._parent = _Neighbour(rank, connection, self._clock)
        connection.received = functools.partial(self._receive, parent)
        connection.ended = functools.partial(self._lose_parent, parent)
        self._search, self._lost_ancestors = None, {}
        self._has_joined, self._is_root = True, False
        self._send_up_at = 0.0

    def _repair(self) -> None:
        if self._search is not None:
            self._search.step(self._clock)
            if self._search.has_failed:
                self._become_root(self._search)
        elif self._is_root and self._rank and self._clock >= self._search_again_at:
            self._begin_search(self._ancestors, self.grace_seconds)

    def _become_root(self, search: Search) -> None:
        ended = Loss.ENDED in self._lost_ancestors.values()
        losses = {rank: Loss.ENDED if ended and loss is Loss.CLOSED else loss for rank, loss in search.losses.items()}
        if self._has_joined:
            self._lost_ancestors |= losses
        else:
            self.unreachable = search.reasons
        self._search, self._is_root = None, True
        self._search_again_at = self._clock + self._interval
        self._has_news_up = True

    # Sending.

    def _send(self, now: float) -> None:
        all_fresh = bool(self._children) and all(child.fresh for child in self._children.values())
        has_news_up = self._has_news_up or all_fresh
        if now >= self._send_up_at or (has_news_up and now >= self._sent_up_at + SECONDS_BETWEEN_NEWS):
            self._send_up(now)
        if now >= self._send_down_at or (self._has_news_down and now >= self._sent_down_at + SECONDS_BETWEEN_NEWS):
            self._send_down(now)

    def _send_up(self, now: float) -> None:
        for child in self._children.values():
            child.fresh = False
        self._has_news_up = False
        # A process with children sends once all of them have sent, so that a summary reaches the root at once.
        self._sent_up_at, self._send_up_at = now, now + self._interval * (1.5 if self._children else 1.0)
        if self._parent is not None:
            self._parent.connection.send(as_line(self._summary()))
        elif self._is_root:
            below, previous = self._summary(), self.whole
            self.whole = below.model_copy(update={"lost": below.lost | self._lost_ancestors})
            self._has_news_down |= self.whole.news != previous.news

    def _send_down(self, now: float) -> None:
        self._has_news_down = False
        # The root sends at intervals. The others pass on what they receive, and send by themselves if that is late.
        self._sent_down_at, self._send_down_at = now, now + self._interval * (1.0 if self._is_root else 1.5)
        if self._children:
            line = as_line(self.whole)
            for child in self._children.values():
                child.connection.send(line)

    def _summary(self) -> Summary:
        """The summary of this process and all processes below it."""
        parts = [self._own, *(child.summary for child in self._children.values())]
        adopted = {rank: self._rank for rank in self._children if self._is_adopted(rank)}
        return merged([*parts, Summary(lost=self._losses.lost)], self._children, adopted)


def _candidates(members: Mapping[int, Member]) -> list[Candidate]:
    """The members, by rank, with their addresses."""
    resolved = [addresses(member, socket.AI_NUMERICHOST) for member in members.values()]
    if any(address.sockaddr is None for of_member in resolved for address in of_member):
        with ThreadPoolExecutor() as pool:  # resolving a host name may take long
            resolved = list(pool.map(addresses, members.values()))
    return [
        Candidate(rank, member.key, of_member)
        for (rank, member), of_member in zip(members.items(), resolved, strict=True)
    ]
