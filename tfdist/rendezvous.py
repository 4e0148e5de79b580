"""The processes of a job meet before TensorFlow's servers start, so that a missing one is named and not waited for.

    rank 1, 2, ...   connect to the chief's address    →  {"tfdist": 1, "rank": 1, "card": {...}}
    chief            waits for all, or the deadline    →  {"error": null}, or what is wrong, to everyone

It happens on the chief's own port in TF_CONFIG, which TensorFlow takes over afterwards. Messages are lines of JSON of
bounded length; nothing else that comes over the network is read.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any

from tfdist.errors import ClusterError, DisagreementError
from tfdist.world import Task, World

LONGEST_MESSAGE_BYTES = 1 << 16
SECONDS_BETWEEN_TRIES = 0.1
SECONDS_FOR_A_MESSAGE = 5.0

Card = Mapping[str, str]


def meet(world: World, card: Card, deadline_seconds: float) -> bool:
    """Waits until every process of `world` is there with the same `card`; `False` if the job had already begun.

    Args:
        world: the job and this process' place in it.
        card: what must be equal in all processes, such as the version of TensorFlow.
        deadline_seconds: how long to wait for the others.

    Raises:
        DisagreementError: the cards differ; in every process, with each one's value.
        ClusterError: a process did not come by the deadline, or this one's address cannot be listened on.
    """
    if world.world_size == 1:
        return True
    deadline = time.monotonic() + deadline_seconds
    with _listening(world.tasks[world.rank]) as listener:
        if world.rank == 0:
            _raise(_receive_all(world, card, listener, deadline, deadline_seconds))
            return True
    answer = _ask_chief(world, card, deadline, deadline_seconds)
    if answer is None:
        return False
    _raise(answer)
    return True


@contextlib.contextmanager
def _listening(task: Task) -> Iterator[socket.socket]:
    """A socket that listens on the task's address: the chief's is used, another's only shows that it is free."""
    try:
        family = socket.getaddrinfo(task.host, task.port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server(("", task.port), family=family, backlog=128)
    except OSError as error:
        raise ClusterError(
            f"The address `{task.address}` of {task.role} {task.index} cannot be listened on: {error.strerror}",
            "end the process that holds the port, or give the task another one",
        ) from error
    with listener:
        yield listener


def _receive_all(world: World, card: Card, listener: socket.socket, deadline: float, seconds: float) -> Any:
    """The chief's part: hears everyone, and tells everyone the same; returns what it told."""
    cards: dict[int, Card] = {0: card}
    connections: list[socket.socket] = []
    problem: Any = None
    while len(cards) < world.world_size and problem is None:
        listener.settimeout(max(0.0, deadline - time.monotonic()))
        try:
            connection, _ = listener.accept()
        except (TimeoutError, BlockingIOError):
            missing = [world.named(rank) for rank in range(world.world_size) if rank not in cards]
            problem = {"missing": missing, "seconds": seconds}
            break
        message = _read(connection)
        rank = message.get("rank")
        if message.get("tfdist") != 1 or not isinstance(rank, int) or not 0 < rank < world.world_size:
            connection.close()  # a stranger
            continue
        connections.append(connection)
        if rank in cards:
            problem = {"twice": world.named(rank)}
        cards[rank] = dict(message.get("card", {}))
    problem = problem or _difference(world, cards)
    for connection in connections:
        with connection:
            _write(connection, {"tfdist": 1, "problem": problem})
    return problem


def _difference(world: World, cards: Mapping[int, Card]) -> Any:
    names = list(dict.fromkeys(name for card in cards.values() for name in card))
    differing = {
        name: {world.named(rank): cards[rank].get(name) for rank in sorted(cards)}
        for name in names
        if len({cards[rank].get(name) for rank in cards}) > 1
    }
    return {"differing": differing} if differing else None


def _ask_chief(world: World, card: Card, deadline: float, seconds: float) -> Any:
    """Another rank's part: the chief's answer, as `_raise` takes it; `None` if TensorFlow answers in its place."""
    chief = world.tasks[0]
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            return {"missing": [world.named(0)], "seconds": seconds}
        try:
            with socket.create_connection((chief.host, chief.port), timeout=left) as connection:
                _write(connection, {"tfdist": 1, "rank": world.rank, "card": dict(card)})
                # The chief answers when all have come; it gives up by a deadline of its own.
                message = _read(connection, left + SECONDS_FOR_A_MESSAGE)
        except OSError:
            time.sleep(min(SECONDS_BETWEEN_TRIES, max(0.0, left)))
            continue
        if message.get("tfdist") == 1:
            return message.get("problem") or {}
        if message:
            return None
        time.sleep(min(SECONDS_BETWEEN_TRIES, max(0.0, left)))


def _raise(problem: Any) -> None:
    if not problem:
        return
    if "differing" in problem:
        raise DisagreementError.of(problem["differing"])
    if "twice" in problem:
        raise ClusterError(
            f"Two processes say that they are {problem['twice']}", "give each process an index of its own"
        )
    names = ", ".join(problem["missing"])
    raise ClusterError(
        f"Not there after {problem['seconds']:g} s: {names}",
        "start every process of the cluster, and see that its address can be reached from the chief's machine",
    )


def _write(connection: socket.socket, message: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):  # whoever is gone by now is missed elsewhere
        connection.sendall(json.dumps(message).encode() + b"\n")


def _read(connection: socket.socket, seconds: float = SECONDS_FOR_A_MESSAGE) -> dict[str, Any]:
    """One message; empty if the other side hung up, and `{"other": True}` if it speaks something else."""
    deadline = time.monotonic() + seconds
    text = b""
    while not text.endswith(b"\n") and len(text) < LONGEST_MESSAGE_BYTES:
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        part = connection.recv(LONGEST_MESSAGE_BYTES)
        if not part:
            break
        text += part
    try:
        message = json.loads(text)
    except ValueError:
        return {"other": True} if text else {}
    return message if isinstance(message, dict) else {"other": True}
