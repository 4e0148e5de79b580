"""The processes of a job connect before TensorFlow's servers start, so that an error can name one that is missing.

    rank 1, 2, ...    send a hello to the chief's port         →  {"tfdist": 1, "rank": 1, "seconds": 60.0, ...}
    chief             waits for all ranks, or the deadline     →  {"tfdist": 1, "refusal": null}, or the reason, to all

The rendezvous uses the chief's own port in TF_CONFIG, which TensorFlow takes over afterwards; a rank that connects to
TensorFlow there is late. Messages are lines of bounded length. The chief ignores everything else, since other programs
may connect to the port. A large cluster is compared by its hash. Until they close their connections, the processes can
exchange short messages through the chief. This module never imports TensorFlow.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import ipaddress
import json
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel, Field, StrictInt, ValidationError

from tfdist.errors import ClusterError, DisagreementError
from tfdist.jobs import ports
from tfdist.jobs.connections import (
    LONGEST_LINE_BYTES,
    MOST_STRANGERS,
    Exchange,
    LineConnection,
    Loss,
    Reception,
    SentError,
    as_line,
    connect,
    described,
    hung_up,
)
from tfdist.jobs.job_environment import START_SECONDS
from tfdist.jobs.tf_config import Task, means_itself
from tfdist.jobs.world import World
from tfdist.options import checked_seconds

SECONDS_BETWEEN_TRIES = 0.1
SECONDS_TO_CONNECT = 5.0
SECONDS_TO_FIRST_BYTE = 3.0
SMALLEST_BACKLOG = 128
# The first frame of an HTTP/2 server, such as TensorFlow's, after the three bytes of its length: type 4, no flags,
# stream 0 (RFC 9113, sections 3.4 and 6.5).
HTTP2_SETTINGS = b"\4\0\0\0\0\0"
LENGTH_BYTES = 3
SECONDS_TO_CLOSE = 1.0
# An answer contains at most a few values of each setting.
LONGEST_ANSWER_BYTES = 16 * LONGEST_LINE_BYTES
# The chief answers by the earliest deadline of all processes; its answer may travel for this long.
SECONDS_TO_RECEIVE_ANSWER = 5.0

# The name of a setting that is always compared.
CLUSTER = "TF_CONFIG cluster"
# A longer cluster is compared by its hash, since a hello must stay short for any number of processes.
LONGEST_CLUSTER_BYTES = 1000


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


def loss_of(task: Task) -> Loss | None:
    """How the process of a task is lost; `None` if its server answers: TensorFlow's server sends the first message."""
    try:
        with connect(task.host, task.port, SECONDS_TO_FIRST_BYTE) as connection:
            first = connection.recv(LENGTH_BYTES + len(HTTP2_SETTINGS))
    except (ConnectionRefusedError, ConnectionResetError):
        return Loss.CLOSED
    except OSError:
        return Loss.SILENT
    return None if first[LENGTH_BYTES:] == HTTP2_SETTINGS else Loss.CLOSED


def serves(task: Task) -> bool:
    """Whether the server of a task answers."""
    return loss_of(task) is None


def start_timeout_seconds(option: float | None) -> float:
    """How long the start waits for all processes: `option`, else the launcher's setting, else 60.

    Raises:
        UsageError: it is not a positive, finite number.
    """
    if option is not None:
        return checked_seconds("start_timeout_seconds", option)
    return checked_seconds(START_SECONDS, os.environ.get(START_SECONDS, "60"))


class Hello(BaseModel):
    """The first message of a rank: its number, its settings, and how long it will still wait."""

    tfdist: Literal[1]
    rank: StrictInt = Field(gt=0)
    seconds: float = Field(gt=0, allow_inf_nan=False)  # until its deadline
    deadline_seconds: float = Field(gt=0, allow_inf_nan=False)  # as its user has set it
    world_size: StrictInt  # the number of processes in its cluster
    cluster: str  # see `described_cluster`
    settings: dict[str, str]


class Answer(BaseModel):
    """The chief's message to all ranks at the end: the reason why the job cannot begin, or `None`."""

    tfdist: Literal[1]
    refusal: SentError | None


def packed(messages: Iterable[bytes]) -> bytes:
    """The messages of several processes as one line."""
    return b" ".join(map(base64.b64encode, messages)) + b"\n"


def unpacked(line: bytes) -> list[bytes]:
    """The messages of a line."""
    return [base64.b64decode(part) for part in line.split(b" ")]


def described_cluster(cluster: Mapping[str, Sequence[str]]) -> str:
    """Describes a cluster in a text of bounded length, which is equal only for equal clusters."""
    text = json.dumps(cluster)
    if len(text) <= LONGEST_CLUSTER_BYTES:
        return text
    addresses = [address for role_addresses in cluster.values() for address in role_addresses]
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{len(addresses)} processes from {addresses[0]} to {addresses[-1]}, SHA-256 {digest}"


@dataclass(frozen=True)
class _Peer:
    """A rank that has sent its hello."""

    connection: LineConnection
    host: str
    lines: list[bytes] = field(default_factory=list)  # received after the hello


class ChiefServer:
    """Waits for all ranks of a job on the chief's port.

    Args:
        world: the job.
        settings: the chief's settings, which those of all ranks must equal.
        listener: the socket on the chief's port, which is closed as soon as all ranks have their answer.
        deadline: when the chief stops waiting, as a time of `time.monotonic`.
        deadline_seconds: how long the chief waits, for messages.
    """

    def __init__(
        self,
        world: World,
        settings: Mapping[str, str],
        listener: socket.socket,
        deadline: float,
        deadline_seconds: float,
    ):
        self.world = world
        self.settings: dict[int, Mapping[str, str]] = {0: settings}  # by rank
        # The earliest deadline of all ranks, and the number of seconds that the same rank was told to wait.
        self.deadline, self.deadline_seconds = deadline, deadline_seconds
        self.exchange_seconds = deadline_seconds
        self.peers: dict[int, _Peer] = {}  # by rank
        self.duplicates: list[LineConnection] = []  # with processes that claim the rank of a peer
        self.refusal: SentError | None = None
        self.selector = selectors.DefaultSelector()
        self.listener = listener
        most = MOST_STRANGERS + world.world_size
        self.reception = Reception(self.selector, listener, Hello, self._identify, most)

    def serve(self) -> SentError | None:
        """Waits for all ranks, and returns the refusal that was sent to all of them, if any."""
        while self.refusal is None and len(self.settings) < self.world.world_size:
            if time.monotonic() >= self.deadline:
                self.refusal = self._missing()
                break
            self.reception.close_late()
            self._handle_events(min(self.deadline, self.reception.next_deadline))
        self.refusal = self.refusal or self._difference(self.settings)
        self._stop_listening()
        self._send(self._connections(), as_line(Answer(tfdist=1, refusal=self.refusal)), SECONDS_TO_RECEIVE_ANSWER)
        return self.refusal

    def exchange(self, message: bytes) -> list[bytes]:
        """The message of each process, by rank; called by all processes after the answer.

        Raises:
            ClusterError: a process has gone, or sends no message.
        """
        others = self.world.world_size - 1

        def is_waiting() -> bool:
            return len(self.peers) == others and not all(peer.lines for peer in self.peers.values())

        self._handle_while(is_waiting, self.exchange_seconds)
        missing = [rank for rank in range(1, others + 1) if rank not in self.peers or not self.peers[rank].lines]
        if missing:
            raise ClusterError.lost(f"A process of the job has gone: {self.world.named_all(missing, 'or')}")
        lines = [self.peers[rank].lines.pop(0) for rank in range(1, others + 1)]
        messages = [message, *(unpacked(line)[0] for line in lines)]
        self._send([peer.connection for peer in self.peers.values()], packed(messages), self.exchange_seconds)
        return messages

    def close(self) -> None:
        """Closes all connections."""
        self._stop_listening()
        # The side that closes a connection first keeps its port for a minute, and TensorFlow is about to use this port.
        self._handle_while(lambda: bool(self.peers), SECONDS_TO_CLOSE)
        for connection in self._connections():
            connection.close()
        self.selector.close()

    def _handle_events(self, until: float) -> None:
        """Waits for events, at most until the time `until`, and handles them."""
        for key, events in self.selector.select(max(0.0, until - time.monotonic())):
            key.data(events)

    def _identify(self, connection: LineConnection, hello: Hello) -> bool:
        if hello.rank >= hello.world_size or self.refusal is not None:
            return False
        peer = _Peer(connection, connection.host)
        connection.received = peer.lines.append
        other = self.peers.get(hello.rank)
        if other is not None and not other.connection.has_hung_up:
            self.refusal = self._twice(other, peer, hello.rank)
            connection.ended = lambda: None
            self.duplicates.append(connection)
            return True
        if other is not None:
            other.connection.close()
        self.peers[hello.rank] = peer
        connection.ended = lambda: self._forget(hello.rank)
        settings = {CLUSTER: hello.cluster, **hello.settings}
        if hello.cluster != self.settings[0][CLUSTER]:
            # Nothing else can be compared by rank, and this process may not even be part of its own cluster.
            self.refusal = self._difference({0: self.settings[0], hello.rank: settings})
            return True
        self.settings[hello.rank] = settings
        if time.monotonic() + hello.seconds < self.deadline:
            self.deadline, self.deadline_seconds = time.monotonic() + hello.seconds, hello.deadline_seconds
        return True

    def _forget(self, rank: int) -> None:
        """A rank that ends before the job begins is missing again."""
        del self.peers[rank]
        self.settings.pop(rank, None)

    def _connections(self) -> list[LineConnection]:
        return [*(peer.connection for peer in self.peers.values()), *self.duplicates]

    def _stop_listening(self) -> None:
        self.reception.close()
        self.listener.close()

    def _send(self, connections: Sequence[LineConnection], line: bytes, seconds: float) -> None:
        for connection in connections:
            connection.send(line)
        self._handle_while(lambda: any(connection.is_sending for connection in connections), seconds)

    def _handle_while(self, condition: Callable[[], bool], seconds: float) -> None:
        """Handles events while `condition()` is true, at most for `seconds`."""
        until = time.monotonic() + seconds
        while condition() and time.monotonic() < until:
            self._handle_events(until)

    def _missing(self) -> SentError:
        missing = [rank for rank in range(self.world.world_size) if rank not in self.settings]
        return SentError(
            differing=False,
            sentence=f"{self.world.named_all(missing)} did not start within {self.deadline_seconds:g} s",
            hint=f"start every process of the job, and see that each can reach `{self.world.tasks[0].address}`",
        )

    def _twice(self, first: _Peer, second: _Peer, rank: int) -> SentError:
        hosts = f"`{first.host}` and `{second.host}`"
        return SentError(
            differing=False,
            sentence=f"Two processes, on {hosts}, say that they are {self.world.named(rank)}",
            hint="give every process a `task` of its own in `TF_CONFIG`, and start each once",
        )

    def _difference(self, settings: Mapping[int, Mapping[str, str]]) -> SentError | None:
        by_rank = {rank: settings[rank] for rank in sorted(settings)}
        error = DisagreementError.among(by_rank, self.world.named_briefly)
        return None if error is None else SentError.of(error)
