"""The ring: each process sends to the next one, and arrays are added while they arrive.

An array of n bytes is cut into one part per process: after N - 1 rounds each of N processes has the sum of its own part
(reduce-scatter), and after N - 1 more rounds the sums of all parts (all-reduce). Each process sends n * (N - 1) / N
bytes for the first, and twice that for the second, which is the least that is possible.

Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, J. Parallel and
Distributed Computing 69, 2009.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np

from tfdist.transport.additions import add_into
from tfdist.transport.messages import memory
from tfdist.transport.session import READABLE, WRITABLE, Link, Session, reason, wait
from tfdist.transport.tree import Tree


class Ring:
    """The place of a process in the ring.

    Args:
        session: of the process.
        tree: of the process; the reason why others hang up comes by it.
        following: sends to the next process.
        previous: receives from the previous process.

    Attributes:
        links: both.
    """

    def __init__(self, session: Session, tree: Tree, following: Link, previous: Link):
        self._session, self._tree = session, tree
        self.links = self._following, self._previous = following, previous
        self._rank, self._size = session.world.rank, session.world.world_size

    def sum(self, values: np.ndarray) -> np.ndarray:
        """The sum of an array over the processes; bit by bit the same in all of them."""
        cuts = [values.size * index // self._size for index in range(self._size + 1)]
        total, parts = self._sum_parts(values, cuts)
        for turn in range(self._size - 1):
            sent, other = parts[(self._rank - turn) % self._size], parts[(self._rank - turn - 1) % self._size]
            self.swap(total[sent], total[other])
        return total.reshape(values.shape)

    def sum_part(self, values: np.ndarray) -> np.ndarray:
        """Part `rank` of the sum of an array `[size * n, ...]` over the processes: `[n, ...]`, with the bits of `sum`.

        If the number of rows is not a multiple of `size`, the last ones belong to no part.
        """
        shape = (len(values) // self._size, *values.shape[1:])
        total, parts = self._sum_parts(values, [math.prod(shape) * index for index in range(self._size + 1)])
        return total[parts[self._rank]].reshape(shape)

    def _sum_parts(self, values: np.ndarray, cuts: list[int]) -> tuple[np.ndarray, list[slice]]:
        """The reduce-scatter: a flat array in which part `rank` is the sum over the processes; and all its parts.

        Part `index` is between `cuts[index]` and `cuts[index + 1]`. The values of the other parts mean nothing.
        """
        flat = np.asarray(values, order="C").reshape(-1)
        total = np.empty(cuts[-1], values.dtype)
        parts = [slice(begin, end) for begin, end in itertools.pairwise(cuts)]
        received = np.empty(max(part.stop - part.start for part in parts), values.dtype)
        for turn in range(self._size - 1):
            sent, own = parts[(self._rank - turn - 1) % self._size], parts[(self._rank - turn - 2) % self._size]
            target = received[: own.stop - own.start]

            def add(begin: int, end: int, own: slice = own, target: np.ndarray = target) -> None:
                whole = slice(own.start + begin, own.start + end)
                add_into(total[whole], flat[whole], target[begin:end])

            self.swap((total if turn else flat)[sent], target, add)
        return total, parts

    def gather(self, message: bytes) -> list[bytes]:
        """The messages of all processes, by rank."""
        parts = [np.empty(0, np.uint8)] * self._size
        parts[self._rank] = np.frombuffer(message, np.uint8)
        length, other = np.array([len(message)], np.int64), np.empty(1, np.int64)
        for turn in range(self._size - 1):
            self.swap(length, other)
            owner = (self._rank - turn - 1) % self._size
            parts[owner] = np.empty(int(other[0]), np.uint8)
            self.swap(parts[(owner + 1) % self._size], parts[owner])
            length, other = other, length
        return [part.tobytes() for part in parts]

    def swap(self, out: np.ndarray, into: np.ndarray, received: Callable[[int, int], None] | None = None) -> None:
        """Sends `out` to the next process, and fills `into` with what the previous one sends.

        `received(begin, end)` is called when the elements from `begin` to `end` have arrived.
        """
        outgoing, incoming = memory(out), memory(into)
        patience = self._session.patience()
        sent = got = done = 0
        while sent < len(outgoing) or got < len(incoming):
            now_sent = self._moved(self._following, self._following.send, outgoing[sent:])
            now_got = self._moved(self._previous, self._previous.receive_into, incoming[got:])
            sent, got = sent + now_sent, got + now_got
            if received is not None and got // into.itemsize > done:
                received(done, got // into.itemsize)
                done = got // into.itemsize
            sending, receiving = sent < len(outgoing), got < len(incoming)
            moved = bool(now_sent or now_got) or self._look(sending, receiving, patience.between_looks_seconds)
            waited_for = [self._following.rank] * sending + [self._previous.rank] * receiving
            patience = self._session.waited(patience, moved, waited_for)

    def _moved(self, link: Link, move: Callable[[memoryview], int], data: memoryview) -> int:
        """How many bytes of `data` are sent to, or received from, a neighbour now."""
        try:
            return move(data) if data else 0
        except OSError as error:
            lost = self._tree.last_word() or [link.rank]
            self._session.fail(self._session.lost(lost, reason(error)))

    def _look(self, sending: bool, receiving: bool, seconds: float) -> bool:
        """Waits until something can be sent or received, or until it is time for the next look; whether it can."""
        heeded, wanted = self._tree.heeded(), {}
        if sending:
            wanted[self._following.connection.fileno()] = WRITABLE
        if receiving:
            wanted[self._previous.connection.fileno()] = READABLE
        ready = wait(heeded | wanted, seconds)
        self._tree.heed(ready.keys() & heeded.keys())
        return bool(ready)
