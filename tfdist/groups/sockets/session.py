"""State that all connections of a process share: how long to wait for others, and how all learn why the job ends.

The process that first knows why the job cannot continue sends the error to its neighbours in the tree before it closes
its connections, and each neighbour that waits there passes it on. So all processes raise the error that names the
process concerned, and not only that a neighbour has hung up.
"""

from __future__ import annotations

import contextlib
import itertools
import select
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar, NoReturn, Protocol

from tfdist.errors import ClusterError
from tfdist.groups.sockets.operations import ERROR, Operation
from tfdist.jobs import watchdog
from tfdist.jobs.connections import SentError, described, gone, hung_up
from tfdist.jobs.world import World

MOST_AT_ONCE = 1024  # bytes that are received with a header; most frames are shorter
PIECE_BYTES = 1 << 20  # small enough that received data is still in the processor's cache when it is added
READABLE, WRITABLE = select.POLLIN, select.POLLOUT
ENDED = select.POLLHUP | select.POLLERR | select.POLLNVAL


class Link:
    """A connection with another process; it does not block.

    Attributes:
        rank: the rank of the other process.
        connection: the socket.
        ahead: data that was received, and belongs to a later frame.
        sent_bytes: the number of bytes that were sent to the neighbour.
        in_frame: whether a frame was sent in part, so that the neighbour takes the next data for the rest of it.
    """

    def __init__(self, rank: int, connection: socket.socket, ahead: bytes = b""):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        self.rank = rank
        self.connection = connection
        self.ahead = ahead
        self.sent_bytes = 0
        self.in_frame = False

    def send(self, data: memoryview) -> int:
        """Sends a part of `data`; returns the number of bytes, which may be 0."""
        try:
            count = self.connection.send(data[:PIECE_BYTES])
        except BlockingIOError:
            return 0
        self.sent_bytes += count
        return count

    def receive(self, most: int) -> bytes:
        """Receives up to `most` bytes, possibly none.

        Raises:
            OSError: the neighbour has gone.
        """
        try:
            data = self.connection.recv(most)
        except BlockingIOError:
            return b""
        if not data:
            raise hung_up()
        return data

    def receive_into(self, data: memoryview) -> int:
        """Fills a part of `data`; returns the number of bytes, which may be 0.

        Raises:
            OSError: the neighbour has gone.
        """
        try:
            count = self.connection.recv_into(data[:PIECE_BYTES])
        except BlockingIOError:
            return 0
        if not count:
            raise hung_up()
        return count


class Frame:
    """A header of fixed size and its body, which arrive over a link in pieces of any size.

    Attributes:
        whole: whether the frame is complete.
    """

    header_bytes: ClassVar[int]

    def __init__(self, link: Link):
        self.whole = False
        self._link = link
        self._begin, link.ahead = link.ahead, b""
        self._space: memoryview | None = None  # the part of the body that is to be filled
        self._take_header()

    def space_for_body(self, header: bytes) -> memoryview:
        """Reads the complete header, and returns the memory for its body."""
        raise NotImplementedError

    def receive(self) -> None:
        """Receives a part.

        Raises:
            OSError: the other process has gone.
        """
        if self._space is None:
            self._begin += self._link.receive(MOST_AT_ONCE)
            self._take_header()
        else:
            self._space = self._space[self._link.receive_into(self._space) :]
            self.whole = not self._space

    def _take_header(self) -> None:
        """Reads the header, if it is complete, and takes the part of the body that has arrived with it."""
        if len(self._begin) < self.header_bytes:
            return
        body = self.space_for_body(self._begin[: self.header_bytes])
        end = self.header_bytes + len(body)
        arrived = self._begin[self.header_bytes : end]
        self._link.ahead = self._begin[end:]
        body[: len(arrived)] = arrived
        self._space = body[len(arrived) :]
        self.whole = not self._space


class Connection(Protocol):
    """A socket, or what is used as one."""

    def shutdown(self, how: int, /) -> None: ...
    def close(self) -> None: ...


class Session:
    """The common state of the connections of one process.

    Args:
        world: the job.
        timeout_seconds: how long another process may be silent.

    Attributes:
        failure: why the processes are no longer connected; `None` while they are.
        excused: called when others have been silent for too long; returns whether to wait for the same time again.
        tree: the links on which errors are sent too.
        others: collections of all other connections.
    """

    def __init__(self, world: World, timeout_seconds: float):
        self.world = world
        self.timeout_seconds = timeout_seconds
        self.failure: ClusterError | None = None
        self.excused: Callable[[], bool] = lambda: False
        self.tree: list[Link] = []
        self.others: list[Iterable[Connection]] = []

    def require_connected(self) -> None:
        """Raises the error with which the job has ended, if it has ended."""
        if self.failure is not None:
            raise self.failure

    def patience(self, later: int = 0) -> watchdog.Patience:
        """The patience to wait for others with; it ends `later` looks after that of processes that wait too."""
        return watchdog.Patience(self.timeout_seconds * (1 + later / watchdog.LOOKS))

    def waited(self, patience: watchdog.Patience, moved: bool, ranks: Iterable[int]) -> watchdog.Patience:
        """Returns the patience after another look at `ranks`; ends the job if there is none left."""
        if not patience.ends(moved):
            return patience
        if not self.excused():
            self.fail(self.lost(ranks))
        return self.patience()

    def lost(self, ranks: Iterable[int], reason: str = "") -> ClusterError:
        """The error if one of `ranks` has gone, or is silent."""
        return gone(self.world, set(ranks), self.timeout_seconds, reason, conjunction="or")

    def fail(self, error: ClusterError) -> NoReturn:
        """Sends the error to the neighbours, closes all connections, and raises the error."""
        self.failure = self.failure or error  # later errors are consequences of the first
        body = SentError.of(self.failure).model_dump_json().encode()
        frame = Operation(0, ERROR, 0).header(len(body)) + body
        for link in self.tree:
            if not link.in_frame:
                with contextlib.suppress(OSError):
                    link.connection.send(frame)
        self.close()
        raise self.failure

    def give_up(self, error: ClusterError) -> None:
        """Makes the current operation, or the next one, raise `error`; called from another thread."""
        self.failure = self.failure or error
        for connection in self._all():
            with contextlib.suppress(OSError):  # it is closed already
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes all connections."""
        for connection in self._all():
            connection.close()

    def _all(self) -> list[Connection]:
        return [*(link.connection for link in self.tree), *itertools.chain.from_iterable(self.others)]


def wait(wanted: Mapping[int, int], seconds: float) -> dict[int, int]:
    """Waits up to `seconds` for one of the `wanted` events; returns those that came; both by file descriptor.

    A connection that has ended is readable and writable.
    """
    poll = select.poll()
    for descriptor, events in wanted.items():
        poll.register(descriptor, events)
    return {fd: READABLE | WRITABLE if events & ENDED else events for fd, events in poll.poll(1e3 * seconds)}


def reason(error: OSError) -> str:
    """Why a connection has failed, as the end of a sentence."""
    return f" ({described(error)})"
