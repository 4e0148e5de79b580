"""Connects the processes of a job by sockets: in a ring and in a tree at the start, and pairwise on demand.

Before, an exchange by other means tells all processes the port of each process and the secret with which connections to
it begin.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, cast

from tfdist.errors import ClusterError
from tfdist.groups.sockets import tree
from tfdist.groups.sockets.session import Link
from tfdist.jobs import connections, ports
from tfdist.jobs.connections import Exchange
from tfdist.jobs.world import World

SECRET_BYTES = 16
# How a connection begins: the secret of the accepting process, the kind, and the rank of the connecting process.
HELLO = struct.Struct(f"!{SECRET_BYTES}sII")
RING, TREE, PAIR, HOST, HOSTS = range(5)
MOST_PENDING = 64  # connections whose hello is incomplete


class Origin(NamedTuple):
    """The kind of a connection, and the rank of the process that opened it."""

    kind: int
    rank: int


@dataclass(frozen=True)
class Connections:
    """The connections with which a process starts, and how it makes others; none of them blocks.

    Attributes:
        following: the link to the next process of the ring, for sending.
        previous: the link to the previous process, for receiving.
        above: the link to the parent in the tree; none in process 0.
        below: the links to the children in the tree, by rank.
        listener: accepts connections.
        addresses: where all processes listen.
    """

    following: Link
    previous: Link
    above: list[Link]
    below: list[Link]
    listener: Listener
    addresses: Addresses


class Addresses:
    """Where all processes listen.

    Args:
        world: the job, with the hosts of all processes.
        answers: the secret and the port of each process, by rank.
    """

    def __init__(self, world: World, answers: list[bytes]):
        self._world = world
        self._answers = answers

    def open(self, target: Origin, seconds: float) -> socket.socket:
        """Opens a connection of a kind to a rank.

        Raises:
            OSError: it cannot be opened, or not within `seconds`.
        """
        answer = self._answers[target.rank]
        port = int.from_bytes(answer[SECRET_BYTES:], "big")
        connection = connections.connect(self._world.tasks[target.rank].host, port, seconds)
        try:
            connection.sendall(HELLO.pack(answer[:SECRET_BYTES], target.kind, self._world.rank))
        except OSError:
            connection.close()
            raise
        return _prepared(connection)


class Listener:
    """Accepts connections that begin with the secret of this process, and closes all others."""

    def __init__(self, listener: socket.socket, secret: bytes):
        listener.setblocking(False)
        self._listener = listener
        self._secret = secret
        self._hellos: dict[socket.socket, bytes] = {}  # what has arrived of each, the oldest connection first

    def __iter__(self) -> Iterator[socket.socket]:
        """The sockets that become readable if there is something to accept."""
        return iter((self._listener, *self._hellos))

    def accept(self, ready: Iterable[socket.socket], wanted: Callable[[Origin], bool]) -> dict[Origin, socket.socket]:
        """The `wanted` connections whose hello is complete, after the sockets `ready` have become readable."""
        accepted: dict[Origin, socket.socket] = {}
        for readable in ready:
            for connection in self._new() if readable is self._listener else [readable]:
                origin = self._origin(connection)
                if origin is not None and origin not in accepted and wanted(origin):
                    del self._hellos[connection]
                    accepted[origin] = _prepared(connection)
                elif origin is not None:
                    self._reject(connection)
        while len(self._hellos) > MOST_PENDING:
            self._reject(next(iter(self._hellos)))
        return accepted

    def close_pending(self) -> None:
        """Closes the connections whose hello is incomplete."""
        for connection in list(self._hellos):
            self._reject(connection)

    def close(self) -> None:
        """Accepts no more connections."""
        for connection in self:
            connection.close()

    def _new(self) -> Iterator[socket.socket]:
        """Accepts the connections that have arrived."""
        with contextlib.suppress(OSError):  # there is none left, or the peer has closed it already
            while True:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                self._hellos[connection] = b""
                yield connection

    def _origin(self, connection: socket.socket) -> Origin | None:
        """The origin of a connection once its hello is complete; rejects it if it ends or has another secret."""
        data = b""
        try:
            data = connection.recv(HELLO.size - len(self._hellos[connection]))
        except BlockingIOError:
            return None
        except OSError:
            pass
        self._hellos[connection] += data
        hello = self._hellos[connection]
        if not data or (len(hello) >= SECRET_BYTES and not secrets.compare_digest(hello[:SECRET_BYTES], self._secret)):
            self._reject(connection)
            return None
        return Origin(*HELLO.unpack(hello)[1:]) if len(hello) == HELLO.size else None

    def _reject(self, connection: socket.socket) -> None:
        del self._hellos[connection]
        connection.close()


def connect(world: World, exchange: Exchange, seconds: float) -> Connections:
    """Connects this process with the others; all of them call it.

    Args:
        world: the job with the addresses of all processes, and the rank of this process.
        exchange: returns the message of each process, by rank.
        seconds: how long connecting may take.

    Raises:
        ClusterError: the processes cannot be connected; raised in all of them.
    """
    secret = secrets.token_bytes(SECRET_BYTES)
    listening = ports.listen_anywhere()
    listener = Listener(listening, secret)
    addresses = Addresses(world, exchange(secret + listening.getsockname()[1].to_bytes(4, "big")))
    rank, size = world.rank, world.world_size
    following, previous = Origin(RING, (rank + 1) % size), Origin(RING, (rank - 1) % size)
    above = [Origin(TREE, parent) for parent in tree.parents(rank, size)]
    below = [Origin(TREE, child) for child in tree.children(rank, size)]
    opened: dict[Origin, socket.socket] = {}
    accepted: dict[Origin, socket.socket] = {}
    problem = ""
    try:
        opened, accepted = open_and_accept(addresses, listener, [following, *above], {previous, *below}, seconds)
        listener.close_pending()
    except OSError as error:
        problem = f"{world.named(rank)}: {connections.described(error)}"
    problems = [answer.decode() for answer in exchange(problem.encode()) if answer]
    if problems:
        listener.close()
        for connection in (*opened.values(), *accepted.values()):
            connection.close()
        raise ClusterError(
            f"The processes cannot be connected with each other: {'; '.join(problems)}",
            "let the machines of the job reach all ports of each other",
        )
    return Connections(
        Link(following.rank, opened[following]),
        Link(previous.rank, accepted[previous]),
        [Link(origin.rank, opened[origin]) for origin in above],
        [Link(origin.rank, accepted[origin]) for origin in below],
        listener,
        addresses,
    )


def open_and_accept(
    addresses: Addresses, listener: Listener, targets: Iterable[Origin], expected: set[Origin], seconds: float
) -> tuple[dict[Origin, socket.socket], dict[Origin, socket.socket]]:
    """Returns the connections to `targets`, which this process opens, and the `expected` ones, which others open.

    Raises:
        OSError: one of them cannot be made, or not within `seconds`; the others are closed.
    """
    opened: dict[Origin, socket.socket] = {}
    deadline = time.monotonic() + seconds
    try:
        for target in targets:
            opened[target] = addresses.open(target, deadline - time.monotonic())
        return opened, _accept(listener, expected, deadline)
    except OSError:
        for connection in opened.values():
            connection.close()
        raise


def _accept(listener: Listener, expected: set[Origin], deadline: float) -> dict[Origin, socket.socket]:
    """Accepts the `expected` connections.

    Raises:
        TimeoutError: one is missing at the time `deadline` of `time.monotonic`; the others are closed.
    """
    accepted: dict[Origin, socket.socket] = {}
    while accepted.keys() != expected:
        left = deadline - time.monotonic()
        if left <= 0:
            for connection in accepted.values():
                connection.close()
            raise TimeoutError("timed out")
        with selectors.DefaultSelector() as selector:
            for awaited in listener:
                selector.register(awaited, selectors.EVENT_READ)
            ready = [cast(socket.socket, key.fileobj) for key, _ in selector.select(left)]
        accepted |= listener.accept(ready, (expected - accepted.keys()).__contains__)
    return accepted


def _prepared(connection: socket.socket) -> socket.socket:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setblocking(False)
    return connection
