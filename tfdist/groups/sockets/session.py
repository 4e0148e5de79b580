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
from typing import NoReturn

from tfdist.errors import ClusterError
from tfdist.groups.sockets.operations import error_frame
from tfdist.jobs import watchdog
from tfdist.jobs.connections import described, gone, hung_up
from tfdist.jobs.world import World

PIECE_BYTES = 1 << 20  # small enough that received data is still in the processor's cache when it is added
READABLE, WRITABLE = select.POLLIN, select.POLLOUT
ENDED = select.POLLHUP | select.POLLERR | select.POLLNVAL


class Link:
    """A connection with a neighbour in the ring or in the tree; it does not block.

    Attributes:
        rank: the rank of the neighbour.
        connection: the socket.
        ahead: data that was received, and belongs to a later frame.
        sent_bytes: the number of bytes that were sent to the neighbour.
        in_frame: whether a frame was sent in part, so that the neighbour takes the next data for the rest of it.
    """

    def __init__(self, rank: int, connection: socket.socket):
        self.rank = rank
        self.connection = connection
        self.ahead = b""
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


class Session:
    """The common state of the connections of one process.

    Args:
        world: the job.
        timeout_seconds: how long another process may be silent.

    Attributes:
        failure: why the processes are no longer connected; `None` while they are.
        excused: called when others have been silent for too long; returns whether to wait for the same time again.
        tree: the links on which errors are sent too.
        others: collections of all other sockets.
    """

    def __init__(self, world: World, timeout_seconds: float):
        self.world = world
        self.timeout_seconds = timeout_seconds
        self.failure: ClusterError | None = None
        self.excused: Callable[[], bool] = lambda: False
        self.tree: list[Link] = []
        self.others: list[Iterable[socket.socket]] = []

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
        frame = error_frame(self.failure)
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

    def _all(self) -> list[socket.socket]:
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
