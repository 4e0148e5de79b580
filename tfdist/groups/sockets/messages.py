"""Messages from one process to another: their format, those that wait to be received, and their connections.

A message is a header of fixed size with the tag, the dtype and the shape, followed by the memory of the array. So a
receiver needs to know none of these in advance.

Each sender has a connection, which is opened when it is first used. A process that receives opens a connection to the
sender too: no message comes over it, but it ends when the sender ends. While a process waits here, for any reason, it
also accepts connections and reads from them, so that two processes which send to each other at the same time do not
deadlock.

Synopsis:

    >>> tag, values = space_for(header(np.zeros([2, 3], np.float16), tag=5))
    >>> tag, values.dtype, values.shape
    (5, dtype('float16'), (2, 3))
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import ml_dtypes  # noqa: F401 (makes the name bfloat16 known to NumPy)
import numpy as np

from tfdist.errors import UsageError
from tfdist.groups.sockets.connections import PAIR, Connections, Origin
from tfdist.groups.sockets.session import READABLE, WRITABLE, Frame, Link, Session, reason, wait
from tfdist.jobs.connections import hung_up

MOST_AXES = 64  # of NumPy's arrays
NAME_NUMBERS = 4  # int64 numbers that contain the name of a dtype
HEADER_NUMBERS = 2 + NAME_NUMBERS + MOST_AXES


def sendable(array: Any) -> np.ndarray:
    """`array`, which may be a tensor, as a C-contiguous array in native byte order.

    Raises:
        UsageError: it contains strings or objects.
    """
    values = np.asarray(array, order="C")
    if values.dtype.kind in "OSUM" or values.dtype.names:
        raise UsageError(f"An array of dtype `{values.dtype}` cannot be sent", "send numbers; encode others as bytes")
    return values.astype(values.dtype.newbyteorder("="), copy=False)


def header(values: np.ndarray, tag: int) -> np.ndarray:
    """The header `[HEADER_NUMBERS]` int64 of a message."""
    name = np.frombuffer(values.dtype.name.encode().ljust(8 * NAME_NUMBERS, b"\0"), np.int64)
    numbers = np.zeros(HEADER_NUMBERS, np.int64)
    numbers[: 2 + NAME_NUMBERS] = tag, *name, values.ndim
    numbers[2 + NAME_NUMBERS :][: values.ndim] = values.shape
    return numbers


def space_for(numbers: np.ndarray) -> tuple[int, np.ndarray]:
    """The tag of a header, and an empty array for the values of its message."""
    name = numbers[1 : 1 + NAME_NUMBERS].tobytes().rstrip(b"\0").decode()
    axes, *shape = numbers[1 + NAME_NUMBERS :].tolist()
    return int(numbers[0]), np.empty(shape[:axes], np.dtype(name))


def memory(values: np.ndarray) -> memoryview:
    """The memory of a contiguous array, as bytes."""
    return memoryview(values.reshape(-1).view(np.uint8).data)


class Mailbox:
    """The messages that have arrived, by sender and tag, each in the order in which they were sent."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, int], deque[np.ndarray]] = {}

    def put(self, rank: int, tag: int, values: np.ndarray) -> None:
        self._waiting.setdefault((rank, tag), deque()).append(values)

    def has(self, rank: int, tag: int) -> bool:
        return (rank, tag) in self._waiting

    def take(self, rank: int, tag: int) -> np.ndarray:
        """Removes and returns the first message from `rank` with `tag`; there must be one."""
        waiting = self._waiting[rank, tag]
        values = waiting.popleft()
        if not waiting:
            del self._waiting[rank, tag]
        return values

    def senders(self, tag: int) -> list[int]:
        """The ranks from which a message with `tag` has arrived."""
        return sorted(rank for rank, waiting_tag in self._waiting if waiting_tag == tag)


class Pairs:
    """The connections of a process with those to which it sends, and from which it receives.

    Args:
        session: the session of the process.
        connections: opens connections to others, and accepts theirs.
        mailbox: takes the messages that arrive.
    """

    def __init__(self, session: Session, connections: Connections, mailbox: Mailbox):
        self._session = session
        self._connections = connections
        self._mailbox = mailbox
        self._opened: dict[int, Link] = {}
        self._accepted: dict[int, Link] = {}
        self._arriving: dict[int, MessageFrame] = {}
        self._gone: dict[int, str] = {}  # the reason, by rank, for processes whose connection has ended

    def __iter__(self) -> Iterator[socket.socket]:
        return (link.connection for link in (*self._opened.values(), *self._accepted.values()))

    def post(self, values: np.ndarray, to: int, tag: int) -> None:
        """Sends a message; messages that arrive in the meantime go to the mailbox."""
        self.take_in()  # finds out whether the receiver has gone
        self._open(to)
        patience = self._session.patience()
        for part in (header(values, tag), values):
            data = memory(part)
            while data:
                sent = self._send(to, data)
                data = data[sent:]
                moved = bool(sent) or self._wait_for(to, WRITABLE, patience.between_looks_seconds)
                patience = self._session.waited(patience, moved, [to])

    def await_message(self, rank: int, tag: int) -> None:
        """Puts arriving messages into the mailbox until it has one from `rank` with `tag`."""
        patience = self._session.patience()
        while not self._mailbox.has(rank, tag):
            self._open(rank)
            self._require_sender(rank, tag)
            moved = self._wait_for(rank, READABLE, patience.between_looks_seconds)
            patience = self._session.waited(patience, moved, [rank])

    def take_in(self) -> None:
        """Puts the messages that have arrived into the mailbox."""
        while self._read_ready(0.0):
            pass

    def _open(self, rank: int) -> None:
        """Opens the connection to `rank`, if there is none."""
        patience = self._session.patience()
        while rank not in self._opened and rank not in self._gone:
            try:
                self._opened[rank] = self._connections.open(Origin(PAIR, rank), patience.between_looks_seconds)
            except TimeoutError:
                patience = self._session.waited(patience, moved=False, ranks=[rank])
            except OSError as error:
                self._gone.setdefault(rank, reason(error))
            self._read_ready(0.0)

    def _send(self, to: int, data: memoryview) -> int:
        self._require_not_gone(to)
        try:
            return self._opened[to].send(data)
        except OSError as error:
            self._session.fail(self._session.lost([to], reason(error)))

    def _wait_for(self, rank: int, event: int, seconds: float) -> bool:
        """Waits up to `seconds` until `rank` has sent something, or can be sent to; reads from all in the meantime."""
        until, sending_to = time.monotonic() + seconds, rank if event == WRITABLE else None
        while not self._read_ready(max(until - time.monotonic(), 0.0), sending_to).get(rank, 0) & event:
            if time.monotonic() >= until:
                return False
        return True

    def _read_ready(self, seconds: float, sending_to: int | None = None) -> dict[int, int]:
        """Waits for messages, or until `sending_to` can be sent to; reads, accepts, and returns the events by rank."""
        self._session.require_connected()
        opened = {rank: link.connection for rank, link in self._opened.items() if rank not in self._gone}
        reading = (*(link.connection for link in self._accepted.values()), *opened.values())
        wanted = {connection.fileno(): READABLE for connection in reading}
        wanted[self._connections.fileno()] = READABLE
        if sending_to in opened:
            wanted[opened[sending_to].fileno()] |= WRITABLE
        ready = wait(wanted, seconds)
        events: dict[int, int] = {}
        for rank, connection in opened.items():
            events[rank] = ready.get(connection.fileno(), 0) & WRITABLE
            if ready.get(connection.fileno(), 0) & READABLE:  # it has ended: nothing else ever comes over it
                self._gone.setdefault(rank, reason(hung_up()))
                events[rank] |= READABLE
        for rank, link in list(self._accepted.items()):
            if ready.get(link.connection.fileno(), 0) & READABLE:
                events[rank] = events.get(rank, 0) | READABLE
                self._read(rank, link)
        if self._connections.fileno() in ready:
            events |= dict.fromkeys(self._accept(), READABLE)
        return {rank: event for rank, event in events.items() if event}

    def _accept(self) -> list[int]:
        """Accepts connections; returns the ranks of the other sides."""
        ranks = range(self._session.world.world_size)
        accepted = self._connections.accept(
            lambda origin: origin.kind == PAIR and origin.rank in ranks and origin.rank not in self._arriving
        )
        for (_, rank), link in accepted.items():
            self._accepted[rank], self._arriving[rank] = link, MessageFrame(link)
            self._deliver(rank, link)
        return [rank for _, rank in accepted]

    def _read(self, rank: int, link: Link) -> None:
        try:
            self._arriving[rank].receive()
        except OSError as error:
            self._accepted.pop(rank).connection.close()
            self._gone.setdefault(rank, reason(error))
            return
        self._deliver(rank, link)

    def _deliver(self, rank: int, link: Link) -> None:
        """Puts complete messages into the mailbox; several may have arrived at once."""
        while (message := self._arriving[rank]).whole:
            self._mailbox.put(rank, message.tag, message.values)
            self._arriving[rank] = MessageFrame(link)

    def _require_not_gone(self, rank: int) -> None:
        if rank in self._gone:
            self._session.fail(self._session.lost([rank], self._gone[rank]))

    def _require_sender(self, rank: int, tag: int) -> None:
        """Ends the job if `rank` has gone, and has left no message."""
        if rank in self._gone:
            self.take_in()
            if rank not in self._accepted and not self._mailbox.has(rank, tag):
                self._require_not_gone(rank)


class MessageFrame(Frame):
    """A message that is being received.

    Attributes:
        tag: the tag, once the header has arrived.
        values: the values, which are complete when the frame is.
    """

    header_bytes = 8 * HEADER_NUMBERS

    def space_for_body(self, header: bytes) -> memoryview:
        self.tag, self.values = space_for(np.frombuffer(header, np.int64))
        return memory(self.values)
