"""Opens the connections of the heartbeat tree, in one thread that never waits for a single one of them."""

from __future__ import annotations

import errno
import json
import os
import selectors
import socket
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tfdist.jobs.connections import LineConnection, described, is_connected_to_itself
from tfdist.jobs.heartbeat.messages import Loss


class Member(NamedTuple):
    """A process of the job, as it describes itself to all others.

    Attributes:
        name: a random name, by which processes of the job recognize each other: on another network, the same address
            may belong to another machine.
        hosts: names and addresses by which others may reach the process.
        port: the port on which it listens.
    """

    name: str
    hosts: list[str]
    port: int

    @classmethod
    def parse(cls, message: bytes) -> Member:
        return cls(*json.loads(message))

    def message(self) -> bytes:
        return json.dumps(self).encode()


class Address(NamedTuple):
    """An address of a process; for a host name that cannot be resolved, `sockaddr` is `None`, and `reason` says why."""

    host: str
    family: int
    sockaddr: Any
    reason: str = ""


def addresses(member: Member, flags: int = 0) -> list[Address]:
    """The address of each host of a process; `flags` are those of `socket.getaddrinfo`."""
    resolved = []
    for host in member.hosts:
        try:
            family, _, _, _, sockaddr = socket.getaddrinfo(host, member.port, type=socket.SOCK_STREAM, flags=flags)[0]
            resolved.append(Address(host, family, sockaddr))
        except OSError as error:
            resolved.append(Address(host, 0, None, described(error)))
    return resolved


class Dial:
    """A connection that is being opened.

    Args:
        selector: calls this object back.
        address: the address to connect to.
        done: called with the connection, or with the error.
    """

    def __init__(
        self, selector: selectors.BaseSelector, address: Address, done: Callable[[socket.socket | OSError], None]
    ):
        self._selector = selector
        self._done = done
        self._connection = socket.socket(address.family, socket.SOCK_STREAM)
        self._connection.setblocking(False)
        self._code = self._connection.connect_ex(address.sockaddr)
        selector.register(self._connection, selectors.EVENT_WRITE, self._ready)

    def close(self) -> None:
        """Stops the attempt."""
        if self._connection.fileno() >= 0:
            self._selector.unregister(self._connection)
            self._connection.close()

    def _ready(self, events: int) -> None:
        connection = self._connection
        if connection.fileno() < 0:
            return
        code = self._error_code()
        if code:
            self.close()
            self._done(OSError(code, os.strerror(code)))
        else:
            self._selector.unregister(connection)
            self._done(connection)

    def _error_code(self) -> int:
        """The error number if the connection could not be opened; 0 if it is open."""
        if self._code not in (0, errno.EINPROGRESS):
            return self._code
        code = self._connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            return code
        try:
            return errno.ECONNREFUSED if is_connected_to_itself(self._connection) else 0
        except OSError:
            return errno.ECONNRESET


class Probe:
    """Finds out whether nobody listens at the addresses of a process.

    Args:
        selector: calls this object back.
        member: the process.
        refused: called if all connections fail, and a machine has answered that nobody listens there.
    """

    def __init__(self, selector: selectors.BaseSelector, member: Member, refused: Callable[[], None]):
        self._refused = refused
        self._codes: list[int | None] = []
        resolved = [address for address in addresses(member, socket.AI_NUMERICHOST) if address.sockaddr]
        self._expected = len(resolved)
        self._dials = [Dial(selector, address, self._done) for address in resolved]

    def close(self) -> None:
        for dial in self._dials:
            dial.close()

    def _done(self, result: socket.socket | OSError) -> None:
        if isinstance(result, OSError):
            self._codes.append(result.errno)
        else:
            result.close()
        if len(self._codes) == self._expected and errno.ECONNREFUSED in self._codes:
            self._refused()


@dataclass(eq=False)
class _Attempt:
    """The attempt of a search to reach one address of a process."""

    rank: int
    host: str
    begun: float
    until: float
    connection: Dial | LineConnection | None = None


class Candidate(NamedTuple):
    """A process that a search may connect with."""

    rank: int
    name: str
    addresses: Sequence[Address]


class Search:
    """Connects with the first of several processes that answers with its name.

    The next address is tried when an attempt has failed, or takes longer than a moment; the earlier attempt may still
    be answered first.

    Args:
        selector: calls this object back.
        candidates: the processes, the preferred one first.
        hello: the first line that this process sends.
        connected: called once, with the rank and the connection.
        now: the time at the start, in seconds of any clock.
        patience_seconds: how long each address may take to answer.
        between_seconds: how long to wait for a connection before the next address is tried too.

    Attributes:
        reasons: why processes did not answer, by rank.
        losses: how these processes were lost.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        candidates: Iterable[Candidate],
        hello: bytes,
        connected: Callable[[int, LineConnection], None],
        *,
        now: float,
        patience_seconds: float,
        between_seconds: float,
    ):
        self.reasons: dict[int, str] = {}
        self.losses: dict[int, Loss] = {}
        self._selector, self._hello, self._connected = selector, hello, connected
        self._now, self._patience, self._between = now, patience_seconds, between_seconds
        self._untried = deque((candidate, address) for candidate in candidates for address in candidate.addresses)
        self._attempts: list[_Attempt] = []
        self.step(now)

    @property
    def has_failed(self) -> bool:
        """Whether none of the processes answers."""
        return not self._untried and not self._attempts

    def step(self, now: float) -> None:
        """Begins attempts, and ends those that take too long; to be called regularly."""
        self._now = now
        for attempt in [attempt for attempt in self._attempts if now >= attempt.until]:
            self._fail(attempt, "it does not answer", Loss.SILENT)
        while self._untried and not any(map(self._is_promising, self._attempts)):
            self._begin(*self._untried.popleft())

    def close(self) -> None:
        """Ends all attempts."""
        self._untried.clear()
        while self._attempts:
            connection = self._attempts.pop().connection
            if connection is not None:
                connection.close()

    def _is_promising(self, attempt: _Attempt) -> bool:
        return isinstance(attempt.connection, LineConnection) or self._now < attempt.begun + self._between

    def _begin(self, candidate: Candidate, address: Address) -> None:
        attempt = _Attempt(candidate.rank, address.host, self._now, self._now + self._patience)
        self._attempts.append(attempt)

        def done(result: socket.socket | OSError) -> None:
            if isinstance(result, OSError):
                self._fail(attempt, os.strerror(result.errno or 0))
                return
            connection = attempt.connection = LineConnection(self._selector, result)
            attempt.until = self._now + self._patience
            connection.received = lambda line: self._received(attempt, candidate.name, line)
            connection.ended = lambda: self._fail(attempt, "it does not answer")
            connection.send(self._hello)

        if address.sockaddr is None:
            self._fail(attempt, address.reason)
            return
        try:
            attempt.connection = Dial(self._selector, address, done)
        except OSError as error:  # this process has no more file descriptors
            self._fail(attempt, described(error))

    def _received(self, attempt: _Attempt, name: str, line: bytes) -> None:
        connection = attempt.connection
        if line != name.encode() or not isinstance(connection, LineConnection):
            self._fail(attempt, "another process answers")
            return
        self._attempts.remove(attempt)
        self.close()
        self._connected(attempt.rank, connection)

    def _fail(self, attempt: _Attempt, reason: str, loss: Loss = Loss.CLOSED) -> None:
        if attempt.connection is not None:
            attempt.connection.close()
        self._attempts.remove(attempt)
        earlier = self.reasons.get(attempt.rank)
        self.reasons[attempt.rank] = (f"{earlier}; " if earlier else "") + f"{attempt.host}: {reason}"
        if self.losses.get(attempt.rank) is not Loss.CLOSED:
            self.losses[attempt.rank] = loss
