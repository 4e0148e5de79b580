"""Connections of the tree of heartbeats. They are opened, and carry lines, in one thread that never waits for one.

A selector has a callback for each of its sockets, as its key's data, which is called with the events.
"""

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

from tfdist.jobs.heartbeat.messages import LONGEST_LINE_BYTES, Loss


class Member(NamedTuple):
    """A process of the job, as it described itself to all others.

    Attributes:
        name: a random name, by which it knows the others, and they know it: on another network the same address may
            be that of another machine.
        hosts: names and addresses by which others may reach it.
        port: where it listens.
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
    """One address of a process; a host name that is not known has no `place`, and a `reason`."""

    host: str
    family: int
    place: Any
    reason: str = ""


def addresses(member: Member, flags: int = 0) -> list[Address]:
    """The address of each host of a process; `flags` are those of `socket.getaddrinfo`."""
    found = []
    for host in member.hosts:
        try:
            family, _, _, _, place = socket.getaddrinfo(host, member.port, type=socket.SOCK_STREAM, flags=flags)[0]
            found.append(Address(host, family, place))
        except OSError as error:
            found.append(Address(host, 0, None, error.strerror or str(error)))
    return found


class Dial:
    """A connection that is being opened.

    Args:
        selector: calls this back.
        address: where to.
        done: called with the connection, or with the reason why there is none.
    """

    def __init__(
        self, selector: selectors.BaseSelector, address: Address, done: Callable[[socket.socket | OSError], None]
    ):
        self._selector = selector
        self._done = done
        self._connection = socket.socket(address.family, socket.SOCK_STREAM)
        self._connection.setblocking(False)
        self._code = self._connection.connect_ex(address.place)
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
        code = self._failure()
        if code:
            self.close()
            self._done(OSError(code, os.strerror(code)))
        else:
            self._selector.unregister(connection)
            self._done(connection)

    def _failure(self) -> int:
        """The number of the error why there is no connection; 0 if there is one."""
        if self._code not in (0, errno.EINPROGRESS):
            return self._code
        code = self._connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            return code
        try:
            is_own = self._connection.getsockname() == self._connection.getpeername()
        except OSError:  # the other side has gone already
            return errno.ECONNRESET
        # Linux joins a connection to itself if its own port happens to be the one that nobody listens on.
        return errno.ECONNREFUSED if is_own else 0


class Link:
    """An open connection that carries lines both ways.

    Args:
        selector: calls this back.
        connection: the connection.

    Attributes:
        received: called with each line; may be set anew at any time.
        ended: called when the other side has closed the connection, which is then closed here too.
    """

    def __init__(self, selector: selectors.BaseSelector, connection: socket.socket):
        self.received: Callable[[bytes], None]
        self.ended: Callable[[], None]
        self._selector = selector
        self._connection = connection
        self._incoming, self._outgoing = b"", b""
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ, self._ready)

    @property
    def is_open(self) -> bool:
        return self._connection.fileno() >= 0

    def send(self, line: bytes) -> None:
        """Sends a line, unless the one before is still on its way: later ones replace earlier ones."""
        if self.is_open and not self._outgoing:
            self._outgoing = line
            self._flush()

    def close(self) -> None:
        """Closes the connection; nothing is called any more."""
        if self.is_open:
            self._selector.unregister(self._connection)
            self._connection.close()

    def _ready(self, events: int) -> None:
        if self.is_open and events & selectors.EVENT_WRITE:
            self._flush()
        if self.is_open and events & selectors.EVENT_READ:
            self._read()

    def _flush(self) -> None:
        before = bool(self._outgoing)
        try:
            self._outgoing = self._outgoing[self._connection.send(self._outgoing) :]
        except BlockingIOError:
            pass
        except OSError:  # reading will tell
            self._outgoing = b""
        if self._outgoing or not before:
            writing = selectors.EVENT_WRITE if self._outgoing else 0
            self._selector.modify(self._connection, selectors.EVENT_READ | writing, self._ready)

    def _read(self) -> None:
        try:
            part = self._connection.recv(LONGEST_LINE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        *lines, self._incoming = (self._incoming + part).split(b"\n")
        for line in lines:
            if self.is_open:
                self.received(line)
        if self.is_open and (not part or len(self._incoming) > LONGEST_LINE_BYTES):
            self.close()
            self.ended()


class Probe:
    """Finds out whether nobody listens at the addresses of a process.

    Args:
        selector: calls this back.
        member: the process.
        refused: called if all connections fail, and a machine has answered that nobody listens there.
    """

    def __init__(self, selector: selectors.BaseSelector, member: Member, refused: Callable[[], None]):
        self._refused = refused
        self._codes: list[int | None] = []
        known = [address for address in addresses(member, socket.AI_NUMERICHOST) if address.place]
        self._awaited = len(known)
        self._dials = [Dial(selector, address, self._done) for address in known]

    def close(self) -> None:
        for dial in self._dials:
            dial.close()

    def _done(self, result: socket.socket | OSError) -> None:
        if isinstance(result, OSError):
            self._codes.append(result.errno)
        else:
            result.close()
        if len(self._codes) == self._awaited and errno.ECONNREFUSED in self._codes:
            self._refused()


@dataclass(eq=False)
class _Attempt:
    """The attempt of a search to reach one address of a process."""

    rank: int
    host: str
    begun: float
    until: float
    connection: Dial | Link | None = None


class Candidate(NamedTuple):
    """A process that a search may find."""

    rank: int
    name: str
    addresses: Sequence[Address]


class Search:
    """Connects with the first of some processes that answers with its name.

    The next address is tried when one has failed, or could not be reached for a moment; the earlier one may still
    answer first.

    Args:
        selector: calls this back.
        candidates: the processes, the preferred one first.
        hello: the line with which this process begins.
        found: called once with the rank and the connection.
        now: the time at the start, in seconds of any clock.
        patience_seconds: how long each address may take to answer.
        between_seconds: how long to wait for a connection before the next address is tried too.

    Attributes:
        reasons: why processes did not answer, by rank.
        losses: how these were lost.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        candidates: Iterable[Candidate],
        hello: bytes,
        found: Callable[[int, Link], None],
        *,
        now: float,
        patience_seconds: float,
        between_seconds: float,
    ):
        self.reasons: dict[int, str] = {}
        self.losses: dict[int, Loss] = {}
        self._selector, self._hello, self._found = selector, hello, found
        self._now, self._patience, self._between = now, patience_seconds, between_seconds
        self._left = deque((one, address) for one in candidates for address in one.addresses)
        self._attempts: list[_Attempt] = []
        self.step(now)

    @property
    def has_failed(self) -> bool:
        """Whether none of the processes answers."""
        return not self._left and not self._attempts

    def step(self, now: float) -> None:
        """Begins attempts, and ends those that take too long; called now and then."""
        self._now = now
        for attempt in [each for each in self._attempts if now >= each.until]:
            self._fail(attempt, "it does not answer", Loss.SILENT)
        while self._left and not any(map(self._is_promising, self._attempts)):
            self._begin(*self._left.popleft())

    def close(self) -> None:
        """Ends all attempts."""
        self._left.clear()
        while self._attempts:
            connection = self._attempts.pop().connection
            if connection is not None:
                connection.close()

    def _is_promising(self, attempt: _Attempt) -> bool:
        return isinstance(attempt.connection, Link) or self._now < attempt.begun + self._between

    def _begin(self, candidate: Candidate, address: Address) -> None:
        attempt = _Attempt(candidate.rank, address.host, self._now, self._now + self._patience)
        self._attempts.append(attempt)

        def done(result: socket.socket | OSError) -> None:
            if isinstance(result, OSError):
                self._fail(attempt, os.strerror(result.errno or 0))
                return
            link = attempt.connection = Link(self._selector, result)
            attempt.until = self._now + self._patience
            link.received = lambda line: self._answered(attempt, candidate.name, line)
            link.ended = lambda: self._fail(attempt, "it does not answer")
            link.send(self._hello)

        if address.place is None:
            self._fail(attempt, address.reason)
            return
        try:
            attempt.connection = Dial(self._selector, address, done)
        except OSError as error:  # this process has no more file descriptors
            self._fail(attempt, error.strerror or str(error))

    def _answered(self, attempt: _Attempt, name: str, line: bytes) -> None:
        link = attempt.connection
        if line != name.encode() or not isinstance(link, Link):
            self._fail(attempt, "another process answers")
            return
        self._attempts.remove(attempt)
        self.close()
        self._found(attempt.rank, link)

    def _fail(self, attempt: _Attempt, reason: str, loss: Loss = Loss.CLOSED) -> None:
        if attempt.connection is not None:
            attempt.connection.close()
        self._attempts.remove(attempt)
        before = self.reasons.get(attempt.rank)
        self.reasons[attempt.rank] = (f"{before}; " if before else "") + f"{attempt.host}: {reason}"
        if self.losses.get(attempt.rank) is not Loss.CLOSED:
            self.losses[attempt.rank] = loss
