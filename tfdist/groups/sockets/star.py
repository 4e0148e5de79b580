"""A first exchange of messages, by connections of all processes with the chief, on the chief's port in TF_CONFIG.

The processes have met there before (`tfdist.jobs.rendezvous`); afterwards nobody listens on it.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterator

from tfdist.errors import ClusterError
from tfdist.groups.sockets.connections import Exchange
from tfdist.jobs import ports
from tfdist.jobs.world import World

SECONDS_BETWEEN_TRIES = 0.02
HELLO = struct.Struct("!8sI")  # the greeting, and the rank of who connects
LENGTH = struct.Struct("!I")
GREETING = b"tfdist-1"
LONGEST_BYTES = 1 << 16


@contextlib.contextmanager
def joined(world: World, seconds: float) -> Iterator[Exchange]:
    """The context in which all processes exchange short messages; all of them enter it.

    Raises:
        ClusterError: a process is not there within `seconds`, or hangs up.
    """
    deadline = time.monotonic() + seconds
    with contextlib.ExitStack() as stack:
        try:
            found = _accepted(world, deadline, stack) if world.is_chief else [_connected(world, deadline, stack)]
        except OSError as error:
            raise ClusterError(
                f"{world.named(world.rank)} could not connect with {'the others' if world.is_chief else 'the chief'} "
                f"within {seconds:g} s: {error.strerror or error}",
                "start every process of the job, and let their machines reach each other",
            ) from error

        def exchange(message: bytes) -> list[bytes]:
            try:
                return _by_chief(found, message) if world.is_chief else _by_other(found[0], message, world.world_size)
            except OSError as error:
                raise ClusterError.lost(f"A process of the job has gone: {error.strerror or error}") from error

        yield exchange


def _accepted(world: World, deadline: float, stack: contextlib.ExitStack) -> list[socket.socket]:
    """The connections with the others, by rank."""
    found: dict[int, socket.socket] = {}
    with ports.listen(world.tasks[0].port) as listener:
        while len(found) < world.world_size - 1:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            connection, _ = listener.accept()
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            with contextlib.suppress(OSError):
                greeting, rank = HELLO.unpack(_read(connection, HELLO.size))
                if greeting == GREETING and 0 < rank < world.world_size and rank not in found:
                    connection.sendall(GREETING)
                    found[rank] = stack.enter_context(connection)
                    continue
            connection.close()
    return [found[rank] for rank in sorted(found)]


def _connected(world: World, deadline: float, stack: contextlib.ExitStack) -> socket.socket:
    chief = world.tasks[0]
    while True:
        left = deadline - time.monotonic()
        try:
            connection = socket.create_connection((chief.host, chief.port), timeout=max(0.01, left))
            try:
                connection.sendall(HELLO.pack(GREETING, world.rank))
                if _read(connection, len(GREETING)) == GREETING:
                    return stack.enter_context(connection)
            except OSError:
                connection.close()
                raise
            connection.close()
        except OSError:
            if left <= 0:
                raise
        time.sleep(SECONDS_BETWEEN_TRIES)


def _by_chief(others: list[socket.socket], message: bytes) -> list[bytes]:
    messages = [message, *map(_receive, others)]
    for connection in others:
        for each in messages:
            _send(connection, each)
    return messages


def _by_other(chief: socket.socket, message: bytes, size: int) -> list[bytes]:
    _send(chief, message)
    return [_receive(chief) for _ in range(size)]


def _send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(LENGTH.pack(len(message)) + message)


def _receive(connection: socket.socket) -> bytes:
    (length,) = LENGTH.unpack(_read(connection, LENGTH.size))
    if length > LONGEST_BYTES:
        raise ConnectionError(0, "it says something else")
    return _read(connection, length)


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionResetError(0, "it has hung up")
        data += part
    return data
