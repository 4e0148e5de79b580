"""The tree: small data goes up to process 0, is merged on the way, and the result comes down again.

This takes two messages per edge, and time that grows with the depth of the tree, whereas the time of the ring grows
with the number of processes. Every collective operation begins in the tree, large operations only with their header: a
process that is in another operation is noticed before any process has computed with its data.

`tfdist.jobs.tree` is the shape of the tree.

Messages go up in tables: each different message, with the ranges of ranks that have sent it. If all processes send the
same message, a table has the size of one message, for any number of processes. A table whose messages are too long
together is `None`.

Synopsis:

    >>> parts = [table_of(b"yes", 0), table_of(b"no", 1), table_of(b"yes", 2), table_of(b"yes", 3)]
    >>> table = merged_tables(parts, longest=100)
    >>> table
    {b'yes': [(0, 1), (2, 4)], b'no': [(1, 2)]}
    >>> by_rank(unpacked_table(packed_table(table)), 4)
    [b'yes', b'no', b'yes', b'yes']
    >>> merged_tables(parts, longest=4) is None
    True
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np

from tfdist.errors import ClusterError, DisagreementError
from tfdist.groups.sockets.messages import memory
from tfdist.groups.sockets.operations import ERROR, HEADER, Body, Operation, add_into
from tfdist.groups.sockets.session import READABLE, WRITABLE, Frame, Link, Session, reason, wait
from tfdist.jobs.connections import SentError, hung_up
from tfdist.jobs.tree import ancestors, depth

Table = dict[bytes, list[tuple[int, int]]]

COUNTS = struct.Struct("<QQ")  # precedes each message: its length, and the number of its ranges
RANGE = struct.Struct("<QQ")
TOO_LONG = b"\xff"  # shorter than any table


class Tree:
    """The position of a process in the tree.

    Args:
        session: the session of the process.
        above: the link to the parent; none in process 0.
        below: the links to the children, by rank.

    Attributes:
        links: all links.
    """

    def __init__(self, session: Session, above: Sequence[Link], below: Sequence[Link]):
        self._session = session
        self._above, self._below = above, below
        self.links = [*above, *below]
        self._error_links = [*self.links]
        self._ended: set[Link] = set()  # to neighbours that have hung up while this process waited elsewhere
        self._rank, self._size = session.world.rank, session.world.world_size
        # The neighbours of a silent process give up first, so that the error that goes through the tree names it.
        levels, own_level = depth(self._size), len(ancestors(self._rank, self._size))
        self._later_below, self._later_above = levels - own_level - 1, levels + own_level - 1

    def listen_to(self, links: Sequence[Link]) -> None:
        """Receives errors over other links too, which carry only errors and the headers of `signal`."""
        self._error_links += links

    def signal(self, operation: Operation, to: Sequence[Link], by: Sequence[Link], later: int) -> None:
        """Sends a header without a body over some of the links of `listen_to`, and waits for headers over others."""
        header = memoryview(operation.header())
        for link in to:
            sent = self.transferred(link, link.send, header)
            assert sent == len(header)  # there is space: the neighbour receives each header before the next but one
        patience = self._session.patience(later)
        while missing := [link for link in by if len(link.ahead) < HEADER.size]:
            if self._ended.intersection(missing):
                self._session.fail(self._session.lost(self.await_error(), reason(hung_up())))
            moved = self.wait_for([], [], patience.between_looks_seconds)
            patience = self._session.waited(patience, moved, [link.rank for link in missing])
        for link in by:
            link.ahead = b""

    def transferred(self, link: Link, move: Callable[[memoryview], int], data: memoryview) -> int:
        """The number of bytes of `data` that `move` sends or receives now, over a link outside of the tree."""
        try:
            return move(data) if data else 0
        except OSError as error:
            lost = self.await_error() or [link.rank]
            self._session.fail(self._session.lost(lost, reason(error)))

    def wait_for(self, sending: Sequence[Link], receiving: Sequence[Link], seconds: float) -> bool:
        """Waits until a link outside of the tree can be used, or until the next look; returns whether one can be."""
        error_events = self.error_events()
        wanted = error_events | {link.connection.fileno(): READABLE for link in receiving}
        for link in sending:
            wanted[link.connection.fileno()] = WRITABLE | wanted.get(link.connection.fileno(), 0)
        ready = wait(wanted, seconds)
        self.receive_errors(ready.keys() & error_events.keys())
        return bool(ready)

    def error_events(self) -> dict[int, int]:
        """The events to wait for, by descriptor, in order to receive an error while this process waits elsewhere."""
        links = [link for link in self._error_links if len(link.ahead) < HEADER.size and link not in self._ended]
        return {link.connection.fileno(): READABLE for link in links}

    def receive_errors(self, ready: Collection[int]) -> None:
        """Raises the error that a neighbour has sent; `ready` are the descriptors of `error_events` that are readable.

        Other data is the beginning of the next operation of a neighbour, and is kept. A neighbour that has hung up may
        have ended its program after this operation, in which it has done its part.
        """
        for link in [link for link in self._error_links if link.connection.fileno() in ready]:
            try:
                link.ahead += link.receive(HEADER.size - len(link.ahead))
                self._raise_error(link)
            except OSError:
                self._ended.add(link)

    def await_error(self) -> list[int]:
        """Raises the error that a neighbour sends within a moment; else returns who has hung up without an error.

        A process that finds another one lost sends the error to its neighbours in the tree, and hangs up. Its
        neighbours in the ring notice only that it has hung up, and would take it for the lost process.
        """
        for link in self._error_links:
            with contextlib.suppress(OSError):
                self._raise_error(link)
        began, seconds = time.monotonic(), self._session.patience().between_looks_seconds
        # A process that has seen a neighbour hang up waits less, so that its error reaches the others in time.
        while error_events := self.error_events():
            left = began + seconds / (4 if self._ended else 1) - time.monotonic()
            if left <= 0:
                break
            self.receive_errors(wait(error_events, left).keys())
        return [link.rank for link in self._ended]

    def _raise_error(self, link: Link) -> None:
        """Raises the error whose header has arrived over `link`, if it is one.

        Raises:
            OSError: the neighbour has hung up before the end of its error.
        """
        if len(link.ahead) < HEADER.size or Operation.read(link.ahead)[0].kind != ERROR:
            return
        frame = OperationFrame(link)
        while not frame.whole:
            if not wait({link.connection.fileno(): READABLE}, self._session.patience().between_looks_seconds):
                raise hung_up()
            frame.receive()
        assert frame.error is not None
        self._session.fail(frame.error)

    def agree(self, operation: Operation) -> None:
        """Returns when all processes have begun the same operation."""
        self._through(operation, lambda bodies: b"")

    def sum(self, operation: Operation, values: np.ndarray) -> np.ndarray:
        """The sum of an array over the processes, bitwise identical in all of them, since only one computes it."""
        total = np.array(values, order="C").reshape(-1)

        def add(bodies: Sequence[Body]) -> memoryview:
            for body in bodies:
                add_into(total, total, np.frombuffer(body, total.dtype))
            return memory(total)

        result = self._through(operation, add)
        return np.frombuffer(result, total.dtype).reshape(values.shape)

    def exchange(self, operation: Operation, message: Body, longest: int) -> list[bytes] | None:
        """The messages of all processes, by rank; `None` if the different ones among them exceed `longest` bytes."""
        own = table_of(bytes(message), self._rank) if len(message) <= longest else None

        def merge(bodies: Sequence[Body]) -> bytes:
            return packed_table(merged_tables([own, *map(unpacked_table, bodies)], longest))

        table = unpacked_table(self._through(operation, merge))
        return None if table is None else by_rank(table, self._size)

    def _through(self, operation: Operation, merge: Callable[[Sequence[Body]], Body]) -> Body:
        """The merged bodies of all processes, as process 0 has merged them; of two processes, each merges both.

        `merge` returns the body of this process, merged with the bodies that it is called with.
        """
        self._session.require_connected()
        if self._size == 2:  # both at the same time
            return merge(self._pass(operation, merge([]), self.links, self.links, 0))
        body = merge(self._pass(operation, b"", [], self._below, self._later_below))
        if self._above:
            (body,) = self._pass(operation, body, self._above, self._above, self._later_above)
        self._pass(operation, body, self._below, [], 0)
        return body

    def _pass(self, operation: Operation, body: Body, to: Sequence[Link], by: Sequence[Link], later: int) -> list[Body]:
        """Sends `body` over the links `to`, and returns the bodies that arrive over `by`, after the same header."""
        whole = memoryview(b"".join((operation.header(len(body)), body)))
        unsent = {link.connection.fileno(): (link, whole) for link in to}
        frames = {link.connection.fileno(): OperationFrame(link) for link in by}
        missing = dict(zip(frames, by, strict=True))
        ready = dict.fromkeys(unsent, WRITABLE)
        ready |= {descriptor: READABLE for descriptor, frame in frames.items() if frame.whole}
        patience = self._session.patience(later)
        while unsent or missing:
            for descriptor, events in ready.items():
                if events & WRITABLE and descriptor in unsent:
                    link, data = unsent.pop(descriptor)
                    data = self._sent(link, data, descriptor in missing)
                    if data:
                        unsent[descriptor] = link, data
                is_readable = events & READABLE and descriptor in missing
                if is_readable and self._received(operation, missing[descriptor], frames[descriptor]):
                    del missing[descriptor]
            if unsent or missing:
                links = [*missing.values(), *(link for link, _ in unsent.values())]
                ready = wait(_wanted(unsent, missing), patience.between_looks_seconds)
                patience = self._session.waited(patience, bool(ready), [link.rank for link in links])
        return [frame.body for frame in frames.values()]

    def _sent(self, link: Link, data: memoryview, expects_frame: bool) -> memoryview:
        """Sends a part of `data` and returns the rest; `expects_frame`: whether a frame is to arrive over the link."""
        try:
            data = data[link.send(data) :]
        except OSError as error:
            if expects_frame:  # receiving the frame reports the error
                return data[:0]
            self.await_error()
            self._session.fail(self._session.lost([link.rank], reason(error)))
        link.in_frame = len(data) > 0
        return data

    def _received(self, operation: Operation, link: Link, frame: OperationFrame) -> bool:
        """Receives a part of a frame; returns whether it is complete."""
        try:
            if not frame.whole:  # an error may have arrived with the previous frame
                frame.receive()
        except OSError as error:
            self._session.fail(self._session.lost([link.rank], reason(error)))
        if frame.whole:
            self._require_same(operation, link.rank, frame)
        return frame.whole

    def _require_same(self, own: Operation, rank: int, frame: OperationFrame) -> None:
        """Ends the job if `rank` has sent an error, or is in another operation than this process."""
        if frame.error is not None:
            self._session.fail(frame.error)
        other = frame.operation
        if other != own:
            here, there = self._session.world.named(self._rank), self._session.world.named(rank)
            self._session.fail(
                DisagreementError(
                    "The processes of the job disagree on the model, or on the data: in exchange "
                    f"{own.number} {here} has {own}, and in exchange {other.number} {there} has {other}",
                    "build the same model, on the same data, and give the same callbacks, in all processes",
                )
            )


def _wanted(unsent: Mapping[int, object], missing: Mapping[int, object]) -> dict[int, int]:
    """The events to wait for, by file descriptor."""
    wanted = dict.fromkeys(missing, READABLE)
    for descriptor in unsent:
        wanted[descriptor] = wanted.get(descriptor, 0) | WRITABLE
    return wanted


class OperationFrame(Frame):
    """The header of an operation, and its body.

    Attributes:
        operation: the operation, once the header has arrived.
        body: the data after the header.
    """

    header_bytes = HEADER.size

    def space_for_body(self, header: bytes) -> memoryview:
        self.operation, body_bytes = Operation.read(header)
        self.body = bytearray(body_bytes)
        return memoryview(self.body)

    @property
    def error(self) -> ClusterError | None:
        """The error that the other process has sent, if this frame is one."""
        return SentError.model_validate_json(self.body).error() if self.operation.kind == ERROR else None


def table_of(message: bytes, rank: int) -> Table:
    """The table of one process."""
    return {message: [(rank, rank + 1)]}


def merged_tables(parts: Iterable[Table | None], longest: int) -> Table | None:
    """The table of all processes of `parts`, whose ranks ascend; `None` if its messages exceed `longest` bytes."""
    whole: Table = {}
    for part in parts:
        if part is None:
            return None
        for message, ranges in part.items():
            merged_ranges = whole.setdefault(message, [])
            for begin, end in ranges:
                if merged_ranges and merged_ranges[-1][1] == begin:
                    merged_ranges[-1] = merged_ranges[-1][0], end
                else:
                    merged_ranges.append((begin, end))
    return whole if sum(map(len, whole)) <= longest else None


def packed_table(table: Table | None) -> bytes:
    """Encodes a table as bytes."""
    if table is None:
        return TOO_LONG
    pieces = []
    for message, ranges in table.items():
        pieces += [COUNTS.pack(len(message), len(ranges)), *(RANGE.pack(*bounds) for bounds in ranges), message]
    return b"".join(pieces)


def unpacked_table(data: bytes | bytearray | memoryview) -> Table | None:
    """Decodes the bytes of `packed_table`."""
    if len(data) == len(TOO_LONG):
        return None
    table: Table = {}
    view, position = memoryview(data), 0
    while position < len(view):
        length, count = COUNTS.unpack_from(view, position)
        begin = position + COUNTS.size + count * RANGE.size
        ranges = list(RANGE.iter_unpack(view[position + COUNTS.size : begin]))
        position = begin + length
        table[bytes(view[begin:position])] = ranges
    return table


def by_rank(table: Table, size: int) -> list[bytes]:
    """The message of each process; equal messages are the same object."""
    if len(table) == 1:
        return [*table] * size
    messages = [b""] * size
    for message, ranges in table.items():
        for begin, end in ranges:
            messages[begin:end] = [message] * (end - begin)
    return messages
