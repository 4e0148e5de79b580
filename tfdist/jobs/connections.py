"""What the rendezvous, the heartbeat and the socket group share: connections, and errors that are sent to others.

    connect               opens a connection and waits for it
    LineConnection        an open connection that carries lines, driven by a selector
    Reception             accepts line connections, and closes those that do not identify themselves
    SentError, gone       the error with which a job ends, as all processes raise it

A selector has a callback for each of its sockets as its key's data, which is called with the events.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import time
from collections.abc import Callable, Collection

from pydantic import BaseModel

from tfdist.errors import ClusterError, DisagreementError
from tfdist.jobs.world import World

LONGEST_LINE_BYTES = 1 << 16
SECONDS_TO_IDENTIFY = 5.0
SECONDS_AFTER_ERROR = 0.05

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


class LineConnection:
    """An open connection that carries lines in both directions, and never blocks.

    Args:
        selector: calls this object back.
        connection: the socket, which this object closes.

    Attributes:
        received: called with each line, without its end; may be replaced at any time.
        ended: called when the other side has closed the connection, which is then closed here too.
        host: the address of the other side, if a `Reception` has accepted the connection.
    """

    def __init__(self, selector: selectors.BaseSelector, connection: socket.socket, host: str = ""):
        self.host = host
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
            self._selector.unregister(self._connection)
            self._connection.close()

    def _ready(self, events: int) -> None:
        if self.is_open and events & selectors.EVENT_WRITE:
            self._flush()
        if self.is_open and events & selectors.EVENT_READ:
            self._read()

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

    def _read(self) -> None:
        try:
            data = self._connection.recv(LONGEST_LINE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        *lines, self._incoming = (self._incoming + data).split(b"\n")
        for line in lines:
            if self.is_open:
                self.received(line)
        if self.is_open and (not data or len(self._incoming) > LONGEST_LINE_BYTES):
            self.close()
            self.ended()


class Reception:
    """Accepts connections, and closes those whose first line does not identify a process of the job in time.

    Args:
        selector: calls this object back.
        listener: the socket that listens; it is not closed here.
        identify: called with a connection and its first line. It returns whether it has taken the connection over.
        most: the number of unidentified connections, beyond which the oldest one is closed.
        clock: returns the current time in seconds.

    Attributes:
        is_open: whether the listener still accepts connections; false once it is shut down.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        listener: socket.socket,
        identify: Callable[[LineConnection, bytes], bool],
        most: int,
        clock: Callable[[], float],
    ):
        self.is_open = True
        self._selector, self._listener = selector, listener
        self._identify, self._most, self._clock = identify, most, clock
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
        for connection in list(self._deadlines):
            self._close(connection)

    def _accept(self, events: int) -> None:
        try:
            accepted, address = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno == errno.EINVAL:  # it was shut down, to end this
                self.is_open = False
            else:  # this process has no more file descriptors, or the other side has gone
                time.sleep(SECONDS_AFTER_ERROR)
            return
        connection = LineConnection(self._selector, accepted, address[0])
        if len(self._deadlines) >= self._most:
            self._close(next(iter(self._deadlines)))
        self._deadlines[connection] = self._clock() + SECONDS_TO_IDENTIFY
        connection.received = lambda line: self._received(connection, line)
        connection.ended = lambda: self._close(connection)

    def _received(self, connection: LineConnection, line: bytes) -> None:
        if self._identify(connection, line):
            del self._deadlines[connection]
        else:
            self._close(connection)

    def _close(self, connection: LineConnection) -> None:
        del self._deadlines[connection]
        connection.close()


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
