"""Which processes of a job are alive, and what they do: TensorFlow, Horovod and MPI wait without knowing for whom.

In every process, one thread answers the other processes, whatever its other threads do, and another one polls them:

    stopped or ended   does not answer, or refuses           → silent: the job is given up
    waiting            is in an exchange with the others     → normal, unless all wait and nothing moves
    busy               computes, saves, or is in a callback  → waited for, with a message

Processes that cannot be reached at the start, for example behind a firewall, are reported and not polled again. Whether
they are alive is then known only if TensorFlow, Horovod or MPI detects it.

Synopsis:

    heartbeat = Heartbeat(world, communicator.exchange, communicator.counts, Limits(seconds=20.0), give_up=print)
    with heartbeat.work():
        ...                # work that all processes do together
"""

from __future__ import annotations

import atexit
import contextlib
import json
import secrets
import selectors
import socket
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import psutil

from tfdist import terminal
from tfdist.cluster import ports
from tfdist.cluster.world import World
from tfdist.errors import ClusterError

SECONDS_TO_ANSWER = 2.0
SECONDS_TO_CONNECT = 3.0  # at the start
SECONDS_AFTER_ERROR = 0.05
LONGEST_SECONDS_BETWEEN_SAMPLES = 1.0
ASKED = 4  # polls without an answer, at least, before a process counts as silent
# If all processes wait, nothing moves, and none computes, they wait for different operations. A large tensor on a slow
# network may look like that for a while.
ALL_WAIT = 5
MOST_CONNECTIONS = 16  # at a time
LONGEST_ANSWER_BYTES = 256

Exchange = Callable[[bytes], list[bytes]]


@dataclass(frozen=True)
class Limits:
    """How long processes are waited for.

    Attributes:
        seconds: how long a process may be silent.
        busy_seconds: how long a process may be busy while others wait for it; `None` sets no limit.
    """

    seconds: float
    busy_seconds: float | None = None


class State(NamedTuple):
    """What a process does, and for how many seconds it has done so."""

    waits: bool
    seconds: float


class Heartbeat:
    """Answers the other processes, and polls them.

    Args:
        world: the rank of this process, and the addresses of the others.
        exchange: returns the messages of all processes, by rank; every process calls it with its own.
        counts: returns how many exchanges this process has begun, and how many have ended.
        limits: how long other processes are waited for.
        give_up: called once, in a thread, with the error that ends the job.

    Attributes:
        error: the error that `give_up` was called with.
        unreachable: the ranks that could not be reached at the start, with the reasons.
    """

    def __init__(
        self,
        world: World,
        exchange: Exchange,
        counts: Callable[[], tuple[int, int]],
        limits: Limits,
        give_up: Callable[[ClusterError], None],
    ):
        self.error: ClusterError | None = None
        self._world = world
        self._limits = limits
        self._give_up = give_up
        self._depth = 0
        self._state = _Own(counts)
        self._told: set[int] = set()
        self._name = secrets.token_hex(8)
        here = world.local_world_size == world.world_size
        # The answers are not secret, and nothing is read: the port can be open to everyone in the job's network.
        self._listener = socket.create_server(("localhost", 0)) if here else ports.listen_anywhere()
        self._start(self._answer)  # before the others learn the address
        hosts = ["localhost"] if here else _hosts(world)
        said = exchange(json.dumps([self._name, hosts, self._listener.getsockname()[1]]).encode())
        self._endpoints: dict[int, _Endpoint] = {}
        self.unreachable = self._connect({rank: json.loads(endpoint) for rank, endpoint in enumerate(said)})
        self._say_who_is_unreachable()
        self._start(self._look)
        atexit.register(self._state.close)

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        """The context of work that all processes do together."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def silent(self) -> list[int]:
        """The ranks that currently do not answer."""
        return [rank for rank, state in self._ask().items() if state is None]

    def others_are_busy(self) -> bool:
        """Whether a process that answers is busy, so that it may be worth waiting for it."""
        return any(state is not None and not state.waits for state in self._ask().values())

    def _start(self, target: Callable[[], None]) -> None:
        threading.Thread(target=target, name="tfdist-heartbeat", daemon=True).start()

    def _connect(self, said: Mapping[int, tuple[str, list[str], int]]) -> dict[int, str]:
        """Finds an address of each other process; returns the reasons for failures, by rank."""

        def find(rank: int) -> str | None:
            reasons = []
            for host in said[rank][1]:
                try:
                    self._endpoints[rank] = _endpoint(said[rank][0], host, said[rank][2])
                    return None
                except OSError as error:
                    reasons.append(f"{host}: {error.strerror or error}")
            return "; ".join(reasons)

        others = [rank for rank in said if rank != self._world.rank]
        with ThreadPoolExecutor(MOST_CONNECTIONS) as pool:
            return {rank: reason for rank, reason in zip(others, pool.map(find, others), strict=True) if reason}

    def _say_who_is_unreachable(self) -> None:
        for rank, reason in self.unreachable.items():
            here = self._world.named(self._world.rank)
            warnings.warn(
                f"{here} cannot connect to the heartbeat of {self._world.named(rank)} ({reason}). The job "
                f"continues, but may not notice whether {self._world.named(rank)} is silent or only busy. Let the "
                "machines of the job reach all ports of each other",
                RuntimeWarning,
                stacklevel=2,
            )

    def _ask(self) -> dict[int, State | None]:
        """The states of the other processes, by rank; `None` for those that do not answer."""
        return _asked(self._endpoints, SECONDS_TO_ANSWER)

    def _answer(self) -> None:
        # A process whose program has ended while others wait for it counts as gone.
        while threading.main_thread().is_alive():
            try:
                connection, _ = self._listener.accept()
                with connection:
                    if threading.main_thread().is_alive():
                        connection.sendall(json.dumps([self._name, *self._state.now()]).encode())
            except OSError:  # it has ended already, or this process has no more file descriptors
                time.sleep(SECONDS_AFTER_ERROR)
        self._listener.close()

    def _look(self) -> None:
        between = self._limits.seconds / ASKED
        missed = dict.fromkeys(self._endpoints, 0)
        while self._state.sample_for(between):
            states = self._ask()
            own = self._state.now()
            for rank, state in states.items():
                missed[rank] = missed[rank] + 1 if state is None and (self._depth or own.waits) else 0
            self.error = self._verdict(states, own, [rank for rank, count in missed.items() if count >= ASKED])
            if self.error is not None:
                self._give_up(self.error)
                return

    def _verdict(self, states: Mapping[int, State | None], own: State, lost: list[int]) -> ClusterError | None:
        """The error if the job must be given up; reports which processes the job waits for."""
        if lost:
            return gone(self._world, lost, self._limits.seconds)
        known = {rank: state for rank, state in states.items() if state is not None} | {self._world.rank: own}
        waiting = [state.seconds for state in known.values() if state.waits]
        if len(waiting) == self._world.world_size and min(waiting) >= ALL_WAIT * self._limits.seconds:
            return ClusterError(
                f"All processes of the job have waited for each other for {min(waiting):.0f} s: not all are in the "
                "same exchange",
                "make all processes call the same methods, in the same order, on the same model and data",
            )
        busy = {rank: state.seconds for rank, state in known.items() if not state.waits}
        self._tell_of(busy if max(waiting, default=0.0) >= self._limits.seconds else {})
        bound = self._limits.busy_seconds
        late = [rank for rank, seconds in busy.items() if bound is not None and seconds > bound]
        if late and own.waits:
            limit = f"{bound:g} s (`callback_timeout_seconds`)"
            return ClusterError.lost(f"Busy for longer than {limit} while others waited: {self._named(late)}")
        return None

    def _tell_of(self, busy: Mapping[int, float]) -> None:
        """Reports once which processes the job waits for."""
        late = {rank: seconds for rank, seconds in busy.items() if seconds >= self._limits.seconds}
        if late.keys() - self._told and self._world.is_chief:  # only one process, since all may have the same output
            bound = self._limits.busy_seconds
            end = "`callback_timeout_seconds` would limit it" if bound is None else f"it is given up after {bound:g} s"
            terminal.say(
                f"Waiting for {self._named(late)}: alive, and busy for {max(late.values()):.0f} s so far, for "
                f"example in a callback, an evaluation or a save; {end}."
            )
        self._told = set(late)

    def _named(self, ranks: Collection[int]) -> str:
        return ", ".join(map(self._world.named, sorted(ranks)))


def gone(world: World, ranks: Collection[int], seconds: float) -> ClusterError:
    """The error for processes that have ended or do not answer."""
    return ClusterError.lost(f"Gone, or silent for {seconds:g} s: {', '.join(map(world.named, ranks))}")


class _Own:
    """What this process does, sampled at intervals."""

    def __init__(self, counts: Callable[[], tuple[int, int]]):
        self._counts = counts
        self._seen: tuple[int, int] = (0, 0)
        self._since = time.monotonic()
        self._closed = threading.Event()
        self._lock = threading.Lock()

    def now(self) -> State:
        """The state at the last sample."""
        begun, ended = self._seen
        return State(ended < begun, time.monotonic() - self._since)

    def sample_for(self, seconds: float) -> bool:
        """Samples the state for this time; returns whether to continue."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if self._closed.wait(min(left, seconds / ASKED, LONGEST_SECONDS_BETWEEN_SAMPLES)):
                return False
            with self._lock:  # TensorFlow's variables must not be read while TensorFlow shuts down
                seen = self._seen if self._closed.is_set() else self._counts()
            if seen != self._seen:
                self._seen, self._since = seen, time.monotonic()
        return True

    def close(self) -> None:
        """Stops sampling."""
        with self._lock:
            self._closed.set()


class _Endpoint(NamedTuple):
    """Where a process answers, and its name: on another network the same address may be another machine."""

    name: str
    family: int
    address: Any


def _endpoint(name: str, host: str, port: int) -> _Endpoint:
    """The endpoint of a process, if the process there answers with that name.

    Raises:
        OSError: the process cannot be reached, or does not answer.
    """
    with socket.create_connection((host, port), timeout=SECONDS_TO_CONNECT) as connection:
        _read(connection, name)
        return _Endpoint(name, connection.family, connection.getpeername())


def _asked(endpoints: Mapping[int, _Endpoint], seconds: float) -> dict[int, State | None]:
    """The states that the processes at `endpoints` report within `seconds`."""
    found: dict[int, State | None] = dict.fromkeys(endpoints)
    until = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as connections:
        for rank, endpoint in endpoints.items():
            connection = connections.enter_context(socket.socket(endpoint.family))
            connection.setblocking(False)
            connection.connect_ex(endpoint.address)
            selector.register(connection, selectors.EVENT_READ, rank)
        while selector.get_map() and (left := until - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                with contextlib.suppress(OSError):
                    found[key.data] = _read(cast(socket.socket, key.fileobj), endpoints[key.data].name)
                selector.unregister(key.fileobj)
    return found


def _read(connection: socket.socket, name: str) -> State:
    try:
        called, waits, seconds = json.loads(connection.recv(LONGEST_ANSWER_BYTES))
    except ValueError as error:
        raise ConnectionError("it does not answer") from error
    if called != name:
        raise ConnectionError("another process answers")
    return State(bool(waits), float(seconds))


def _hosts(world: World) -> list[str]:
    """The names by which others may reach this machine: its host in the job, and the addresses of its interfaces."""
    named = world.tasks[world.rank].host if world.tasks else socket.gethostname()
    families = (socket.AF_INET, socket.AF_INET6)
    found = [entry for entries in psutil.net_if_addrs().values() for entry in entries if entry.family in families]
    addresses = [entry.address for entry in found if not entry.address.startswith(("127.", "::1", "fe80:"))]
    return list(dict.fromkeys([named, *addresses]))
