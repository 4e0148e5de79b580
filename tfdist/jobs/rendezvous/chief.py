"""The chief's part of the rendezvous: it waits for the hellos of all ranks, and sends all of them the same answers."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import ValidationError

from tfdist.errors import ClusterError, DisagreementError
from tfdist.jobs.connections import LineConnection, Reception, SentError
from tfdist.jobs.rendezvous.messages import (
    CLUSTER,
    SECONDS_TO_RECEIVE_ANSWER,
    Answer,
    Hello,
    as_line,
    packed,
    unpacked,
)
from tfdist.jobs.world import World

SECONDS_TO_CLOSE = 1.0
# The number of unidentified connections that are allowed besides one for each process of the job.
MOST_STRANGERS = 64


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
        self.reception = Reception(self.selector, listener, self._identify, most, time.monotonic)

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

    def _identify(self, connection: LineConnection, line: bytes) -> bool:
        try:
            hello = Hello.model_validate_json(line)
        except ValidationError:
            return False
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
