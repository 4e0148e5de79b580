"""The processes of a job connect before TensorFlow's servers start, so that an error can name one that is missing.

    all               prove that they know the secret          →  see `tfdist.jobs.secret`
    rank 1, 2, ...    send a hello to the chief's port         →  {"rank": 1, "seconds": 60.0, ...}
    chief             waits for all ranks, or the deadline     →  {"refusal": null}, or the reason, to all

The rendezvous uses the chief's own port in TF_CONFIG, which TensorFlow takes over afterwards; a rank that connects to
TensorFlow there is late. Messages are lines of bounded length. The chief closes all other connections, since other
programs may connect to the port. A large cluster is compared by its hash. Until they close their connections, the
processes can exchange short messages through the chief. This module never imports TensorFlow.
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
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import psutil
from pydantic import BaseModel, Field, StrictInt

from tfdist import terminal
from tfdist.errors import ClusterError, DisagreementError
from tfdist.jobs import ports, secret
from tfdist.jobs.connections import (
    LONGEST_LINE_BYTES,
    MOST_STRANGERS,
    SECONDS_TO_IDENTIFY,
    Exchange,
    LineConnection,
    Loss,
    Reception,
    SentError,
    as_line,
    connect,
    described,
    gone,
    hung_up,
)
from tfdist.jobs.job_environment import JOB, SECRET_FILE, START_SECONDS
from tfdist.jobs.tf_config import Task, means_itself
from tfdist.jobs.world import World
from tfdist.options import checked_seconds

SECONDS_BETWEEN_TRIES = 0.1
SECONDS_TO_CONNECT = 5.0
SECONDS_TO_SAY = 5.0
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
# The number of hosts that a process asks at once, and whose names every process resolves.
MOST_HOSTS = 64
SECONDS_TO_RESOLVE = 3.0
KUBERNETES = "KUBERNETES_SERVICE_HOST"  # set in every container of a pod
SHORTEST_SECONDS = 0.001
MOST_REFUSED = 2  # in a message


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
    key = secret.of_job(world)
    deadline = time.monotonic() + deadline_seconds
    require_known_names(world, deadline)
    task = world.tasks[world.rank]
    # TensorFlow's server, which listens on every interface, will need this port.
    _listen_on_every_interface(task).close()
    if world.rank == 0:
        if not key:
            terminal.say(
                "The processes of this job have no secret in common, and trust every program on its hosts. "
                f"Set `{SECRET_FILE}` to a file with random bytes on each host to let them recognize each other."
            )
        settings = {CLUSTER: described_cluster(world.cluster()), **settings}
        listener = _listen(task, world.world_size)
        with contextlib.closing(ChiefServer(world, settings, listener, deadline, deadline_seconds, key)) as server:
            with _waiting_is_said(lambda: world.named_all(server.missing()), deadline_seconds):
                refusal = server.serve()
            if refusal is not None:
                raise refusal.error()
            yield server.exchange
        return
    hello = Hello(
        rank=world.rank,
        seconds=1.0,
        deadline_seconds=deadline_seconds,
        world_size=world.world_size,
        cluster=described_cluster(world.cluster()),
        settings=dict(settings),
    )
    with _waiting_is_said(lambda: f"{world.named(0)}, the chief, and those that it waits for", deadline_seconds):
        reached = _ask_chief(world, hello, key, deadline)
    if reached is None:
        yield None
        return
    connection, answer = reached
    with connection:
        if answer.refusal is not None:
            raise answer.refusal.error()
        yield functools.partial(_exchange_through_chief, connection, world.tasks[0], deadline_seconds)


@contextlib.contextmanager
def _waiting_is_said(for_whom: Callable[[], str], seconds: float) -> Iterator[None]:
    """Says after a moment for whom a process waits that was started by hand; a launcher says it itself."""
    timer = threading.Timer(
        SECONDS_TO_SAY, lambda: terminal.say(f"Waiting for {for_whom()}, for at most {seconds:g} s")
    )
    timer.daemon = True
    if JOB not in os.environ:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


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
        raise cannot_listen(task, error.strerror or str(error)) from error


def cannot_listen(task: Task, reason: str) -> ClusterError:
    """The error for a process that cannot listen on its port."""
    return ClusterError(
        f"`TF_CONFIG` has `{task.address}` for this process, {task.role} {task.index}, and its port cannot be "
        f"listened on: {reason}",
        f"end the process that holds port {task.port}, or give the task another port",
    )


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


def _ask_chief(world: World, hello: Hello, key: bytes, deadline: float) -> tuple[socket.socket, Answer] | None:
    """The connection to the chief, and its answer to this rank; `None` if TensorFlow answers in its place."""
    chief = world.tasks[0]
    reason = "no time was left"
    while (left := deadline - time.monotonic()) > 0:
        with contextlib.ExitStack() as stack:
            try:
                # Each try resolves the name again: a host that drops packets may have got another address.
                connection = connect(chief.host, chief.port, min(left, SECONDS_TO_CONNECT))
                stack.enter_context(connection)
                reason = "it was reached and did not answer"
                if not _is_proved(connection, chief, key, min(left, SECONDS_TO_IDENTIFY)):
                    return None
                left = deadline - time.monotonic()
                connection.sendall(as_line(hello.model_copy(update={"seconds": max(left, SHORTEST_SECONDS)})))
                text = _read(connection, left + SECONDS_TO_RECEIVE_ANSWER, lambda data: data.endswith(b"\n"))
            except OSError as error:
                if not isinstance(error, TimeoutError):
                    reason = described(error)
            else:
                if text.endswith(b"\n"):  # a chief that ends meanwhile may have sent a part
                    answer = Answer.model_validate_json(text)
                    stack.pop_all()
                    return connection, answer
        time.sleep(min(SECONDS_BETWEEN_TRIES, max(0.0, deadline - time.monotonic())))
    raise ClusterError(
        f"{chief}, which is the chief, could not be reached within {hello.deadline_seconds:g} s: {reason}",
        f"start every process of the job, see that `{chief.address}` can be reached from this machine, and give all "
        f"processes the same `{SECRET_FILE}`, if any",
    )


def _is_proved(connection: socket.socket, chief: Task, key: bytes, seconds: float) -> bool:
    """Whether the chief and this process know the same secret; false if TensorFlow answers in place of the chief.

    Raises:
        OSError: the other side does not answer, or does not know the secret.
        ClusterError: the other side is another program.
    """
    opening = secret.Opening(key)
    text = _read(connection, seconds, _is_first)
    if text[LENGTH_BYTES:].startswith(HTTP2_SETTINGS):
        return False
    if not text:
        raise hung_up()
    try:
        connection.sendall(opening.respond(text))
    except ValueError as error:
        raise ClusterError(
            f"Another program listens on the address of {chief}, the chief: it says `{ascii(text[:40])[2:-1]}`",
            "end that program, or give the chief another port",
        ) from error
    if not opening.is_proved_by(_read(connection, seconds, lambda data: b"\n" in data)):
        raise ConnectionRefusedError(0, "it does not know the secret of this process")
    return True


def _is_first(text: bytes) -> bool:
    """Whether `text` is a line, or enough to see that the other side is not the chief."""
    is_other = len(text) >= LENGTH_BYTES + len(HTTP2_SETTINGS) and not text.startswith(b"{")
    return b"\n" in text or is_other


def _read(connection: socket.socket, seconds: float, is_complete: Callable[[bytes], bool]) -> bytes:
    """Reads until the data is complete, is too long for an answer, or the other side hangs up."""
    until = time.monotonic() + seconds
    data = b""
    while not is_complete(data) and len(data) <= LONGEST_ANSWER_BYTES:
        connection.settimeout(max(0.01, until - time.monotonic()))
        part = connection.recv(LONGEST_LINE_BYTES)
        if not part:
            break
        data += part
    return data


def _exchange_through_chief(connection: socket.socket, chief: Task, seconds: float, message: bytes) -> list[bytes]:
    """The message of each process, by rank; see `ChiefServer.exchange`."""
    try:
        connection.sendall(packed([message]))
        line = b""
        while not line.endswith(b"\n"):
            # The chief waits for `seconds` too, and then says who is missing.
            connection.settimeout(seconds + SECONDS_TO_RECEIVE_ANSWER)
            part = connection.recv(LONGEST_LINE_BYTES)
            if not part:
                raise hung_up()
            line += part
    except OSError as error:
        raise ClusterError.lost(f"{chief}, which is the chief, has gone: {described(error)}") from error
    if line.startswith(b"{"):
        raise SentError.model_validate_json(line).error()
    return unpacked(line)


def require_known_names(world: World, deadline: float) -> None:
    """Requires that the names of the hosts of a job can be resolved, after a moment, or in Kubernetes at the deadline.

    Kubernetes resolves the name of a pod as soon as the pod has an address, which may be later than the first pod
    starts. In a large job only the chief resolves all names, since a name server has to answer each of them.

    Args:
        world: the job.
        deadline: when to stop waiting, as a time of `time.monotonic`.

    Raises:
        ClusterError: a name cannot be resolved; the message names its processes.
    """
    hosts = list(dict.fromkeys(task.host for task in world.tasks if not _is_address(task.host)))
    if not world.is_chief and len(hosts) > MOST_HOSTS:
        hosts = hosts[:1]
    patience = float("inf") if KUBERNETES in os.environ else SECONDS_TO_RESOLVE
    until = min(deadline, time.monotonic() + patience)
    unknown = _unknown(hosts)
    while unknown and time.monotonic() < until:
        time.sleep(SECONDS_BETWEEN_TRIES)
        unknown = _unknown(unknown)
    if unknown:
        host, reason = next(iter(unknown.items()))
        ranks = [rank for rank, task in enumerate(world.tasks) if task.host in unknown]
        raise ClusterError(
            f"The host of {world.named_all(ranks)} is unknown: `{host}`: {reason}",
            "correct the name, or use an address at which all hosts of the job reach it",
        )


def _unknown(hosts: Iterable[str]) -> dict[str, str]:
    """The names that cannot be resolved, with the reasons."""
    hosts = list(hosts)
    with ThreadPoolExecutor(MOST_HOSTS) as pool:
        return {host: reason for host, reason in zip(hosts, pool.map(_why_unknown, hosts), strict=True) if reason}


def _why_unknown(host: str) -> str:
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        return described(error)
    return ""


def hosts_of(world: World) -> set[str]:
    """The addresses from which the processes of a job may connect to the chief, as far as its names can be resolved."""
    allowed = {"127.0.0.1", "::1"}
    for host in {task.host for task in world.tasks}:
        with contextlib.suppress(OSError):
            allowed |= {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    return allowed | {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}


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


def not_serving(world: World) -> list[int]:
    """The other ranks of a job whose servers do not answer."""
    others = [rank for rank in range(world.world_size) if rank != world.rank]
    with ThreadPoolExecutor(MOST_HOSTS) as pool:
        answers = pool.map(lambda rank: serves(world.tasks[rank]), others)
        return [rank for rank, is_serving in zip(others, answers, strict=True) if not is_serving]


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

    rank: StrictInt = Field(gt=0)
    seconds: float = Field(gt=0, allow_inf_nan=False)  # until its deadline
    deadline_seconds: float = Field(gt=0, allow_inf_nan=False)  # as its user has set it
    world_size: StrictInt  # the number of processes in its cluster
    cluster: str  # see `described_cluster`
    settings: dict[str, str]


class Answer(BaseModel):
    """The chief's message to all ranks at the end: the reason why the job cannot begin, or `None`."""

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
        key: the secret of the job; empty if it has none.
    """

    def __init__(
        self,
        world: World,
        settings: Mapping[str, str],
        listener: socket.socket,
        deadline: float,
        deadline_seconds: float,
        key: bytes,
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
        # Without a secret, at least the address must be that of a host of the job.
        is_allowed = hosts_of(world).__contains__ if not key else lambda host: True
        self.reception = Reception(self.selector, listener, Hello, self._identify, key, is_allowed, most)

    def serve(self) -> SentError | None:
        """Waits for all ranks, and returns the refusal that was sent to all of them, if any."""
        while self.refusal is None and len(self.settings) < self.world.world_size:
            if time.monotonic() >= self.deadline:
                self.refusal = self._refusal_of_missing()
                break
            self.reception.close_late()
            self._handle_events(min(self.deadline, self.reception.next_deadline))
        self.refusal = self.refusal or self._difference(self.settings)
        self._stop_listening()
        self._send(self._connections(), as_line(Answer(refusal=self.refusal)), SECONDS_TO_RECEIVE_ANSWER)
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
        peers = [peer.connection for peer in self.peers.values()]
        if missing:
            error = gone(self.world, missing, self.exchange_seconds, ", while the job starts")
            self._send(peers, as_line(SentError.of(error)), SECONDS_TO_CLOSE)
            raise error
        lines = [self.peers[rank].lines.pop(0) for rank in range(1, others + 1)]
        messages = [message, *(unpacked(line)[0] for line in lines)]
        self._send(peers, packed(messages), self.exchange_seconds)
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

    def missing(self) -> list[int]:
        """The ranks that have not yet come."""
        return [rank for rank in range(self.world.world_size) if rank not in self.settings]

    def _refusal_of_missing(self) -> SentError:
        missing = self.missing()
        refused = "".join(f". A connection from {host} was refused: {why}" for host, why in self._refused())
        more = f", and give all of them the same `{SECRET_FILE}`" if refused else ""
        return SentError(
            differing=False,
            sentence=f"{self.world.named_all(missing)} did not start within {self.deadline_seconds:g} s{refused}",
            hint=f"start every process of the job, and see that each can reach `{self.world.tasks[0].address}`{more}",
        )

    def _refused(self) -> list[tuple[str, str]]:
        return list(self.reception.refused.items())[:MOST_REFUSED]

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
