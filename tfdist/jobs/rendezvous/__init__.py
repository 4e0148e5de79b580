"""The processes of a job connect before TensorFlow's servers start, so that an error can name one that is missing.

    rank 1, 2, ...    send a hello to the chief's port         →  {"tfdist": 1, "rank": 1, "seconds": 60.0, ...}
    chief             waits for all ranks, or the deadline     →  {"tfdist": 1, "refusal": null}, or the reason, to all

It happens on the chief's own port in TF_CONFIG, which TensorFlow takes over afterwards; a rank that finds TensorFlow
there already is late. Messages are lines of JSON of bounded length; anything else is ignored, since other programs may
connect to the port. A large cluster is compared by its hash. This module never imports TensorFlow.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import time
from collections.abc import Mapping

from pydantic import ValidationError

from tfdist.errors import ClusterError
from tfdist.jobs import ports
from tfdist.jobs.rendezvous.chief import ChiefServer
from tfdist.jobs.rendezvous.messages import (
    CLUSTER,
    LONGEST_ANSWER_BYTES,
    LONGEST_MESSAGE_BYTES,
    SECONDS_TO_HEAR_ALL,
    Answer,
    Hello,
    as_line,
    described_cluster,
)
from tfdist.jobs.task import Task, means_itself
from tfdist.jobs.world import World

SECONDS_BETWEEN_TRIES = 0.1
SECONDS_TO_CONNECT = 5.0
SECONDS_TO_FIRST_BYTE = 3.0
SMALLEST_BACKLOG = 128
# The first frame of an HTTP/2 server, such as TensorFlow's, after three bytes that say its length: type 4, no flags,
# stream 0 (RFC 9113, sections 3.4 and 6.5).
HTTP2_SETTINGS = b"\4\0\0\0\0\0"


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
    cluster = described_cluster(world.cluster())
    deadline = time.monotonic() + deadline_seconds
    if world.rank == 0:
        settings = {CLUSTER: cluster, **settings}
        with _listening(task, world.world_size) as listener:
            refusal = ChiefServer(world, settings, listener, deadline, deadline_seconds).serve()
    else:
        answer = _ask_chief(world, cluster, settings, deadline, deadline_seconds)
        if answer is None:
            return False
        refusal = answer.refusal
    if refusal is not None:
        raise refusal.error()
    return True


def _every_interface(task: Task, backlog: int = 1) -> socket.socket:
    try:
        return ports.listen(task.port, backlog)
    except OSError as error:
        raise ClusterError(
            f"`TF_CONFIG` has `{task.address}` for this process, {task.role} {task.index}, and its port cannot be "
            f"listened on: {error.strerror}",
            f"end the process that holds port {task.port}, or give the task another port",
        ) from error


def _listening(task: Task, world_size: int) -> socket.socket:
    """The chief's socket: on its own address where that is certain, else on every interface.

    A name can have several addresses, of which others may know another one, and on many systems a host's own name is
    a loopback address to itself. An address may be known outside alone, as behind a translation.
    """
    backlog = max(SMALLEST_BACKLOG, world_size)  # all may connect at once
    with contextlib.suppress(OSError):
        if means_itself(task.host) or _is_address(task.host):
            family, _, _, _, place = socket.getaddrinfo(task.host, task.port, type=socket.SOCK_STREAM)[0]
            return socket.create_server(place[:2], family=family, backlog=backlog, reuse_port=ports.shared())
    return _every_interface(task, backlog)


def _is_address(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return False


def _ask_chief(
    world: World, cluster: str, settings: Mapping[str, str], deadline: float, deadline_seconds: float
) -> Answer | None:
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
                    hello = Hello(
                        tfdist=1,
                        rank=world.rank,
                        seconds=left,
                        deadline_seconds=deadline_seconds,
                        world_size=world.world_size,
                        cluster=cluster,
                        settings=dict(settings),
                    )
                    connection.sendall(as_line(hello))
                    reason = "it was reached and did not answer"
                    text = _read_answer(connection, left + SECONDS_TO_HEAR_ALL)
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


def _read_answer(connection: socket.socket, seconds: float) -> bytes:
    """What the other side says, up to a line's end or enough to see that it is not the chief; empty if it hangs up."""
    until = time.monotonic() + seconds
    text = b""
    while b"\n" not in text and (len(text) < 3 + len(HTTP2_SETTINGS) or text.startswith(b"{")):
        if len(text) > LONGEST_ANSWER_BYTES:
            break
        connection.settimeout(max(0.01, until - time.monotonic()))
        part = connection.recv(LONGEST_MESSAGE_BYTES)
        if not part:
            break
        text += part
    return text


def _understood(text: bytes, chief: Task) -> Answer:
    try:
        return Answer.model_validate_json(text)
    except ValidationError as error:
        raise ClusterError(
            f"Another program listens on the address of {chief}, the chief: it says `{ascii(text[:40])[2:-1]}`",
            "end that program, or give the chief another port",
        ) from error


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
