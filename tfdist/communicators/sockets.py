"""Sockets: the processes are connected in a ring, around which arrays are added up, and pairwise for messages.

TensorFlow's collective operations on CPUs send tensors as gRPC messages, which copies them several times. Here they go
from the memory of one process through a socket to the memory of the next, and are added while they arrive. An array of
n bytes is cut into one part per process: after N - 1 rounds each of N processes has the sum of its own part
(reduce-scatter), and after N - 1 more rounds the sums of all parts (all-reduce). Each process sends n * (N - 1) / N
bytes for the first, and twice that for the second.

Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, J. Parallel and
Distributed Computing 69, 2009.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import select
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from tfdist.cluster import watchdog
from tfdist.cluster.world import World
from tfdist.communicators import messages
from tfdist.communicators.arrays import ArrayCommunicator
from tfdist.communicators.connections import Exchange, connect
from tfdist.errors import ClusterError, DisagreementError

# Sent before each exchange: its number, its kind, and its size in bytes.
HEADER = struct.Struct("<QQQ")
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = range(3)
PIECE_BYTES = 1 << 20  # small enough that what was received is still in the processor's cache when it is added
# The results are those of NumPy's bfloat16 additions, which take up to twice as long.
IN_FLOAT32 = {"dtype": np.float32, "casting": "unsafe"}


class SocketCommunicator(ArrayCommunicator):
    """The processes of a job, connected by sockets.

    Values are sent as they are in memory: all machines must have the same byte order.

    Args:
        world: the job with the addresses of all processes, and which of them this one is.
        exchange: returns the message of each process, by rank; used once, to connect the sockets.
        connect_timeout_seconds: how long connecting may take.
        timeout_seconds: how long a process may be silent afterwards.

    Attributes:
        failure: why the processes are no longer connected; `None` while they are.
        excused: called when others have been silent for too long; returns whether to wait for as long again.

    Raises:
        ClusterError: the processes cannot be connected; raised in all of them.
    """

    added = (*ArrayCommunicator.added, tf.bfloat16)
    engine = "sockets"

    def __init__(self, world: World, exchange: Exchange, connect_timeout_seconds: float, timeout_seconds: float):
        super().__init__()
        self.rank, self.size = world.rank, world.world_size
        self.failure: ClusterError | None = None
        self.excused: Callable[[], bool] = lambda: False
        self._world = world
        self._timeout_seconds = timeout_seconds
        self._exchanges = 0
        self._connections = connect(world, exchange, connect_timeout_seconds)
        self._next, self._previous = self._connections.following, self._connections.previous
        self._pairs = self._connections.pairs
        self._arriving = {rank: messages.Arriving() for rank in self._pairs}
        self._gone: dict[int, str] = {}  # the reason, by rank, for processes whose connection has ended

    def close(self) -> None:
        for connection in self._connections:
            connection.close()

    def give_up(self, error: ClusterError) -> None:
        """Makes the current exchange, or the next one, raise `error`; called from another thread."""
        self.failure = self.failure or error
        for connection in self._connections:
            with contextlib.suppress(OSError):  # it is closed already
                connection.shutdown(socket.SHUT_RDWR)

    def _sum(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return self._call(self.sum, tensor, tensor.shape)

    def _reduce_scatter(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return self._call(self.sum_part, tensor, [tensor.shape[0] // self.size, *tensor.shape[1:]])

    def _all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return self._call(self.join, tensor, [None, *tensor.shape[1:]])

    def _broadcast(self, tensor: tf.Tensor, name: str, root: int) -> tf.Tensor:
        return tf.ensure_shape(self._all_gather(tensor[tf.newaxis], name)[root], tensor.shape)

    def sum(self, values: np.ndarray) -> np.ndarray:
        """The sum of an array over the processes; bit by bit the same in all of them."""
        cuts = [values.size * index // self.size for index in range(self.size + 1)]
        total, parts = self._sum_parts(ALL_REDUCE, values, cuts)
        for turn in range(self.size - 1):
            sent, other = parts[(self.rank - turn) % self.size], parts[(self.rank - turn - 1) % self.size]
            self._swap(total[sent], total[other])
        return total.reshape(values.shape)

    def sum_part(self, values: np.ndarray) -> np.ndarray:
        """Part `rank` of the sum of an array `[size * n, ...]` over the processes: `[n, ...]`, with the bits of `sum`.

        If the number of rows is not a multiple of `size`, the last ones belong to no part.
        """
        shape = (len(values) // self.size, *values.shape[1:])
        total, parts = self._sum_parts(REDUCE_SCATTER, values, [math.prod(shape) * i for i in range(self.size + 1)])
        return total[parts[self.rank]].reshape(shape)

    def _sum_parts(self, kind: int, values: np.ndarray, cuts: list[int]) -> tuple[np.ndarray, list[slice]]:
        """The reduce-scatter: a flat array in which part `rank` is the sum over the processes; and all its parts.

        Part `index` is between `cuts[index]` and `cuts[index + 1]`. The values of the other parts mean nothing.
        """
        flat = np.asarray(values, order="C").reshape(-1)
        total = np.empty(cuts[-1], values.dtype)
        parts = [slice(begin, end) for begin, end in itertools.pairwise(cuts)]
        received = np.empty(max(part.stop - part.start for part in parts), values.dtype)
        adding: dict[str, Any] = IN_FLOAT32 if values.dtype == tf.bfloat16.as_numpy_dtype else {}
        self._begin(kind, values.nbytes)
        for turn in range(self.size - 1):
            sent, own = parts[(self.rank - turn - 1) % self.size], parts[(self.rank - turn - 2) % self.size]
            target = received[: own.stop - own.start]

            def add(begin: int, end: int, own: slice = own, target: np.ndarray = target) -> None:
                whole = slice(own.start + begin, own.start + end)
                np.add(flat[whole], target[begin:end], out=total[whole], **adding)

            self._swap((total if turn else flat)[sent], target, add)
        return total, parts

    def join(self, values: np.ndarray) -> np.ndarray:
        """The arrays `[n_rank, ...]` of all processes, concatenated by rank."""
        values = np.asarray(values, order="C")
        parts = [np.empty(0)] * self.size
        parts[self.rank] = values
        length, other = np.array([len(values)], np.int64), np.empty(1, np.int64)
        self._begin(ALL_GATHER, values.itemsize * math.prod(values.shape[1:]))
        for turn in range(self.size - 1):
            self._swap(length, other)
            owner = (self.rank - turn - 1) % self.size
            parts[owner] = np.empty((int(other[0]), *values.shape[1:]), values.dtype)
            self._swap(parts[(owner + 1) % self.size], parts[owner])
            length, other = other, length
        return np.concatenate(parts)

    def _begin(self, kind: int, size_bytes: int) -> None:
        """Checks that the previous process of the ring has begun the same exchange."""
        self._exchanges += 1
        mine = HEADER.pack(self._exchanges, kind, size_bytes)
        other = np.empty(HEADER.size, np.uint8)
        self._swap(np.frombuffer(mine, np.uint8), other)
        if other.tobytes() != mine:
            number, kind_there, bytes_there = HEADER.unpack(other.tobytes())
            here, there = self._world.named(self.rank), self._world.named((self.rank - 1) % self.size)
            self._fail(
                DisagreementError(
                    "The processes of the job disagree on the model, or on the data: in exchange "
                    f"{self._exchanges} {here} has {_described(kind, size_bytes)}, and in exchange {number} {there} "
                    f"has {_described(kind_there, bytes_there)}",
                    "build the same model, on the same data, and give the same callbacks, in all processes",
                )
            )

    def _swap(self, out: np.ndarray, into: np.ndarray, received: Callable[[int, int], None] | None = None) -> None:
        """Sends `out` to the next process, and fills `into` with what the previous one sends.

        `received(begin, end)` is called when the elements from `begin` to `end` have arrived.
        """
        outgoing, incoming = messages.memory(out), messages.memory(into)
        patience = watchdog.Patience(self._timeout_seconds)
        sent = got = done = 0
        while sent < len(outgoing) or got < len(incoming):
            try:
                now_sent = self._send_some(outgoing[sent:])
                now_got = self._receive_some(incoming[got:])
            except OSError as error:
                self._fail(self._lost(self._neighbours(), _reason(error)))
            sent, got = sent + now_sent, got + now_got
            if received is not None and got // into.itemsize > done:
                received(done, got // into.itemsize)
                done = got // into.itemsize
            moved = bool(now_sent or now_got) or self._look(sent < len(outgoing), got < len(incoming), patience)
            waited_for = self._neighbours(sent < len(outgoing), got < len(incoming))
            patience = self._waited(patience, moved, waited_for)

    def _send_some(self, data: memoryview) -> int:
        with contextlib.suppress(BlockingIOError):
            return self._next.send(data[:PIECE_BYTES]) if data else 0
        return 0

    def _receive_some(self, data: memoryview) -> int:
        with contextlib.suppress(BlockingIOError):
            if data:
                count = self._previous.recv_into(data[:PIECE_BYTES])
                if not count:
                    raise ConnectionResetError(0, "it has hung up")
                return count
        return 0

    def _look(self, sending: bool, receiving: bool, patience: watchdog.Patience) -> bool:
        """Waits until something can be sent or received, or until it is time for the next look; whether it can."""
        readers, writers = [self._previous] if receiving else [], [self._next] if sending else []
        return any(select.select(readers, writers, [], patience.between_looks_seconds))

    def _neighbours(self, following: bool = True, previous: bool = True) -> list[int]:
        return [(self.rank + 1) % self.size] * following + [(self.rank - 1) % self.size] * previous

    def _post(self, values: np.ndarray, to: int, tag: int) -> None:
        self._take_in()  # finds out whether the receiver has gone
        patience = watchdog.Patience(self._timeout_seconds)
        for part in (messages.header(values, tag), values):
            data = messages.memory(part)
            while data:
                sent = self._send_message(to, data)
                data = data[sent:]
                moved = bool(sent) or self._look_for(to, selectors.EVENT_WRITE, patience.between_looks_seconds)
                patience = self._waited(patience, moved, [to])

    def _await_message(self, rank: int, tag: int) -> None:
        patience = watchdog.Patience(self._timeout_seconds)
        while not self.mailbox.has(rank, tag):
            self._require_there(rank)
            moved = self._look_for(rank, selectors.EVENT_READ, patience.between_looks_seconds)
            patience = self._waited(patience, moved, [rank])

    def _take_in(self) -> None:
        while self._read_ready(0.0):
            pass

    def _send_message(self, to: int, data: memoryview) -> int:
        self._require_there(to)
        try:
            return self._pairs[to].send(data[:PIECE_BYTES])
        except BlockingIOError:
            return 0
        except OSError as error:
            self._fail(self._lost([to], _reason(error)))

    def _look_for(self, rank: int, event: int, seconds: float) -> bool:
        """Waits up to `seconds` for `event` on the connection with `rank`, reading from all; whether it came."""
        until, sending_to = time.monotonic() + seconds, rank if event == selectors.EVENT_WRITE else None
        while not self._read_ready(max(until - time.monotonic(), 0.0), sending_to).get(rank, 0) & event:
            if time.monotonic() >= until:
                return False
        return True

    def _read_ready(self, seconds: float, sending_to: int | None = None) -> dict[int, int]:
        """Waits for messages, or until `sending_to` can be sent to; reads, and returns the events by rank."""
        if self.failure is not None:
            raise self.failure
        with selectors.PollSelector() as selector:
            for rank, connection in self._pairs.items():
                writing = selectors.EVENT_WRITE if rank == sending_to else 0
                if rank not in self._gone:
                    selector.register(connection, selectors.EVENT_READ | writing, rank)
            ready = {key.data: events for key, events in selector.select(seconds)}
        for rank, events in ready.items():
            if events & selectors.EVENT_READ:
                self._read(rank)
        return ready

    def _read(self, rank: int) -> None:
        arriving = self._arriving[rank]
        try:
            count = self._pairs[rank].recv_into(arriving.space[:PIECE_BYTES])
        except BlockingIOError:
            return
        except OSError as error:
            self._gone[rank] = _reason(error)
            return
        if not count:
            self._gone[rank] = " (it has hung up)"
            return
        message = arriving.filled(count)
        if message is not None:
            self.mailbox.put(rank, *message)

    def _require_there(self, rank: int) -> None:
        if rank in self._gone:
            self._fail(self._lost([rank], self._gone[rank]))

    def _waited(self, patience: watchdog.Patience, moved: bool, ranks: Iterable[int]) -> watchdog.Patience:
        """The patience that is left after another look at `ranks`."""
        if not patience.ends(moved):
            return patience
        if not self.excused():
            self._fail(self._lost(ranks))
        return watchdog.Patience(self._timeout_seconds)

    def _lost(self, ranks: Iterable[int], reason: str = "") -> ClusterError:
        names = " or ".join(map(self._world.named, sorted(set(ranks))))
        return ClusterError.lost(f"Gone, or silent for {self._timeout_seconds:g} s: {names}{reason}")

    def _fail(self, error: ClusterError) -> NoReturn:
        self.failure = self.failure or error  # later errors are consequences of the first
        self.close()  # so that the neighbours notice at once
        raise self.failure


def _reason(error: OSError) -> str:
    return f" ({error.strerror or error})"


def _described(kind: int, size_bytes: int) -> str:
    what = {ALL_REDUCE: "a tensor", ALL_GATHER: "rows", REDUCE_SCATTER: "a tensor to be scattered"}
    return f"{what[kind]} of {size_bytes} bytes"
