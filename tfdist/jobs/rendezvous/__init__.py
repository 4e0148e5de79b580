"""The processes of a job connect before TensorFlow's servers start, so that an error can name one that is missing.

    rank 1, 2, ...    send a hello to the chief's port         →  {"tfdist": 1, "rank": 1, "seconds": 60.0, ...}
    chief             waits for all ranks, or the deadline     →  {"tfdist": 1, "refusal": null}, or the reason, to all

The rendezvous uses the chief's own port in TF_CONFIG, which TensorFlow takes over afterwards; a rank that connects to
TensorFlow there is late. Messages are lines of bounded length. The chief ignores everything else, since other programs
may connect to the port. A large cluster is compared by its hash. Until they close their connections, the processes can
exchange short messages through the chief. This module never imports TensorFlow.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import socket
import time
from collections.abc import Callable, Iterator, Mapping

from pydantic import ValidationError

from tfdist.errors import ClusterError
from tfdist.jobs import ports
from tfdist.jobs.connections import LONGEST_LINE_BYTES, Exchange, connect, described, hung_up
from tfdist.jobs.rendezvous.chief import ChiefServer
from tfdist.jobs.rendezvous.messages import (
    CLUSTER,
    LONGEST_ANSWER_BYTES,
    SECONDS_TO_RECEIVE_ANSWER,
    Answer,
    Hello,
    as_line,
    described_cluster,
    packed,
    unpacked,
)
from tfdist.jobs.task import Task, means_itself
from tfdist.jobs.world import World

SECONDS_BETWEEN_TRIES = 0.1
SECONDS_TO_CONNECT = 5.0
SECONDS_TO_FIRST_BYTE = 3.0
SMALLEST_BACKLOG = 128
# The first frame of an HTTP/2 server, such as TensorFlow's, after the three bytes of its length: type 4, no flags,
# stream 0 (RFC 9113, sections 3.4 and 6.5).
HTTP2_SETTINGS = b"\4\0\0\0\0\0"
LENGTH_BYTES = 3


def meet(world: World, settings: Mapping[str, str], deadline_seconds: float) -> bool:
    """Waits until every process of `world` has connected with equal `settings`; `False` if the job had already begun.

    Args:
        world: the job and the rank of this process; the cluster must be the same in all processes too.
        settings: what must be equal in all processes, such as the version of TensorFlow.
        deadline_seconds: how long to wait for the others; the shortest deadline of all processes counts.

    Raises:
        DisagreementError: the settings differ; raised in every process, with the values of all processes.
        ClusterError: a process is missing at the deadline, two processes claim the same rank, or this process cannot
            listen on its address.
    """
    with joined(world, settings, deadline_seconds) as exchange:
        return exchange is not None


@contextlib.contextmanager
def joined(world: World, settings: Mapping[str, str], deadline_seconds: float) -> Iterator[Exchange | None]:
    """As `meet`, but the processes stay connected, and can exchange short messages, within the context.

    The context has no exchange if the job had already begun.
    """
    if world.world_size == 1:
        yield lambda message: [message]
        return
    task = world.tasks[world.rank]
    # TensorFlow's server, which listens on every interface, will need this port.
    _listen_on_every_interface(task).close()
    cluster = described_cluster(world.cluster())
    deadline = time.monotonic() + deadline_seconds
    if world.rank == 0:
        settings = {CLUSTER: cluster, **settings}
        listener = _listen(task, world.world_size)
        with contextlib.closing(ChiefServer(world, settings, listener, deadline, deadline_seconds)) as server:
            refusal = server.serve()
            if refusal is not None:
                raise refusal.error()
            yield server.exchange
        return
    reached = _ask_chief(world, cluster, settings, deadline, deadline_seconds)
    if reached is None:
        yield None
        return
    connection, answer = reached
    with connection:
        if answer.refusal is not None:
            raise answer.refusal.error()
        yield functools.partial(_exchange_through_chief, connection, deadline_seconds)


def begun_without(world: World) -> ClusterError:
    """The error for a process that is too late for its job."""
    return ClusterError(
        f"The job of {world.named(0)} has begun without {world.named(world.rank)}",
        "end all its processes, and start all of them again",
    )


def _listen_on_every_interface(task: Task, backlog: int = 1) -> socket.socket:
    try:
        return ports.listen(task.port, backlog)
    except OSError as error:
        raise ClusterError(
            f"`TF_CONFIG` has `{task.address}` for this process, {task.role} {task.index}, and its port cannot be "
            f"listened on: {error.strerror}",
            f"end the process that holds port {task.port}, or give the task another port",
        ) from error


def _listen(task: Task, world_size: int) -> socket.socket:
    """The chief's socket: on its own address where that is unambiguous, else on every interface.

    A host name is ambiguous: it can have several addresses, and on many systems a host's own name resolves to a
    loopback address on the host itself. And an address may exist only outside, as behind address translation.
    """
    backlog = max(SMALLEST_BACKLOG, world_size)  # all processes may connect at once
    with contextlib.suppress(OSError):
        if means_itself(task.host) or _is_address(task.host):
            family, _, _, _, address = socket.getaddrinfo(task.host, task.port, type=socket.SOCK_STREAM)[0]
            return socket.create_server(address[:2], family=family, backlog=backlog, reuse_port=ports.shared())
    return _listen_on_every_interface(task, backlog)


def _is_address(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return False


def _ask_chief(
    world: World, cluster: str, settings: Mapping[str, str], deadline: float, deadline_seconds: float
) -> tuple[socket.socket, Answer] | None:
    """The connection to the chief, and its answer to this rank; `None` if TensorFlow answers in its place."""
    chief = world.tasks[0]
    reason = "no time was left"
    while (left := deadline - time.monotonic()) > 0:
        hello = Hello(
            tfdist=1,
            rank=world.rank,
            seconds=left,
            deadline_seconds=deadline_seconds,
            world_size=world.world_size,
            cluster=cluster,
            settings=dict(settings),
        )
        with contextlib.ExitStack() as stack:
            try:
                # Each try resolves the name again: a host that drops packets may have got another address.
                connection = connect(chief.host, chief.port, min(left, SECONDS_TO_CONNECT))
                stack.enter_context(connection)
                connection.sendall(as_line(hello))
                reason = "it was reached and did not answer"
                text = _read(connection, left + SECONDS_TO_RECEIVE_ANSWER, _is_answer)
            except OSError as error:
                if not isinstance(error, TimeoutError):
                    reason = described(error)
            else:
                if text[LENGTH_BYTES:].startswith(HTTP2_SETTINGS):
                    return None
                if text:
                    answer = _parsed_answer(text, chief)
                    stack.pop_all()
                    return connection, answer
        time.sleep(min(SECONDS_BETWEEN_TRIES, max(0.0, deadline - time.monotonic())))
    raise ClusterError(
        f"{chief}, which is the chief, could not be reached within {deadline_seconds:g} s: {reason}",
        f"start every process of the job, and see that `{chief.address}` can be reached from this machine",
    )


def _is_answer(text: bytes) -> bool:
    """Whether `text` is a line, or enough to see that the other side is not the chief."""
    is_other = len(text) >= LENGTH_BYTES + len(HTTP2_SETTINGS) and not text.startswith(b"{")
    return b"\n" in text or is_other or len(text) > LONGEST_ANSWER_BYTES


def _read(connection: socket.socket, seconds: float, is_complete: Callable[[bytes], bool]) -> bytes:
    """Reads until the data is complete, or the other side hangs up."""
    until = time.monotonic() + seconds
    data = b""
    while not is_complete(data):
        connection.settimeout(max(0.01, until - time.monotonic()))
        part = connection.recv(LONGEST_LINE_BYTES)
        if not part:
            break
        data += part
    return data


def _exchange_through_chief(connection: socket.socket, seconds: float, message: bytes) -> list[bytes]:
    """The message of each process, by rank; see `ChiefServer.exchange`."""
    try:
        connection.sendall(packed([message]))
        line = _read(connection, seconds, lambda data: data.endswith(b"\n"))
        if not line.endswith(b"\n"):
            raise hung_up()
    except OSError as error:
        raise ClusterError.lost(f"A process of the job has gone: {described(error)}") from error
    return unpacked(line)


def _parsed_answer(text: bytes, chief: Task) -> Answer:
    try:
        return Answer.model_validate_json(text)
    except ValidationError as error:
        raise ClusterError(
            f"Another program listens on the address of {chief}, the chief: it says `{ascii(text[:40])[2:-1]}`",
            "end that program, or give the chief another port",
        ) from error


def can_connect(task: Task) -> bool:
    """Whether something listens on the address of a task, even if its process is stopped."""
    try:
        connect(task.host, task.port, SECONDS_TO_FIRST_BYTE).close()
    except OSError:
        return False
    return True


def serves(task: Task) -> bool:
    """Whether the server of a task answers; TensorFlow's server sends the first message."""
    try:
        with connect(task.host, task.port, SECONDS_TO_FIRST_BYTE) as connection:
            return connection.recv(LENGTH_BYTES + len(HTTP2_SETTINGS))[LENGTH_BYTES:] == HTTP2_SETTINGS
    except OSError:
        return False
