"""Messages from one process to another, each sender on a connection of its own, made when it is first used.

A process that receives opens a connection with the sender too: no message comes over it, but it ends when the sender
does. Who waits here, for whatever, also accepts connections and reads what comes by them, so that two processes which
send to each other at once do not deadlock.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import numpy as np

from tfdist.groups.sockets import messages
from tfdist.groups.sockets.connections import PAIR, Addresses, Listener, Origin
from tfdist.groups.sockets.session import PIECE_BYTES, READABLE, WRITABLE, Session, hung_up, reason, wait


class Pairs:
    """The connections of a process with those to which it sends, and from which it receives.

    Args:
        session: of the process.
        listener: accepts the connections of others.
        addresses: of all others.
        mailbox: takes the messages that come.
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
        """Sends a message, and puts those that come meanwhile into the mailbox."""
        self.take_in()  # finds out whether the receiver has gone
        self._open(to)
        patience = self._session.patience()
        for part in (messages.header(values, tag), values):
            data = messages.memory(part)
            while data:
                sent = self._send(to, data)
                data = data[sent:]
                moved = bool(sent) or self._look_for(to, WRITABLE, patience.between_looks_seconds)
                patience = self._session.waited(patience, moved, [to])

    def await_message(self, rank: int, tag: int) -> None:
        """Puts the messages that come into the mailbox, until it has one from `rank` with `tag`."""
        patience = self._session.patience()
        while not self._mailbox.has(rank, tag):
            self._open(rank)
            self._require_sender(rank, tag)
            moved = self._look_for(rank, READABLE, patience.between_looks_seconds)
            patience = self._session.waited(patience, moved, [rank])

    def take_in(self) -> None:
        """Puts the messages that have come into the mailbox."""
        while self._read_ready(0.0):
            pass

    def _open(self, rank: int) -> None:
        """Opens the connection with `rank`, if there is none."""
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
        self._require_there(to)
        try:
            return self._opened[to].send(data[:PIECE_BYTES])
        except BlockingIOError:
            return 0
        except OSError as error:
            self._session.fail(self._session.lost([to], reason(error)))

    def _look_for(self, rank: int, event: int, seconds: float) -> bool:
        """Waits up to `seconds` until `rank` has sent something, or can be sent to; reads from all meanwhile."""
        until, sending_to = time.monotonic() + seconds, rank if event == WRITABLE else None
        while not self._read_ready(max(until - time.monotonic(), 0.0), sending_to).get(rank, 0) & event:
            if time.monotonic() >= until:
                return False
        return True

    def _read_ready(self, seconds: float, sending_to: int | None = None) -> dict[int, int]:
        """Waits for messages, or until `sending_to` can be sent to; reads, accepts, and returns the events by rank."""
        self._session.require_connected()
        opened = {rank: one for rank, one in self._opened.items() if rank not in self._gone}
        wanted = {one.fileno(): READABLE for one in (*self._listener, *self._accepted.values(), *opened.values())}
        if sending_to in opened:
            wanted[opened[sending_to].fileno()] |= WRITABLE
        ready = wait(wanted, seconds)
        found: dict[int, int] = {}
        for rank, one in opened.items():
            found[rank] = ready.get(one.fileno(), 0) & WRITABLE
            if ready.get(one.fileno(), 0) & READABLE:  # nothing ever comes by it
                self._end(rank, hung_up())
                found[rank] |= READABLE
        for rank, one in list(self._accepted.items()):
            if ready.get(one.fileno(), 0) & READABLE:
                found[rank] = found.get(rank, 0) | READABLE
                self._read(rank, one)
        found |= dict.fromkeys(self._accept([one for one in self._listener if one.fileno() in ready]), READABLE)
        return {rank: events for rank, events in found.items() if events}

    def _accept(self, ready: list[socket.socket]) -> list[int]:
        """Accepts connections; returns with whom."""
        ranks = range(self._session.world.world_size)
        accepted = self._listener.accept(
            ready, lambda origin: origin.kind == PAIR and origin.rank in ranks and origin.rank not in self._arriving
        )
        for (_, rank), one in accepted.items():
            self._accepted[rank], self._arriving[rank] = one, messages.Arriving()
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
            self._end(rank, error)
            return
        message = arriving.filled(count)
        if message is not None:
            self._mailbox.put(rank, *message)

    def _end(self, rank: int, error: OSError) -> None:
        """Notes that a connection with `rank` has ended."""
        self._gone.setdefault(rank, reason(error))

    def _require_there(self, rank: int) -> None:
        if rank in self._gone:
            self._session.fail(self._session.lost([rank], self._gone[rank]))

    def _require_sender(self, rank: int, tag: int) -> None:
        """Ends the job if `rank` has gone, and has left no message."""
        if rank in self._gone:
            self.take_in()
            if rank not in self._accepted and not self._mailbox.has(rank, tag):
                self._require_there(rank)
