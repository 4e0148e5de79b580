"""The ring: each process sends to the next one, and arrays are added while they arrive.

An array of n bytes is divided into one part per process. After N - 1 rounds, each of N processes has the sum of its own
part (reduce-scatter), and after N - 1 more rounds the sums of all parts (all-reduce). Each process sends
n * (N - 1) / N bytes for the first, and twice that for the second, which is the minimum.

Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, J. Parallel and
Distributed Computing 69, 2009.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from tfdist.groups.sockets.messages import memory
from tfdist.groups.sockets.operations import Body, Operation, add_into, even_cuts, slices
from tfdist.groups.sockets.session import Link, Session
from tfdist.groups.sockets.tree import Tree


class Ring:
    """The position of a process in a ring.

    Args:
        session: the session of the process.
        tree: the tree of the job, by which a process learns why others have hung up.
        following: the link to the next process, for sending.
        previous: the link to the previous process, for receiving.
        position: the number of the process in the ring, and the number of processes in the ring.
        later: how many looks longer than others the process waits for its neighbours.

    Attributes:
        links: both links.
    """

    def __init__(
        self, session: Session, tree: Tree, following: Link, previous: Link, position: tuple[int, int], later: int = 0
    ):
        self._session, self._tree, self._later = session, tree, later
        self.links = self._following, self._previous = following, previous
        self._rank, self._size = position

    def sum(self, operation: Operation, values: np.ndarray) -> np.ndarray:
        """As `Sockets.sum`."""
        total, parts = self._sum_parts(operation, values, even_cuts(values.size, self._size))
        self.share_parts(total, parts)
        return total.reshape(values.shape)

    def sum_part(self, operation: Operation, values: np.ndarray) -> np.ndarray:
        """As `Sockets.sum_part`."""
        shape = (len(values) // self._size, *values.shape[1:])
        total, parts = self._sum_parts(operation, values, even_cuts(math.prod(shape) * self._size, self._size))
        return total[parts[self._rank]].reshape(shape)

    def gather(self, lengths: Sequence[int], message: Body) -> np.ndarray:
        """The messages of all processes, whose lengths are known, concatenated: `[sum(lengths)]` uint8."""
        parts = slices([0, *itertools.accumulate(lengths)])
        whole = np.empty(parts[-1].stop, np.uint8)
        whole[parts[self._rank]] = np.frombuffer(message, np.uint8)
        self.share_parts(whole, parts)
        return whole

    def _sum_parts(self, operation: Operation, values: np.ndarray, cuts: list[int]) -> tuple[np.ndarray, list[slice]]:
        """A flat array in which part `rank` is the sum over the processes; and the slices of all parts.

        Part `index` is between `cuts[index]` and `cuts[index + 1]`. The values of the other parts are undefined.
        """
        self._tree.agree(operation)
        total, parts = np.empty(cuts[-1], values.dtype), slices(cuts)
        self.add_parts(np.asarray(values, order="C").reshape(-1), total, parts)
        return total, parts

    def add_parts(self, flat: np.ndarray, total: np.ndarray, parts: Sequence[slice]) -> None:
        """The reduce-scatter: sets part `rank` of `total` to the sum of that part of `flat` over the processes.

        `total` may be `flat` itself. The values of its other parts are undefined afterwards.
        """
        received = np.empty(max(part.stop - part.start for part in parts), flat.dtype)
        for turn in range(self._size - 1):
            sent, own = parts[(self._rank - turn - 1) % self._size], parts[(self._rank - turn - 2) % self._size]
            target = received[: own.stop - own.start]

            def add(begin: int, end: int, own: slice = own, target: np.ndarray = target) -> None:
                whole = slice(own.start + begin, own.start + end)
                add_into(total[whole], flat[whole], target[begin:end])

            self.swap((total if turn else flat)[sent], target, add)

    def share_parts(self, total: np.ndarray, parts: Sequence[slice]) -> None:
        """The all-gather: fills each part of `total` with the values of the process with that rank."""
        for turn in range(self._size - 1):
            sent, other = parts[(self._rank - turn) % self._size], parts[(self._rank - turn - 1) % self._size]
            self.swap(total[sent], total[other])

    def swap(self, out: np.ndarray, into: np.ndarray, received: Callable[[int, int], None] | None = None) -> None:
        """Sends `out` to the next process, and fills `into` with what the previous one sends.

        `received(begin, end)` is called when the elements from `begin` to `end` have arrived.
        """
        outgoing, incoming = memory(out), memory(into)
        patience = self._session.patience(self._later)
        sent = got = done = 0
        while sent < len(outgoing) or got < len(incoming):
            now_sent = self._tree.transferred(self._following, self._following.send, outgoing[sent:])
            now_got = self._tree.transferred(self._previous, self._previous.receive_into, incoming[got:])
            sent, got = sent + now_sent, got + now_got
            if received is not None and got // into.itemsize > done:
                received(done, got // into.itemsize)
                done = got // into.itemsize
            sending, receiving = [self._following] * (sent < len(outgoing)), [self._previous] * (got < len(incoming))
            moved = bool(now_sent or now_got) or self._tree.wait_for(sending, receiving, patience.between_looks_seconds)
            patience = self._session.waited(patience, moved, [link.rank for link in (*sending, *receiving)])
