"""What the rendezvous, the heartbeat and the socket group share: connections, and how processes learn of failures.

    connect, Dial         open a connection, and wait for it or do not
    Probe, Search         find out which processes can be reached
    LineConnection        an open connection that carries lines, driven by a selector
    Reception             accepts connections, and closes those that do not identify themselves
    Member, Hello         how a process describes itself to the others, and how it names itself on a connection
    SentError, gone       the error with which a job ends, as all processes raise it

A selector has a callback for each of its sockets as its key's data, which is called with the events.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, NamedTuple, TypeVar

from pydantic import BaseModel, StrictInt, ValidationError

from tfdist.errors import ClusterError, DisagreementError
from tfdist.jobs import secret
from tfdist.jobs.world import World

LONGEST_LINE_BYTES = 1 << 16
SECONDS_TO_IDENTIFY = 5.0
SECONDS_AFTER_ERROR = 0.05
MOST_STRANGERS = 64  # unidentified connections
ANOTHER = "another process answers"

FirstMessage = TypeVar("FirstMessage", bound=BaseModel)
# An all-gather: takes the message of this process, and returns the messages of all processes by rank.
Exchange = Callable[[bytes], list[bytes]]


def connect(host: str, port: int, seconds: float) -> socket.socket:
    """Opens a connection, which has the timeout `seconds`.

    Raises:
        OSError: nobody listens there, or there is no connection within `seconds`.
    """
    connection = socket.create_connection((host, port), timeout=max(seconds, 0.001))
    try:
        if is_connected_to_itself(connection):
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    except OSError:
        connection.close()
        raise
    return connection


def is_connected_to_itself(connection: socket.socket) -> bool:
    """Whether both ends are the same socket: Linux does this if its port happens to be the one that is connected to.

    Raises:
        OSError: the other side has closed the connection already.
    """
    return connection.getsockname() == connection.getpeername()


def hung_up() -> ConnectionResetError:
    """The error for a connection that the other side has closed."""
    return ConnectionResetError(0, "it has hung up")


def described(error: OSError) -> str:
    """The reason of an error, for a message."""
    return error.strerror or str(error)


class Member(NamedTuple):
    """A process of the job, as it describes itself to all others.

    Attributes:
        key: a random key, by which the process and those that connect to it recognize each other, see
            `tfdist.jobs.secret`: on another network, the same address may belong to another machine.
        hosts: names and addresses by which others may reach the process.
        port: the port on which it listens.
    """

    key: str
    hosts: list[str]
    port: int

    @classmethod
    def parse(cls, message: bytes) -> Member:
        return cls(*json.loads(message))

    def message(self) -> bytes:
        return json.dumps(self).encode()


class Hello(BaseModel):
    """Which process has opened a connection: its rank, and what the connection is for."""

    rank: StrictInt
    kind: StrictInt = 0
    proof: str = ""  # see `tfdist.groups.sockets.connections`


def as_line(message: BaseModel) -> bytes:
    """The message as it is sent over a `LineConnection`."""
    return message.model_dump_json(exclude_defaults=True).encode() + b"\n"


class LineConnection:
    """An open connection that carries lines in both directions, and never blocks.

    Args:
        selector: calls this object back.
        connection: the socket, which this object closes.

    Attributes:
        received: called with each line, without its end; may be replaced at any time.
        ended: called when the other side has closed the connection, which is then closed here too.
        host: the address of the other side, if a `Reception` has accepted the connection.
        is_open: whether this object still uses the connection.
    """

    def __init__(self, selector: selectors.BaseSelector, connection: socket.socket, host: str = ""):
        self.host, self.is_open = host, True
        self.received: Callable[[bytes], None]
        self.ended: Callable[[], None]
        self._selector = selector
        self._connection = connection
        self._incoming, self._outgoing = b"", b""
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ, self._ready)

    @property
    def is_sending(self) -> bool:
        """Whether a part of the last line has not been sent yet."""
        return self.is_open and bool(self._outgoing)

    @property
    def has_hung_up(self) -> bool:
        """Whether the other side has closed the connection, even if `ended` was not called yet."""
        try:
            return self._connection.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def send(self, line: bytes) -> None:
        """Sends a line, or drops it if the line before it is not sent yet."""
        if self.is_open and not self._outgoing:
            self._outgoing = line
            self._flush()

    def close(self) -> None:
        """Closes the connection; no callback is called afterwards."""
        if self.is_open:
            self.detach()
            self._connection.close()

    def detach(self) -> tuple[socket.socket, bytes]:
        """Leaves the socket to the caller, with the data that has arrived after the last line."""
        self.is_open = False
        self._selector.unregister(self._connection)
        return self._connection, self._incoming

    def read(self) -> None:
        """Passes on the lines that have arrived; the selector calls this too."""
        try:
            data = self._connection.recv(LONGEST_LINE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._incoming += data
        while self.is_open and b"\n" in self._incoming:
            line, _, self._incoming = self._incoming.partition(b"\n")
            self.received(line)
        if self.is_open and (not data or len(self._incoming) > LONGEST_LINE_BYTES):
            self.close()
            self.ended()

    def _ready(self, events: int) -> None:
        if self.is_open and events & selectors.EVENT_WRITE:
            self._flush()
        if self.is_open and events & selectors.EVENT_READ:
            self.read()

    def _flush(self) -> None:
        had_data = bool(self._outgoing)
        try:
            self._outgoing = self._outgoing[self._connection.send(self._outgoing) :]
        except BlockingIOError:
            pass
        except OSError:  # the next read reports it
            self._outgoing = b""
        if self._outgoing or not had_data:
            writing = selectors.EVENT_WRITE if self._outgoing else 0
            self._selector.modify(self._connection, selectors.EVENT_READ | writing, self._ready)


class Reception(Generic[FirstMessage]):
    """Accepts connections, and closes those that do not identify a process of the job in time.

    Args:
        selector: calls this object back.
        listener: the socket that listens; it is not closed here.
        form: what the hello of a connection contains, as JSON.
        identify: called with a connection and its hello. It returns whether it has taken the connection over.
        key: what both sides prove to know before the hello, see `tfdist.jobs.secret`; `None` if the hello is the proof.
        is_allowed: returns whether the host with an address may connect.
        most: the number of unidentified connections, beyond which one is closed: the oldest from the host that has
            opened the most of them.
        clock: returns the current time in seconds.

    Attributes:
        is_open: whether the listener still accepts connections; false once it is shut down.
        refused: why connections of hosts were closed, by the address of the host; of the first few hosts.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        listener: socket.socket,
        form: type[FirstMessage],
        identify: Callable[[LineConnection, FirstMessage], bool],
        key: bytes | None,
        is_allowed: Callable[[str], bool] = lambda host: True,
        most: int = MOST_STRANGERS,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.is_open = True
        self._selector, self._listener = selector, listener
        self.refused: dict[str, str] = {}
        self._form, self._identify, self._key, self._is_allowed = form, identify, key, is_allowed
        self._most, self._clock = most, clock
        self._deadlines: dict[LineConnection, float] = {}  # of the unidentified connections, the oldest first
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, self._accept)

    @property
    def next_deadline(self) -> float:
        """When `close_late` next closes a connection; infinite if all are identified."""
        return next(iter(self._deadlines.values()), float("inf"))

    def close_late(self) -> None:
        """Closes the connections that have not identified themselves in time."""
        while self._clock() >= self.next_deadline:
            self._close(next(iter(self._deadlines)))

    def close(self) -> None:
        """Accepts no more connections, and closes the unidentified ones; may be called again."""
        with contextlib.suppress(KeyError, ValueError):  # it is unregistered, or closed, already
            self._selector.unregister(self._listener)
        self.close_unidentified()

    def close_unidentified(self) -> None:
        for connection in list(self._deadlines):
            self._close(connection)

    def _accept(self, events: int) -> None:
        try:
            for _ in range(self._most):
                self._receive(*self._listener.accept())
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno == errno.EINVAL:  # it was shut down, to end this
                self.is_open = False
            else:  # this process has no more file descriptors, or the other side has gone
                time.sleep(SECONDS_AFTER_ERROR)

    def _receive(self, accepted: socket.socket, address: Any) -> None:
        host = str(address[0]).removeprefix("::ffff:")
        if not self._is_allowed(host):
            accepted.close()
            self._note(host, "it is not a host of the job")
            return
        connection = LineConnection(self._selector, accepted, host)
        if len(self._deadlines) >= self._most:
            self._close(self._superfluous())
        self._deadlines[connection] = self._clock() + SECONDS_TO_IDENTIFY
        connection.ended = lambda: self._close(connection)
        if self._key is None:
            connection.received = lambda line: self._identified(connection, line)
        else:
            acceptance = secret.Acceptance(self._key)
            connection.received = lambda line: self._prove(connection, acceptance, line)
            connection.send(acceptance.challenge())
        connection.read()  # often the first line has arrived already

    def _superfluous(self) -> LineConnection:
        """The connection to close for a new one: a host with many connections takes none from other hosts."""
        [(busiest, _)] = Counter(connection.host for connection in self._deadlines).most_common(1)
        return next(connection for connection in self._deadlines if connection.host == busiest)

    def _prove(self, connection: LineConnection, acceptance: secret.Acceptance, line: bytes) -> None:
        response = acceptance.respond(line)
        if response is None:
            self._note(connection.host, "it does not know the secret of the job")
            self._close(connection)
        else:
            connection.send(response)
            connection.received = lambda line: self._identified(connection, line)

    def _note(self, host: str, reason: str) -> None:
        if len(self.refused) < MOST_STRANGERS:
            self.refused.setdefault(host, reason)

    def _identified(self, connection: LineConnection, line: bytes) -> None:
        try:
            is_taken = self._identify(connection, self._form.model_validate_json(line))
        except ValidationError:
            is_taken = False
        if is_taken:
            del self._deadlines[connection]
        else:
            self._close(connection)

    def _close(self, connection: LineConnection) -> None:
        del self._deadlines[connection]
        connection.close()


class Loss(StrEnum):
    """How a process was lost."""

    ENDED = "ended"  # it announced that its program has ended
    CLOSED = "closed"  # its connections have closed, and it cannot be reached
    SILENT = "silent"  # it has sent nothing for too long


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
    """A process that a search may connect with; the key is that of `Member`."""

    rank: int
    key: str
    addresses: Sequence[Address]


class Search:
    """Connects with the first of several processes that proves to know its key.

    The next address is tried when an attempt has failed, or takes longer than a moment; the earlier attempt may still
    be answered first.

    Args:
        selector: calls this object back.
        candidates: the processes, the preferred one first.
        hello: what this process then sends.
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
            opening = secret.Opening(candidate.key.encode())
            connection.received = lambda line: self._prove(attempt, opening, line)
            connection.ended = lambda: self._fail(attempt, "it does not answer")

        if address.sockaddr is None:
            self._fail(attempt, address.reason)
            return
        try:
            attempt.connection = Dial(self._selector, address, done)
        except OSError as error:  # this process has no more file descriptors
            self._fail(attempt, described(error))

    def _prove(self, attempt: _Attempt, opening: secret.Opening, line: bytes) -> None:
        connection = attempt.connection
        assert isinstance(connection, LineConnection)
        try:
            connection.send(opening.respond(line))
        except ValueError:
            self._fail(attempt, ANOTHER)
            return
        connection.received = lambda line: self._connect(attempt, connection, opening.is_proved_by(line))
        connection.ended = lambda: self._fail(attempt, ANOTHER)

    def _connect(self, attempt: _Attempt, connection: LineConnection, is_proved: bool) -> None:
        if not is_proved:
            self._fail(attempt, ANOTHER)
            return
        connection.send(self._hello)
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


class SentError(BaseModel):
    """An error that ends the job, as one process sends it to the others, which raise it too."""

    differing: bool
    sentence: str
    hint: str

    @classmethod
    def of(cls, error: ClusterError) -> SentError:
        return cls(differing=isinstance(error, DisagreementError), sentence=error.sentence, hint=error.hint)

    def error(self) -> ClusterError:
        return (DisagreementError if self.differing else ClusterError)(self.sentence, self.hint)


def gone(
    world: World, ranks: Collection[int], seconds: float, reason: str = "", conjunction: str = "and"
) -> ClusterError:
    """Returns the error for processes that have ended, or have been silent for `seconds`.

    Args:
        world: the job.
        ranks: of these processes.
        seconds: how long a process may be silent.
        reason: the end of the sentence.
        conjunction: "or" if only one of the processes is gone, and this process does not know which one.
    """
    names = world.named_all(ranks, conjunction)
    return ClusterError.lost(f"Gone, or silent for {seconds:g} s: {names}{reason}")
