"""Messages from one process to another, each sender on its own connection, which is opened when it is first used.

A process that receives opens a connection to the sender too: no message comes over it, but it ends when the sender
ends. While a process waits here, for any reason, it also accepts connections and reads from them, so that two processes
which send to each other at the same time do not deadlock.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import numpy as np

from tfdist.groups.sockets import messages
from tfdist.groups.sockets.connections import PAIR, Addresses, Listener, Origin
from tfdist.groups.sockets.session import PIECE_BYTES, READABLE, WRITABLE, Session, reason, wait
from tfdist.jobs.connections import hung_up


class Pairs:
    """The connections of a process with those to which it sends, and from which it receives.

    Args:
        session: the session of the process.
        listener: accepts the connections of others.
        addresses: where all others listen.
        mailbox: takes the messages that arrive.
    """

    def __init__(self, session: Session, listener: Listener, addresses: Addresses, mailbox: messages.Mailbox):
        self._session = session
        self._listener = listener
        self._addresses = addresses
        self._mailbox = mailbox
        self._opened: dict[int, socket.socket] = {}
        self._accepted: dict[int, socket.socket] = {}
        self._arriving: dict[int, messages.Arriving] = {}
        self._gone: dict[int, str] = {}  # the reason, by rank, for processes whose connection has ended

    def __iter__(self) -> Iterator[socket.socket]:
        return iter((*self._opened.values(), *self._accepted.values()))

    def post(self, values: np.ndarray, to: int, tag: int) -> None:
        """Sends a message; messages that arrive in the meantime go to the mailbox."""
        self.take_in()  # finds out whether the receiver has gone
        self._open(to)
        patience = self._session.patience()
        for part in (messages.header(values, tag), values):
            data = messages.memory(part)
            while data:
                sent = self._send(to, data)
                data = data[sent:]
                moved = bool(sent) or self._wait_for(to, WRITABLE, patience.between_looks_seconds)
                patience = self._session.waited(patience, moved, [to])

    def await_message(self, rank: int, tag: int) -> None:
        """Puts arriving messages into the mailbox until it has one from `rank` with `tag`."""
        patience = self._session.patience()
        while not self._mailbox.has(rank, tag):
            self._open(rank)
            self._require_sender(rank, tag)
            moved = self._wait_for(rank, READABLE, patience.between_looks_seconds)
            patience = self._session.waited(patience, moved, [rank])

    def take_in(self) -> None:
        """Puts the messages that have arrived into the mailbox."""
        while self._read_ready(0.0):
            pass

    def _open(self, rank: int) -> None:
        """Opens the connection to `rank`, if there is none."""
        patience = self._session.patience()
        while rank not in self._opened and rank not in self._gone:
            try:
                self._opened[rank] = self._addresses.open(Origin(PAIR, rank), patience.between_looks_seconds)
            except TimeoutError:
                patience = self._session.waited(patience, moved=False, ranks=[rank])
            except OSError as error:
                self._gone.setdefault(rank, reason(error))
            self._read_ready(0.0)

    def _send(self, to: int, data: memoryview) -> int:
        self._require_not_gone(to)
        try:
            return self._opened[to].send(data[:PIECE_BYTES])
        except BlockingIOError:
            return 0
        except OSError as error:
            self._session.fail(self._session.lost([to], reason(error)))

    def _wait_for(self, rank: int, event: int, seconds: float) -> bool:
        """Waits up to `seconds` until `rank` has sent something, or can be sent to; reads from all in the meantime."""
        until, sending_to = time.monotonic() + seconds, rank if event == WRITABLE else None
        while not self._read_ready(max(until - time.monotonic(), 0.0), sending_to).get(rank, 0) & event:
            if time.monotonic() >= until:
                return False
        return True

    def _read_ready(self, seconds: float, sending_to: int | None = None) -> dict[int, int]:
        """Waits for messages, or until `sending_to` can be sent to; reads, accepts, and returns the events by rank."""
        self._session.require_connected()
        opened = {rank: connection for rank, connection in self._opened.items() if rank not in self._gone}
        reading = (*self._listener, *self._accepted.values(), *opened.values())
        wanted = {connection.fileno(): READABLE for connection in reading}
        if sending_to in opened:
            wanted[opened[sending_to].fileno()] |= WRITABLE
        ready = wait(wanted, seconds)
        events: dict[int, int] = {}
        for rank, connection in opened.items():
            events[rank] = ready.get(connection.fileno(), 0) & WRITABLE
            if ready.get(connection.fileno(), 0) & READABLE:  # it has ended: nothing else ever comes over it
                self._gone.setdefault(rank, reason(hung_up()))
                events[rank] |= READABLE
        for rank, connection in list(self._accepted.items()):
            if ready.get(connection.fileno(), 0) & READABLE:
                events[rank] = events.get(rank, 0) | READABLE
                self._read(rank, connection)
        events |= dict.fromkeys(self._accept([s for s in self._listener if s.fileno() in ready]), READABLE)
        return {rank: event for rank, event in events.items() if event}

    def _accept(self, ready: list[socket.socket]) -> list[int]:
        """Accepts connections; returns the ranks of the other sides."""
        ranks = range(self._session.world.world_size)
        accepted = self._listener.accept(
            ready, lambda origin: origin.kind == PAIR and origin.rank in ranks and origin.rank not in self._arriving
        )
        for (_, rank), connection in accepted.items():
            self._accepted[rank], self._arriving[rank] = connection, messages.Arriving()
        return [rank for _, rank in accepted]

    def _read(self, rank: int, connection: socket.socket) -> None:
        arriving = self._arriving[rank]
        try:
            count = connection.recv_into(arriving.space[:PIECE_BYTES])
            if not count:
                raise hung_up()
        except BlockingIOError:
            return
        except OSError as error:
            self._accepted.pop(rank).close()
            self._gone.setdefault(rank, reason(error))
            return
        message = arriving.filled(count)
        if message is not None:
            self._mailbox.put(rank, *message)

    def _require_not_gone(self, rank: int) -> None:
        if rank in self._gone:
            self._session.fail(self._session.lost([rank], self._gone[rank]))

    def _require_sender(self, rank: int, tag: int) -> None:
        """Ends the job if `rank` has gone, and has left no message."""
        if rank in self._gone:
            self.take_in()
            if rank not in self._accepted and not self._mailbox.has(rank, tag):
                self._require_not_gone(rank)
