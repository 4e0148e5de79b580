"""The chief's part of the rendezvous: it waits for the hellos of all ranks, and sends all of them the same answer."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import ValidationError

from tfdist.errors import DisagreementError
from tfdist.jobs.rendezvous.messages import (
    CLUSTER,
    LONGEST_MESSAGE_BYTES,
    SECONDS_TO_HEAR_ALL,
    Answer,
    Hello,
    Refusal,
    as_line,
)
from tfdist.jobs.world import World

# A connection that has sent no hello by then is closed.
SECONDS_TO_IDENTIFY = 5.0
SECONDS_TO_CLOSE = 1.0
# Beside one for each process of the job.
MAX_UNIDENTIFIED = 64


@dataclass(eq=False)
class _Peer:
    """A connection that the chief has accepted; it is unidentified until its hello has come."""

    socket: socket.socket
    host: str
    identify_by: float
    text: bytes = b""
    hello: Hello | None = None


class ChiefServer:
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
        self.unidentified: dict[_Peer, None] = {}  # in the order in which they came
        self.identified: dict[int, _Peer] = {}
        self.twins: list[_Peer] = []  # of one that is identified; they stay among the unidentified
        self.refusal: Refusal | None = None
        self.selector = selectors.DefaultSelector()

    def serve(self) -> Refusal | None:
        """Waits for all ranks, and returns the refusal that all were sent, if any."""
        self.listener.setblocking(False)
        with self.selector:
            self.selector.register(self.listener, selectors.EVENT_READ)
            try:
                while self.refusal is None and len(self.by_rank) < self.world.world_size:
                    self._wait()
                self.refusal = self.refusal or self._difference(self.by_rank)
                self._answer_all()
            finally:
                for peer in [*self.unidentified, *self.identified.values()]:
                    peer.socket.close()
        return self.refusal

    def _wait(self) -> None:
        """Handles the next connections and messages, or ends at the deadline."""
        now = time.monotonic()
        if now >= self.deadline:
            self.refusal = self._missing()
            return
        while self.unidentified and now >= next(iter(self.unidentified)).identify_by:
            self._drop(next(iter(self.unidentified)))
        until = min([self.deadline, *(peer.identify_by for peer in list(self.unidentified)[:1])])
        for key, _ in self.selector.select(max(0.0, until - now)):
            if key.data is None:
                self._accept()
            elif self.refusal is None:
                self._receive(key.data)

    def _accept(self) -> None:
        try:
            connection, address = self.listener.accept()
        except OSError:  # it has gone already
            return
        connection.setblocking(False)
        if len(self.unidentified) >= MAX_UNIDENTIFIED + self.world.world_size:
            self._drop(next(iter(self.unidentified)))
        peer = _Peer(connection, address[0], time.monotonic() + SECONDS_TO_IDENTIFY)
        self.unidentified[peer] = None
        self.selector.register(connection, selectors.EVENT_READ, peer)

    def _receive(self, peer: _Peer) -> None:
        if peer.socket.fileno() < 0:  # dropped since the selector returned
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
            hello = Hello.model_validate_json(peer.text.partition(b"\n")[0])
        except ValidationError:
            hello = None
        if hello is None or hello.rank >= hello.world_size:
            self._drop(peer)
            return
        other = self.identified.get(hello.rank)
        if other is not None and not _has_hung_up(other.socket):
            self.refusal = self._twice(other, peer, hello.rank)
            self.twins.append(peer)
            return
        if other is not None:
            self._drop(other)
        del self.unidentified[peer]
        peer.hello = hello
        self.identified[hello.rank] = peer
        settings = {CLUSTER: hello.cluster, **hello.settings}
        if hello.cluster != self.by_rank[0][CLUSTER]:
            # Nothing else can be compared by rank, and its own world may not even have this process.
            self.refusal = self._difference({0: self.by_rank[0], hello.rank: settings})
            return
        self.by_rank[hello.rank] = settings
        if time.monotonic() + hello.seconds < self.deadline:
            self.deadline, self.deadline_seconds = time.monotonic() + hello.seconds, hello.deadline_seconds

    def _drop(self, peer: _Peer) -> None:
        self.selector.unregister(peer.socket)
        peer.socket.close()
        if peer.hello is None:
            del self.unidentified[peer]
        else:
            del self.identified[peer.hello.rank]
            self.by_rank.pop(peer.hello.rank, None)

    def _answer_all(self) -> None:
        answer = as_line(Answer(tfdist=1, refusal=self.refusal))
        for peer in [*self.identified.values(), *self.twins]:
            with contextlib.suppress(OSError):  # TensorFlow will miss those who have gone in this moment
                peer.socket.settimeout(SECONDS_TO_HEAR_ALL)
                peer.socket.sendall(answer)
        # Who closes first keeps the port of a connection for a minute; this port is about to be TensorFlow's.
        until = time.monotonic() + SECONDS_TO_CLOSE
        self.selector.unregister(self.listener)
        while self.identified and (left := until - time.monotonic()) > 0:
            for key, _ in self.selector.select(left):
                self._drop(key.data)

    def _missing(self) -> Refusal:
        missing = [rank for rank in range(self.world.world_size) if rank not in self.by_rank]
        return Refusal(
            differing=False,
            sentence=f"{self.world.named_all(missing)} did not start within {self.deadline_seconds:g} s",
            hint=f"start every process of the job, and see that each can reach `{self.world.tasks[0].address}`",
        )

    def _twice(self, one: _Peer, other: _Peer, rank: int) -> Refusal:
        hosts = " and ".join(f"`{peer.host}`" for peer in (one, other))
        return Refusal(
            differing=False,
            sentence=f"Two processes, on {hosts}, say that they are {self.world.named(rank)}",
            hint="give every process a `task` of its own in `TF_CONFIG`, and start each once",
        )

    def _difference(self, by_rank: Mapping[int, Mapping[str, str]]) -> Refusal | None:
        ordered = {rank: by_rank[rank] for rank in sorted(by_rank)}
        error = DisagreementError.among(ordered, self.world.named_briefly)
        return None if error is None else Refusal(differing=True, sentence=error.sentence, hint=error.hint)


def _has_hung_up(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
