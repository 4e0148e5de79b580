"""Which processes of a job are alive, and what they do: TensorFlow, Horovod and MPI wait without knowing for whom.

In every process, one thread exchanges messages with a few others, whatever the other threads do, and so learns the
state of all processes (see `tfdist.jobs.heartbeat_tree`):

    stopped or ended   sends nothing, or cannot be reached     → lost: the job is given up
    waiting            is in an exchange with the others       → normal, unless all wait and nothing moves
    busy               computes, saves, or is in a callback    → the others wait for it, and a message says so

A process that can connect with none of the others at the start, for example behind a firewall, warns about it. The
others then notice its loss only if TensorFlow, Horovod or MPI detects it.

Synopsis:

    heartbeat = Heartbeat(world, group.exchange, group.counts, Limits(seconds=20.0), give_up=print)
    with heartbeat.work():
        ...                # work that all processes do together
"""

from __future__ import annotations

import atexit
import contextlib
import secrets
import socket
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import psutil

from tfdist import terminal
from tfdist.errors import ClusterError
from tfdist.jobs import ports
from tfdist.jobs.connections import Exchange, Loss, Member, gone
from tfdist.jobs.heartbeat_tree import MOST_BUSY, SOME, Activity, State, Summary, Tree
from tfdist.jobs.world import World
from tfdist.options import checked_seconds

SECONDS_TO_ANSWER = 2.0
SECONDS_BETWEEN_ANSWERS = 0.02
SECONDS_TO_END = 1.0
# If all processes wait, nothing moves, and none computes, they wait for different operations. A large tensor on a slow
# network may look the same for a while, so this takes so many timeouts.
ALL_WAIT = 5
# After the first news of a silent process, news of others may follow for this long.
LONGEST_SECONDS_TO_NAME = 2.0

SAME_CALLS = "make all processes call the same methods, in the same order, on the same model and data"


@dataclass(frozen=True)
class Limits:
    """How long processes wait for others.

    Attributes:
        seconds: how long a process may be silent.
        busy_seconds: how long a process may be busy while others wait for it; `None` sets no limit.
    """

    seconds: float
    busy_seconds: float | None = None


class Heartbeat:
    """Reports to the other processes what this process does, and finds out what they do.

    Args:
        world: the rank of this process, and the addresses of the others.
        exchange: returns the messages of all processes, by rank; every process calls it with its own message.
        counts: returns how many exchanges this process has begun, and how many have ended.
        limits: how long to wait for other processes.
        give_up: called once, in a thread, with the error that ends the job.
        activity: what this process does, if that is known. The job is then given up after `limits.seconds` if
            processes wait for different operations.
        hint: what to do if processes wait for different operations.

    Attributes:
        world: the job, and the rank of this process.
        error: the error that `give_up` was called with.
        unreachable: if this process cannot take part, the ranks that it could not reach at the start, with the reasons.
    """

    def __init__(
        self,
        world: World,
        exchange: Exchange,
        counts: Callable[[], tuple[int, int]],
        limits: Limits,
        give_up: Callable[[ClusterError], None],
        activity: Callable[[], Activity] = Activity,
        hint: str = SAME_CALLS,
    ):
        self.error: ClusterError | None = None
        self.world = world
        self._limits = limits
        self._give_up = give_up
        self._depth = 0
        self._hint = hint
        self._sampler = _StateSampler(counts, activity)
        self._missed_seconds: dict[int, float] = {}
        self._reported: set[int] = set()
        self._listener, host = ports.listen_for(world)
        port = self._listener.getsockname()[1]
        member = Member(secrets.token_hex(16), _hosts(world) if host is None else [host], port)
        self._tree = Tree(world.rank, exchange(member.message()), self._listener, limits.seconds)
        self._tree.join()
        self.unreachable = self._tree.unreachable
        self._warn_of_unreachable()
        self._thread = threading.Thread(target=self._run, name="tfdist-heartbeat", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Announces to the others that the program of this process has ended."""
        self._sampler.close()
        with contextlib.suppress(OSError):  # it is closed already
            self._listener.shutdown(socket.SHUT_RDWR)  # which wakes the thread
        self._thread.join(SECONDS_TO_END)

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        """The context of work that all processes do together."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def silent(self) -> list[int]:
        """The ranks that currently cannot be reached; waits a moment if there are none yet."""
        until = time.monotonic() + SECONDS_TO_ANSWER
        while not (lost := self._tree.whole.lost) and time.monotonic() < until:
            time.sleep(SECONDS_BETWEEN_ANSWERS)
        return sorted(lost)

    def others_are_busy(self) -> bool:
        """Whether another process is alive and busy, so that it may be worth waiting for it."""
        whole = self._tree.whole
        own = [rank for rank, _ in whole.busy].count(self.world.rank)
        return whole.processes - whole.waiting > own

    def _warn_of_unreachable(self) -> None:
        for rank, reason in self.unreachable.items():
            here = self.world.named(self.world.rank)
            warnings.warn(
                f"{here} cannot connect to the heartbeat of {self.world.named(rank)} ({reason}). The job "
                f"continues, but may not notice whether {self.world.named(rank)} is silent or only busy. Let the "
                "machines of the job reach all ports of each other",
                RuntimeWarning,
                stacklevel=2,
            )

    def _run(self) -> None:
        has_ended = False
        try:
            # A process whose program has ended while others wait for it is lost.
            while self._sampler.sample() and threading.main_thread().is_alive():
                self._tree.run_for(self._tree.look_seconds, self._sampler.now())
                if self.error is None:
                    self.error = self._verdict(self._tree.whole, self._sampler.now())
                    if self.error is not None:
                        # This thread continues, so that the others receive the news too.
                        threading.Thread(target=self._give_up, args=(self.error,), daemon=True).start()
            self._tree.update(self._sampler.now())
            has_ended = True
        finally:
            self._tree.close(has_ended)

    def _verdict(self, whole: Summary, own: State) -> ClusterError | None:
        """The error if the job must be given up; reports which processes the job waits for."""
        lost = self._given_up(whole.lost, bool(self._depth) or own.waits)
        if lost:
            return gone(self.world, lost, self._limits.seconds)
        all_wait = own.waits and whole.waiting == self.world.world_size
        if all_wait and whole.least_seconds >= ALL_WAIT * self._limits.seconds:
            return ClusterError(
                f"All processes of the job have waited for each other for {whole.least_seconds:.0f} s: not all are in "
                "the same exchange",
                self._hint,
            )
        if self._is_deadlocked(whole, own):
            return ClusterError(
                f"For {own.seconds:.0f} s nothing has moved, since the processes of the job are at different places: "
                f"{self.activities(whole.texts)}",
                self._hint,
            )
        busy = dict(whole.busy)
        busy.pop(self.world.rank, None)
        if not own.waits:
            busy[self.world.rank] = own.seconds
        longest_wait = max(whole.longest_seconds, own.seconds if own.waits else 0.0)
        self._report(busy if longest_wait >= self._limits.seconds else {})
        bound = self._limits.busy_seconds
        late = [rank for rank, seconds in busy.items() if bound is not None and seconds > bound]
        if late and own.waits:
            limit = f"{bound:g} s (`callback_timeout_seconds`)"
            return ClusterError.lost(f"Busy for longer than {limit} while others waited: {self._named(late)}")
        return None

    def _is_deadlocked(self, whole: Summary, own: State) -> bool:
        """Whether this process waits for something that another one will never do, as far as activities are known."""
        if not own.waits or own.seconds < self._limits.seconds or SOME in whole.operations:
            return False
        if own.activity.stage % 2 and whole.last_stage > own.activity.stage:
            return True  # another process has ended the stage that this process is in
        all_wait = whole.waiting == self.world.world_size and whole.least_seconds >= self._limits.seconds
        most = max(whole.operations.values(), default=self.world.world_size)
        return all_wait and most < self.world.world_size

    def activities(self, texts: Mapping[str, Collection[int]]) -> str:
        """Describes what processes do, with their names; `texts` has the ranks that report each text."""
        verbs = {text: "is" if len(ranks) == 1 else "are" for text, ranks in texts.items()}
        return ", and ".join(f"{self.world.named_all(ranks)} {verbs[text]} {text}" for text, ranks in texts.items())

    def last_texts(self, ranks: Iterable[int]) -> dict[str, list[int]]:
        """What some processes last reported of their work, without those that have reported nothing."""
        texts: dict[str, list[int]] = {}
        for rank in ranks:
            if text := self._tree.last_texts.get(rank):
                texts.setdefault(text, []).append(rank)
        return texts

    def _given_up(self, lost: Mapping[int, Loss], waited_for: bool) -> list[int]:
        """The lost ranks that have been missed for too long; time counts while the processes work together."""
        look, grace = self._tree.look_seconds, self._tree.grace_seconds
        missed = {rank: self._missed_seconds.get(rank, 0.0) + look for rank in lost} if waited_for else {}
        self._missed_seconds = missed
        to_name = min(self._limits.seconds / 4, LONGEST_SECONDS_TO_NAME)
        patience = {Loss.SILENT: to_name, Loss.CLOSED: grace, Loss.ENDED: self._limits.seconds}
        left = {rank: patience[lost[rank]] - seconds for rank, seconds in missed.items()}
        if min(left.values(), default=1.0) > 0:
            return []
        # Processes that were lost together are named together, without those that have given up just now.
        return [rank for rank, seconds in left.items() if seconds <= grace / 2]

    def _report(self, busy: Mapping[int, float]) -> None:
        """Reports once which processes the job waits for."""
        late = {rank: seconds for rank, seconds in busy.items() if seconds >= self._limits.seconds}
        if late.keys() - self._reported and self.world.is_chief:  # only one process: all may share one terminal
            bound = self._limits.busy_seconds
            end = "`callback_timeout_seconds` would limit it" if bound is None else f"it is given up after {bound:g} s"
            terminal.say(
                f"Waiting for {self._named(late)}: alive, and busy for {max(late.values()):.0f} s so far, for "
                f"example in a callback, an evaluation or a save; {end}."
            )
        self._reported = set(late)

    def _named(self, late: Collection[int]) -> str:
        whole = self._tree.whole
        are_all = len(late) < MOST_BUSY or whole.processes - whole.waiting <= MOST_BUSY
        return self.world.named_all(late) + ("" if are_all else " and others")


def checked_callback_timeout(option: float | None) -> float | None:
    """How long a process may be busy while others wait for it; `None` sets no limit.

    Raises:
        UsageError: it is not a positive, finite number.
    """
    return None if option is None else checked_seconds("callback_timeout_seconds", option)


class _StateSampler:
    """Samples what this process does at intervals."""

    def __init__(self, counts: Callable[[], tuple[int, int]], activity: Callable[[], Activity]):
        self._counts = counts
        self._activity = activity
        self._last_activity = Activity()
        self._last_counts: tuple[int, int] = (0, 0)
        self._since = time.monotonic()
        self._closed = False
        self._lock = threading.Lock()

    def now(self) -> State:
        """The state at the last sample."""
        begun, ended = self._last_counts
        return State(ended < begun, time.monotonic() - self._since, self._last_activity)

    def sample(self) -> bool:
        """Samples the state; returns whether to continue."""
        with self._lock:  # TensorFlow's variables must not be read while TensorFlow shuts down
            if self._closed:
                return False
            counts, self._last_activity = self._counts(), self._activity()
        if counts != self._last_counts:
            self._last_counts, self._since = counts, time.monotonic()
        return True

    def close(self) -> None:
        """Stops sampling."""
        with self._lock:
            if not self._closed:
                self._last_activity = self._activity()
            self._closed = True


def _hosts(world: World) -> list[str]:
    """The names by which others may reach this machine: its host in the job, and the addresses of its interfaces."""
    host = world.tasks[world.rank].host if world.tasks else socket.gethostname()
    families = (socket.AF_INET, socket.AF_INET6)
    entries = [entry for of_interface in psutil.net_if_addrs().values() for entry in of_interface]
    addresses = [entry.address for entry in entries if entry.family in families]
    return list(dict.fromkeys([host, *(a for a in addresses if not a.startswith(("127.", "::1", "fe80:")))]))
