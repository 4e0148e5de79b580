"""A process' place in the tree over which heartbeats go: it is connected with its parent and its children alone.

    rank 0
    ├── rank 1          (rank - 1) // 3 is the parent of a rank
    │   ├── rank 4 ...
    ├── rank 2 ...
    └── rank 3 ...

At intervals each process sends its parent a summary of what it and all below it do, and rank 0 sends the summary of the
whole job down. So each process hears from at most four others, and knows of all after one interval.

A neighbour is lost if its connection has closed, or if it is silent for too long; news of that goes up and down at
once. A process that has lost its parent connects with the next ancestor that answers. Without any, it is the root of
those below it.

Time is counted in looks: a process that was itself paused has not waited meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import selectors
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from pydantic import ValidationError

from tfdist.jobs.heartbeat.links import Candidate, Link, Member, Probe, Search, addresses
from tfdist.jobs.heartbeat.messages import Hello, Loss, State, Summary, merged, of_process

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


ASKED = 4  # summaries that a neighbour does not send, at least, before it is silent
LONGEST_INTERVAL_SECONDS = 2.0
LOOKS_PER_INTERVAL = 4
LONGEST_GRACE_SECONDS = 5.0
SECONDS_TO_JOIN = 5.0
SECONDS_BETWEEN_NEWS = 0.1
SECONDS_AFTER_ERROR = 0.05
MOST_STRANGERS = 64


@dataclass(eq=False)
class _Neighbour:
    """The parent, or a child."""

    rank: int
    link: Link
    heard: float  # when it last said something
    fresh: bool = False  # its summary has not been passed on
    summary: Summary = field(default_factory=Summary)  # its last one

    @property
    def loss(self) -> Loss:
        """How it was lost if its connection has closed."""
        return Loss.ENDED if self.summary.ends else Loss.CLOSED


class Tree:
    """The connections of one process, and what it knows from them. One thread calls it.

    Args:
        rank: the rank of this process.
        said: how the processes describe themselves, by rank, each as `Member.message`.
        listener: where this process listens.
        seconds: how long a neighbour may be silent.

    Attributes:
        whole: what is known of the whole job; may be read from any thread.
        unreachable: the ancestors that could not be reached at the start, with the reasons, where none could be.
        last_texts: what processes have said last of their work, by rank, as far as it has come here.
        look_seconds: how long one look takes.
        grace_seconds: how long a process may need to connect again.
    """

    def __init__(self, rank: int, said: Sequence[bytes], listener: socket.socket, seconds: float):
        self.whole = Summary()
        self.unreachable: dict[int, str] = {}
        self.last_texts: dict[int, str] = {}
        self._interval = min(seconds / ASKED, LONGEST_INTERVAL_SECONDS)
        self.look_seconds = self._interval / LOOKS_PER_INTERVAL
        self.grace_seconds = min(seconds, LONGEST_GRACE_SECONDS)
        self._rank, self._said, self._seconds = rank, said, seconds
        self._listener = listener
        self._own = Summary()
        self._clock, self._looked = 0.0, time.monotonic()
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, _Neighbour] = {}
        self._strangers: dict[Link, float] = {}  # how long they have to say who they are
        self._losses = Losses(self._selector, self._member, len(said), self._children.keys(), self.grace_seconds)
        self._parent: _Neighbour | None = None
        self._ancestors: list[Candidate] = []
        self._search: Search | None = None
        self._has_joined = False
        self._is_root = rank == 0
        self._lost_ancestors: dict[int, Loss] = {}
        self._search_again_at = 0.0
        # The times of `time.monotonic` at which something was last sent, and is to be sent next.
        self._sent = self._sent_down = 0.0
        self._send_at = self._send_down_at = 0.0
        self._has_news = self._has_news_down = False
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._is_open = True

    def join(self) -> None:
        """Connects with the nearest ancestor that answers."""
        self._own = of_process(self._rank, State(False, 0.0))
        if self._rank == 0:
            return
        self._ancestors = _candidates({rank: self._member(rank) for rank in ancestors_of(self._rank)})
        self._begin_search(self._ancestors, SECONDS_TO_JOIN)
        while self._parent is None and not self._is_root:
            self._turn(self.look_seconds)

    def run_for(self, seconds: float, state: State) -> None:
        """Talks with the neighbours for this time; `state` is what this process does."""
        self.know(state)
        until = time.monotonic() + seconds
        while self._is_open and (left := until - time.monotonic()) > 0:
            self._turn(left)

    def know(self, state: State) -> None:
        """`state` is what this process does now."""
        self._own = of_process(self._rank, state)

    def close(self, says_so: bool = False) -> None:
        """Closes all connections.

        Args:
            says_so: tells the neighbours that the program has ended; otherwise they take the process for killed.
        """
        neighbours = [*self._children.values(), *filter(None, [self._parent])]
        if says_so:
            for neighbour in neighbours:
                summary = self._below() if neighbour is self._parent else self.whole
                neighbour.link.send(summary.model_copy(update={"ends": True}).line())
        for neighbour in neighbours:
            neighbour.link.close()
        for stranger in self._strangers:
            stranger.close()
        if self._search is not None:
            self._search.close()
        self._losses.close()
        self._listener.close()
        self._selector.close()

    def _member(self, rank: int) -> Member:
        return Member.parse(self._said[rank])

    def _turn(self, seconds: float) -> None:
        """Waits for messages, at most so long, handles them, and does what is due."""
        now = time.monotonic()
        due = [self._send_at, self._send_down_at]
        due += [self._sent + SECONDS_BETWEEN_NEWS] * self._has_news
        due += [self._sent_down + SECONDS_BETWEEN_NEWS] * self._has_news_down
        for key, events in self._selector.select(max(0.0, min(seconds, self.look_seconds, min(due) - now))):
            key.data(events)
        now = time.monotonic()
        self._clock += min(now - self._looked, 2 * self.look_seconds)
        self._looked = now
        self._find_losses()
        self._repair()
        self._talk(now)

    # What comes in.

    def _accept(self, events: int) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno == errno.EINVAL:  # it was shut down, to end this
                self._is_open = False
            else:  # no more file descriptors, or the other side has gone
                time.sleep(SECONDS_AFTER_ERROR)
            return
        link = Link(self._selector, connection)
        if len(self._strangers) >= MOST_STRANGERS:
            self._send_away(next(iter(self._strangers)))
        self._strangers[link] = self._clock + SECONDS_TO_JOIN
        link.received = functools.partial(self._identify, link)
        link.ended = functools.partial(self._send_away, link)

    def _identify(self, link: Link, line: bytes) -> None:
        try:
            hello = Hello.model_validate_json(line)
        except ValidationError:
            hello = None
        if hello is None or not self._is_descendant(hello):
            self._send_away(link)
            return
        rank = hello.rank
        del self._strangers[link]
        if rank in self._children:
            self._children[rank].link.close()
        child = self._children[rank] = _Neighbour(rank, link, self._clock)
        link.received = functools.partial(self._hear, child)
        link.ended = functools.partial(self._lose_child, child)
        link.send(self._member(self._rank).name.encode() + b"\n")
        self._has_news |= rank in self._losses.lost or next(ancestors_of(rank)) != self._rank
        self._losses.forget([rank])

    def _is_descendant(self, hello: Hello) -> bool:
        rank = hello.rank
        below = 0 < rank < len(self._said) and self._rank in ancestors_of(rank)
        return below and self._member(rank).name == hello.name

    def _send_away(self, link: Link) -> None:
        del self._strangers[link]
        link.close()

    def _hear(self, neighbour: _Neighbour, line: bytes) -> None:
        try:
            summary = Summary.model_validate_json(line)
        except ValidationError:  # a line of another version of this program, or a broken one
            return
        neighbour.heard, neighbour.fresh = self._clock, True
        self.last_texts.update((rank, text) for text, ranks in summary.texts.items() for rank in ranks)
        before, neighbour.summary = neighbour.summary, summary
        if neighbour is not self._parent:
            self._has_news |= summary.news != before.news
        elif not summary.ends:
            self.whole = summary
            self._has_news_down = True
            # What this process itself has said of one is older than what it knows of it now.
            elsewhere = [
                rank for rank, by in summary.adopted.items() if by != self._rank and rank not in self._children
            ]
            self._losses.forget([rank for rank in elsewhere if self._rank in ancestors_of(rank)])

    # Who is lost, and what is done about it.

    def _find_losses(self) -> None:
        for link in [link for link, until in self._strangers.items() if self._clock >= until]:
            self._send_away(link)
        silent_since = self._clock - self._seconds
        for child in [child for child in self._children.values() if child.heard <= silent_since]:
            self._lose_child(child, Loss.SILENT)
        if self._parent is not None and self._parent.heard <= silent_since:
            self._lose_parent(self._parent, Loss.SILENT)
        before = len(self._losses.lost)
        self._losses.step(self._clock)
        self._has_news |= len(self._losses.lost) != before

    def _lose_child(self, child: _Neighbour, loss: Loss | None = None) -> None:
        child.link.close()
        del self._children[child.rank]
        until = max(child.heard + self._seconds, self._clock) + self.grace_seconds
        self._losses.lose(child.rank, loss or child.loss, child.summary, until)
        self._has_news = True

    def _lose_parent(self, parent: _Neighbour, loss: Loss | None = None) -> None:
        loss = loss or parent.loss
        parent.link.close()
        self._parent = None
        # One that has only closed the connection may be there again.
        self._lost_ancestors = {} if loss is Loss.CLOSED else {parent.rank: loss}
        others = [candidate for candidate in self._ancestors if candidate.rank not in self._lost_ancestors]
        self._begin_search(others, self.grace_seconds)

    def _begin_search(self, candidates: Sequence[Candidate], patience_seconds: float) -> None:
        self._search = Search(
            self._selector,
            candidates,
            Hello(rank=self._rank, name=self._member(self._rank).name).line(),
            self._join_at,
            now=self._clock,
            patience_seconds=patience_seconds,
            between_seconds=self._interval,
        )

    def _join_at(self, rank: int, link: Link) -> None:
        parent = self._parent = _Neighbour(rank, link, self._clock)
        link.received = functools.partial(self._hear, parent)
        link.ended = functools.partial(self._lose_parent, parent)
        self._search, self._lost_ancestors = None, {}
        self._has_joined, self._is_root = True, False
        self._send_at = 0.0

    def _repair(self) -> None:
        if self._search is not None:
            self._search.step(self._clock)
            if self._search.has_failed:
                self._become_root(self._search)
        elif self._is_root and self._rank and self._clock >= self._search_again_at:
            self._begin_search(self._ancestors, self.grace_seconds)

    def _become_root(self, search: Search) -> None:
        ended = Loss.ENDED in self._lost_ancestors.values()
        found = {rank: Loss.ENDED if ended and loss is Loss.CLOSED else loss for rank, loss in search.losses.items()}
        if self._has_joined:
            self._lost_ancestors |= found
        else:
            self.unreachable = search.reasons
        self._search, self._is_root = None, True
        self._search_again_at = self._clock + self._interval
        self._has_news = True

    # What goes out.

    def _talk(self, now: float) -> None:
        all_fresh = bool(self._children) and all(child.fresh for child in self._children.values())
        if now >= self._send_at or ((self._has_news or all_fresh) and now >= self._sent + SECONDS_BETWEEN_NEWS):
            self._send_up(now)
        if now >= self._send_down_at or (self._has_news_down and now >= self._sent_down + SECONDS_BETWEEN_NEWS):
            self._send_down(now)

    def _send_up(self, now: float) -> None:
        for child in self._children.values():
            child.fresh = False
        self._has_news = False
        # One with children sends when all of them have sent, so that a summary is at the root at once.
        self._sent, self._send_at = now, now + self._interval * (1.5 if self._children else 1.0)
        if self._parent is not None:
            self._parent.link.send(self._below().line())
        elif self._is_root:
            below, before = self._below(), self.whole
            self.whole = below.model_copy(update={"lost": below.lost | self._lost_ancestors})
            self._has_news_down |= self.whole.news != before.news

    def _send_down(self, now: float) -> None:
        self._has_news_down = False
        # The root sends at intervals, the others what they receive, and something if that is late.
        self._sent_down, self._send_down_at = now, now + self._interval * (1.0 if self._is_root else 1.5)
        if self._children:
            line = self.whole.line()
            for child in self._children.values():
                child.link.send(line)

    def _below(self) -> Summary:
        """The summary of this process and all below it."""
        parts = [self._own, *(child.summary for child in self._children.values())]
        adopted = {rank: self._rank for rank in self._children if next(ancestors_of(rank)) != self._rank}
        return merged([*parts, Summary(lost=self._losses.lost)], self._children, adopted)


def _candidates(members: Mapping[int, Member]) -> list[Candidate]:
    """The members, by rank, with their addresses."""
    known = [addresses(member, socket.AI_NUMERICHOST) for member in members.values()]
    if any(address.place is None for found in known for address in found):
        with ThreadPoolExecutor() as pool:  # a host name may take its time
            known = list(pool.map(addresses, members.values()))
    return [Candidate(rank, member.name, found) for (rank, member), found in zip(members.items(), known, strict=True)]
