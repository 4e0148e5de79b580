"""Connects the processes of a job by sockets: in a ring, and pairwise.

An exchange by other means tells all processes the port of each, and the secret with which its connections begin.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, cast

from tfdist.cluster import ports
from tfdist.cluster.world import World
from tfdist.errors import ClusterError

SECRET_BYTES = 16
# Each connection begins with the secret of the accepting process, the kind, and the rank of the connecting process.
HELLO = struct.Struct(f"!{SECRET_BYTES}sII")
RING, PAIR = range(2)
MOST_PENDING = 64  # connections whose hello is incomplete

Exchange = Callable[[bytes], list[bytes]]


class Origin(NamedTuple):
    """The kind of a connection, and the rank of the process that opened it."""

    kind: int
    rank: int


@dataclass(frozen=True)
class Connections:
    """The connections of one process; none of them blocks.

    Attributes:
        following: sends to the next process of the ring.
        previous: receives from the previous process.
        pairs: by rank; sends to each other process, and receives from it.
    """

    following: socket.socket
    previous: socket.socket
    pairs: dict[int, socket.socket]

    def __iter__(self) -> Iterator[socket.socket]:
        return iter((self.following, self.previous, *self.pairs.values()))


def connect(world: World, exchange: Exchange, seconds: float) -> Connections:
    """Connects this process with the others; all of them call it.

    Args:
        world: the job with the addresses of all processes, and which of them this one is.
        exchange: returns the message of each process, by rank.
        seconds: how long connecting may take.

    Raises:
        ClusterError: the processes cannot be connected; raised in all of them.
    """
    secret = secrets.token_bytes(SECRET_BYTES)
    opened: dict[Origin, socket.socket] = {}
    accepted: dict[Origin, socket.socket] = {}
    reason, size = "", world.world_size
    with ports.listen_anywhere() as listener:
        answers = exchange(secret + listener.getsockname()[1].to_bytes(4, "big"))
        deadline = time.monotonic() + seconds
        try:
            following = Origin(RING, (world.rank + 1) % size)
            for target in (following, *(Origin(PAIR, rank) for rank in range(world.rank + 1, size))):
                opened[target] = _open(world, target, answers[target.rank], deadline)
            expected = {Origin(RING, (world.rank - 1) % size), *(Origin(PAIR, rank) for rank in range(world.rank))}
            _accept(listener, secret, expected, accepted, deadline)
        except OSError as error:
            reason = f"{world.named(world.rank)}: {error.strerror or error}"
        reasons = [answer.decode() for answer in exchange(reason.encode()) if answer]
    connections = [*opened.values(), *accepted.values()]
    if reasons:
        for connection in connections:
            connection.close()
        raise ClusterError(
            f"The processes cannot be connected with each other: {'; '.join(reasons)}",
            "let the machines of the job reach all ports of each other",
        )
    for connection in connections:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
    (previous,) = [connection for origin, connection in accepted.items() if origin.kind == RING]
    pairs = {origin.rank: connection for origin, connection in (accepted | opened).items() if origin.kind == PAIR}
    return Connections(opened[following], previous, pairs)


def _open(world: World, target: Origin, answer: bytes, deadline: float) -> socket.socket:
    """Connects to a process, whose `answer` is its secret and its port."""
    address = world.tasks[target.rank].host, int.from_bytes(answer[SECRET_BYTES:], "big")
    connection = socket.create_connection(address, timeout=max(deadline - time.monotonic(), 0.001))
    connection.sendall(HELLO.pack(answer[:SECRET_BYTES], target.kind, world.rank))
    return connection


def _accept(
    listener: socket.socket,
    secret: bytes,
    expected: set[Origin],
    accepted: dict[Origin, socket.socket],
    deadline: float,
) -> None:
    """Adds the `expected` connections to `accepted`, and closes all others."""
    hellos: dict[socket.socket, bytes] = {}  # as far as they have arrived, the oldest connection first
    listener.setblocking(False)
    try:
        while accepted.keys() != expected:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("timed out")
            with selectors.DefaultSelector() as selector:
                for one in (listener, *hellos):
                    selector.register(one, selectors.EVENT_READ)
                ready = [cast(socket.socket, key.fileobj) for key, _ in selector.select(left)]
            for connection in ready:
                if connection is listener:
                    with contextlib.suppress(OSError):  # the peer has closed it already
                        hellos[listener.accept()[0]] = b""
                elif (origin := _origin(connection, hellos, secret)) in expected - accepted.keys():
                    del hellos[connection]
                    accepted[origin] = connection
            while len(hellos) > MOST_PENDING + len(expected):
                _reject(next(iter(hellos)), hellos)
    finally:
        for connection in hellos:
            connection.close()


def _origin(connection: socket.socket, hellos: dict[socket.socket, bytes], secret: bytes) -> Origin | None:
    """The origin of a connection once its hello is complete; rejects it if it ends or has another secret."""
    part = b""
    with contextlib.suppress(OSError):
        part = connection.recv(HELLO.size - len(hellos[connection]))
    hellos[connection] += part
    hello = hellos[connection]
    if not part or (len(hello) >= SECRET_BYTES and not secrets.compare_digest(hello[:SECRET_BYTES], secret)):
        _reject(connection, hellos)
        return None
    return Origin(*HELLO.unpack(hello)[1:]) if len(hello) == HELLO.size else None


def _reject(connection: socket.socket, hellos: dict[socket.socket, bytes]) -> None:
    del hellos[connection]
    connection.close()
