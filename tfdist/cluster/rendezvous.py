"""The processes of a job connect before TensorFlow's servers start, so that an error can name one that is missing.

    rank 1, 2, ...    send a hello to the chief's port          →  {"tfdist": 1, "rank": 1, "seconds": 60.0, ...}
    chief             waits for all ranks, or the deadline     →  {"tfdist": 1, "refusal": null}, or the reason, to all

It happens on the chief's own port in TF_CONFIG, which TensorFlow takes over afterwards; a rank that finds TensorFlow
there already is late. Messages are lines of JSON of bounded length; anything else is ignored, since other programs may
connect to the port. This module never imports TensorFlow.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import selectors
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, Field, StrictInt, TypeAdapter, ValidationError

from tfdist.cluster import ports
from tfdist.cluster.world import Task, World, means_itself
from tfdist.errors import ClusterError, DisagreementError

LONGEST_MESSAGE_BYTES = 1 << 16
SECONDS_BETWEEN_TRIES = 0.1
# A connection that has sent no hello by then is closed.
SECONDS_TO_IDENTIFY = 5.0
# The chief answers by the earliest deadline of all; its answer may travel this long.
SECONDS_TO_HEAR_ALL = 5.0
SECONDS_TO_CONNECT = 5.0
SECONDS_TO_CLOSE = 1.0
SECONDS_TO_FIRST_BYTE = 3.0
MAX_UNIDENTIFIED = 64
MOST_NAMES = 8
# The first frame of an HTTP/2 server, such as TensorFlow's, after three bytes that say its length: type 4, no flags,
# stream 0 (RFC 9113, sections 3.4 and 6.5).
HTTP2_SETTINGS = b"\4\0\0\0\0\0"

# A setting that is always compared.
CLUSTER = "TF_CONFIG cluster"


class _Hello(BaseModel):
    """The first message of a rank: its number, its settings, and how long it can still wait."""

    tfdist: Literal[1]
    rank: StrictInt = Field(gt=0)
    seconds: float = Field(gt=0, allow_inf_nan=False)  # until its deadline
    deadline_seconds: float = Field(gt=0, allow_inf_nan=False)
    settings: dict[str, str]

    @property
    def world_size(self) -> int:
        """The number of processes in the cluster of this rank's settings; 0 if these name none."""
        with contextlib.suppress(ValidationError):
            cluster = TypeAdapter(dict[str, list[str]]).validate_json(self.settings.get(CLUSTER, ""))
            return sum(map(len, cluster.values()))
        return 0


class _Refusal(BaseModel):
    """The reason why a job cannot begin; every rank raises it."""

    differing: bool
    sentence: str
    hint: str

    def error(self) -> ClusterError:
        return (DisagreementError if self.differing else ClusterError)(self.sentence, self.hint)


class _Answer(BaseModel):
    """The chief's message to all ranks at the end."""

    tfdist: Literal[1]
    refusal: _Refusal | None


@dataclass
class _Peer:
    """A connection that the chief has accepted; it is unidentified until its hello has come."""

    socket: socket.socket
    identify_by: float
    text: bytes = b""
    hello: _Hello | None = None


def meet(world: World, settings: Mapping[str, str], deadline_seconds: float) -> bool:
    """Waits until every process of `world` has connected with equal `settings`; `False` if the job had already begun.

    Args:
        world: the job and this process' place in it; its cluster must be the same everywhere too.
        settings: what must be equal in all processes, such as the version of TensorFlow.
        deadline_seconds: how long to wait for the others; the shortest of all counts for all.

    Raises:
        DisagreementError: the settings differ; raised in every process, with the values of all.
        ClusterError: a process did not come by the deadline, two say that they are the same one, or this one's
            address cannot be listened on.
    """
    if world.world_size == 1:
        return True
    task = world.tasks[world.rank]
    # TensorFlow's server, which listens on every interface, will need this port.
    _every_interface(task).close()
    settings = {CLUSTER: json.dumps(world.cluster()), **settings}
    deadline = time.monotonic() + deadline_seconds
    if world.rank == 0:
        with _listening(task) as listener:
            refusal = _ChiefServer(world, settings, listener, deadline, deadline_seconds).serve()
    else:
        answer = _ask_chief(world, settings, deadline, deadline_seconds)
        if answer is None:
            return False
        refusal = answer.refusal
    if refusal is not None:
        raise refusal.error()
    return True


def _every_interface(task: Task) -> socket.socket:
    try:
        return ports.listen(task.port)
    except OSError as error:
        raise ClusterError(
            f"`TF_CONFIG` has `{task.address}` for this process, {task.role} {task.index}, and its port cannot be "
            f"listened on: {error.strerror}",
            f"end the process that holds port {task.port}, or give the task another port",
        ) from error


def _listening(task: Task) -> socket.socket:
    """The chief's socket: on its own address where that is certain, else on every interface.

    A name can have several addresses, of which others may know another one, and on many systems a host's own name is
    a loopback address to itself. An address may be known outside alone, as behind a translation.
    """
    with contextlib.suppress(OSError):
        if means_itself(task.host) or _is_address(task.host):
            family, _, _, _, place = socket.getaddrinfo(task.host, task.port, type=socket.SOCK_STREAM)[0]
            return socket.create_server(place[:2], family=family, backlog=128, reuse_port=ports.shared())
    return _every_interface(task)


def _is_address(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return False


class _ChiefServer:
    """The chief's part: receives the hellos of all ranks, and sends all of them the same answer."""

    def __init__(
        self,
        world: World,
        settings: Mapping[str, str],
        listener: socket.socket,
        deadline: float,
        deadline_seconds: float,
    ):
        self.world = world
        self.by_rank: dict[int, Mapping[str, str]] = {0: settings}
        self.listener = listener
        # The earliest of all ranks, and what that rank had been given to wait.
        self.deadline, self.deadline_seconds = deadline, deadline_seconds
        self.peers: list[_Peer] = []
        self.refusal: _Refusal | None = None

    def serve(self) -> _Refusal | None:
        """Waits for all ranks, and returns the refusal that all were sent, if any."""
        self.listener.setblocking(False)
        try:
            while self.refusal is None and len(self.by_rank) < self.world.world_size:
                self._wait()
            self.refusal = self.refusal or self._difference(self.by_rank)
            self._answer_all()
        finally:
            for peer in self.peers:
                peer.socket.close()
        return self.refusal

    def _wait(self) -> None:
        """Handles the next connections and messages, or ends at the deadline."""
        now = time.monotonic()
        if now >= self.deadline:
            self.refusal = self._missing()
            return
        unidentified = [peer for peer in self.peers if peer.hello is None]
        for peer in unidentified:
            if now >= peer.identify_by:
                self._drop(peer)
        until = min([self.deadline, *(peer.identify_by for peer in unidentified)])
        with selectors.DefaultSelector() as selector:
            selector.register(self.listener, selectors.EVENT_READ)
            for peer in self.peers:
                selector.register(peer.socket, selectors.EVENT_READ, peer)
            ready = selector.select(max(0.0, until - now))
        for key, _ in ready:
            if key.data is None:
                self._accept()
            elif self.refusal is None:
                self._receive(key.data)

    def _accept(self) -> None:
        try:
            connection, _ = self.listener.accept()
        except OSError:  # it has gone already
            return
        connection.setblocking(False)
        unidentified = [peer for peer in self.peers if peer.hello is None]
        if len(unidentified) >= MAX_UNIDENTIFIED:
            self._drop(unidentified[0])
        self.peers.append(_Peer(connection, time.monotonic() + SECONDS_TO_IDENTIFY))

    def _receive(self, peer: _Peer) -> None:
        if peer not in self.peers:
            return
        try:
            part = peer.socket.recv(LONGEST_MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        if not part:  # a rank that ends before the job begins is missing again
            self._drop(peer)
        elif peer.hello is None:
            peer.text += part
            if b"\n" in peer.text:
                self._identify(peer)
            elif len(peer.text) > LONGEST_MESSAGE_BYTES:
                self._drop(peer)

    def _identify(self, peer: _Peer) -> None:
        try:
            hello = _Hello.model_validate_json(peer.text.partition(b"\n")[0])
        except ValidationError:
            hello = None
        if hello is None or hello.rank >= hello.world_size:
            self._drop(peer)
            return
        other = next((g for g in self.peers if g.hello is not None and g.hello.rank == hello.rank), None)
        if other is not None and not _has_hung_up(other.socket):
            self.refusal = self._twice(other, peer, hello.rank)
        elif other is not None:
            self._drop(other)
        peer.hello = hello
        if hello.settings.get(CLUSTER) != self.by_rank[0][CLUSTER]:
            # Nothing else can be compared by rank, and its own world may not even have this process.
            self.refusal = self._difference({0: self.by_rank[0], hello.rank: hello.settings})
            return
        self.by_rank[hello.rank] = hello.settings
        if time.monotonic() + hello.seconds < self.deadline:
            self.deadline, self.deadline_seconds = time.monotonic() + hello.seconds, hello.deadline_seconds

    def _drop(self, peer: _Peer) -> None:
        self.peers.remove(peer)
        peer.socket.close()
        if peer.hello is not None:
            del self.by_rank[peer.hello.rank]

    def _answer_all(self) -> None:
        answer = _line(_Answer(tfdist=1, refusal=self.refusal))
        told = [peer.socket for peer in self.peers if peer.hello is not None]
        for connection in told:
            with contextlib.suppress(OSError):  # TensorFlow will miss those who have gone in this moment
                connection.settimeout(SECONDS_TO_HEAR_ALL)
                connection.sendall(answer)
        # Who closes first keeps the port of a connection for a minute; this port is about to be TensorFlow's.
        until = time.monotonic() + SECONDS_TO_CLOSE
        for connection in told:
            with contextlib.suppress(OSError):
                connection.settimeout(max(0.01, until - time.monotonic()))
                connection.recv(1)

    def _missing(self) -> _Refusal:
        missing = [self.world.named(rank) for rank in range(self.world.world_size) if rank not in self.by_rank]
        shown = missing if len(missing) <= MOST_NAMES else [*missing[:MOST_NAMES], f"{len(missing) - MOST_NAMES} more"]
        names = " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
        return _Refusal(
            differing=False,
            sentence=f"{names} did not start within {self.deadline_seconds:g} s",
            hint=f"start every process of the job, and see that each can reach `{self.world.tasks[0].address}`",
        )

    def _twice(self, one: _Peer, other: _Peer, rank: int) -> _Refusal:
        places = " and ".join(f"`{peer.socket.getpeername()[0]}`" for peer in (one, other))
        return _Refusal(
            differing=False,
            sentence=f"Two processes, on {places}, say that they are {self._named(rank)}",
            hint="give every process a `task` of its own in `TF_CONFIG`, and start each once",
        )

    def _difference(self, by_rank: Mapping[int, Mapping[str, str]]) -> _Refusal | None:
        error = DisagreementError.among({self._named(rank): by_rank[rank] for rank in sorted(by_rank)})
        return None if error is None else _Refusal(differing=True, sentence=error.sentence, hint=error.hint)

    def _named(self, rank: int) -> str:
        return self.world.named(rank) if rank < self.world.world_size else f"rank {rank}"


def _has_hung_up(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _ask_chief(world: World, settings: Mapping[str, str], deadline: float, deadline_seconds: float) -> _Answer | None:
    """Another rank's part: the chief's answer; `None` if TensorFlow answers in its place."""
    chief = world.tasks[0]
    reason = "no time was left"
    while (left := deadline - time.monotonic()) > 0:
        try:
            # A host that drops packets is asked anew; its name may have got another address.
            with socket.create_connection(
                (chief.host, chief.port), timeout=min(left, SECONDS_TO_CONNECT)
            ) as connection:
                if connection.getsockname() != connection.getpeername():
                    hello = _Hello(
                        tfdist=1,
                        rank=world.rank,
                        seconds=left,
                        deadline_seconds=deadline_seconds,
                        settings=dict(settings),
                    )
                    connection.sendall(_line(hello))
                    reason = "it was reached and did not answer"
                    text = _read_answer(connection, left + SECONDS_TO_HEAR_ALL, world.world_size)
                else:
                    # Linux joins a connection to itself if its own port happens to be the one that nobody listens on.
                    text = b""
        except OSError as error:
            if not isinstance(error, TimeoutError):
                reason = error.strerror or str(error)
        else:
            if text[3:9] == HTTP2_SETTINGS:
                return None
            if text:
                return _understood(text, chief)
        time.sleep(min(SECONDS_BETWEEN_TRIES, max(0.0, deadline - time.monotonic())))
    raise ClusterError(
        f"{chief}, which is the chief, could not be reached within {deadline_seconds:g} s: {reason}",
        f"start every process of the job, and see that `{chief.address}` can be reached from this machine",
    )


def _read_answer(connection: socket.socket, seconds: float, world_size: int) -> bytes:
    """What the other side says, up to a line's end or enough to see that it is not the chief; empty if it hangs up."""
    until = time.monotonic() + seconds
    text = b""
    while b"\n" not in text and (len(text) < 3 + len(HTTP2_SETTINGS) or text.startswith(b"{")):
        if len(text) > LONGEST_MESSAGE_BYTES * world_size:
            break
        connection.settimeout(max(0.01, until - time.monotonic()))
        part = connection.recv(LONGEST_MESSAGE_BYTES)
        if not part:
            break
        text += part
    return text


def _understood(text: bytes, chief: Task) -> _Answer:
    try:
        return _Answer.model_validate_json(text)
    except ValidationError as error:
        raise ClusterError(
            f"Another program listens on the address of {chief}, the chief: it says `{ascii(text[:40])[2:-1]}`",
            "end that program, or give the chief another port",
        ) from error


def _line(message: BaseModel) -> bytes:
    return message.model_dump_json().encode() + b"\n"


def can_connect(task: Task) -> bool:
    """Whether something listens where a task should; its process may be stopped."""
    try:
        socket.create_connection((task.host, task.port), timeout=SECONDS_TO_FIRST_BYTE).close()
    except OSError:
        return False
    return True


def serves(task: Task) -> bool:
    """Whether a task's server answers: TensorFlow's speaks first."""
    try:
        with socket.create_connection((task.host, task.port), timeout=SECONDS_TO_FIRST_BYTE) as connection:
            return connection.recv(3 + len(HTTP2_SETTINGS))[3:] == HTTP2_SETTINGS
    except OSError:
        return False
