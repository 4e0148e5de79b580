"""Sums and messages on CPUs over sockets, from the memory of one process to the memory of the next.

TensorFlow itself sends tensors as gRPC messages, which copies them several times. `SocketGroup` exchanges tensors, and
`Sockets` arrays, by the algorithms of `tfdist.groups.sockets`.

Synopsis:

    sockets = Sockets(world, exchange, connect_timeout_seconds=10.0, timeout_seconds=60.0, mailbox=Mailbox())
    sockets.sum(np.ones(3))         # size * [1, 1, 1] in every process
    sockets.exchange(b"ready")      # the message of each process, by rank
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfdist.errors import ClusterError
from tfdist.groups import broadcast_by_sum
from tfdist.groups.arrays import ArrayGroup
from tfdist.groups.sockets import costs, hosts
from tfdist.groups.sockets.connections import connect
from tfdist.groups.sockets.messages import Mailbox, Pairs, memory
from tfdist.groups.sockets.operations import ALL_GATHER, ALL_REDUCE, EXCHANGE, REDUCE_SCATTER, Body, Operation, slices
from tfdist.groups.sockets.ring import Ring
from tfdist.groups.sockets.session import Session
from tfdist.groups.sockets.tree import Tree
from tfdist.jobs.connections import Exchange
from tfdist.jobs.world import World


class SocketGroup(ArrayGroup):
    """The processes of a job, connected by sockets.

    Args:
        world: the job with the addresses of all processes, and the rank of this process.
        exchange: returns the message of each process, by rank; used once, to connect the sockets.
        connect_timeout_seconds: how long connecting may take.
        timeout_seconds: how long a process may be silent afterwards.

    Attributes:
        sockets: the connections that carry the arrays.

    Raises:
        ClusterError: the processes cannot be connected; raised in all of them.
    """

    summed_dtypes = (*ArrayGroup.summed_dtypes, tf.bfloat16)
    engine = "sockets"

    def __init__(self, world: World, exchange: Exchange, connect_timeout_seconds: float, timeout_seconds: float):
        super().__init__()
        self.rank, self.size = world.rank, world.world_size
        self.sockets = Sockets(world, exchange, connect_timeout_seconds, timeout_seconds, self.mailbox)

    @property
    def failure(self) -> ClusterError | None:
        return self.sockets.failure

    def give_up(self, error: ClusterError) -> None:
        self.sockets.give_up(error)

    def excuse(self, excused: Callable[[], bool]) -> None:
        self.sockets.excuse(excused)

    def close(self) -> None:
        self.sockets.close()

    def barrier(self) -> None:
        self.exchange(b"")

    def broadcast_bytes(self, values: np.ndarray) -> np.ndarray:
        # A sum, because an all-gather would go once around the ring before the next message begins.
        with self.counted(len(values)) as received:
            received(len(values))
            return broadcast_by_sum(values, self.rank == 0, self.sockets.sum)

    def exchange(self, message: bytes) -> list[bytes]:
        with self.counted(len(message)) as received:
            messages = self.sockets.exchange(message)
            received(sum(map(len, messages)))
        return messages

    def _sum(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return self._call(self.sockets.sum, tensor, tensor.shape)

    def _reduce_scatter(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        shape = [tensor.shape[0] // self.size, *tensor.shape[1:]]
        return self._call(self.sockets.sum_part, tensor, shape)

    def _all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return self._call(self.sockets.join, tensor, [None, *tensor.shape[1:]])

    def _broadcast(self, tensor: tf.Tensor, name: str, root: int) -> tf.Tensor:
        rows = tensor[tf.newaxis][: int(self.rank == root)]  # the others send no rows
        return tf.ensure_shape(self._all_gather(rows, name)[0], tensor.shape)

    def _post(self, values: np.ndarray, to: int, tag: int) -> None:
        self.sockets.pairs.post(values, to, tag)

    def _await_message(self, rank: int, tag: int) -> None:
        self.sockets.pairs.await_message(rank, tag)

    def _take_in(self) -> None:
        self.sockets.pairs.take_in()


class Sockets:
    """The processes of a job, connected by sockets. Only one thread at a time uses them.

    Values are sent as they are in memory: all machines must have the same byte order.

    Args:
        world: the job with the addresses of all processes, and the rank of this process.
        exchange: returns the message of each process, by rank; used once, to connect the sockets.
        connect_timeout_seconds: how long connecting may take.
        timeout_seconds: how long a process may be silent afterwards.
        mailbox: takes the messages of single processes that arrive.

    Attributes:
        rank: the rank of this process.
        size: the number of processes.
        pairs: messages from one process to another.

    Raises:
        ClusterError: the processes cannot be connected; raised in all of them.
    """

    def __init__(
        self,
        world: World,
        exchange: Exchange,
        connect_timeout_seconds: float,
        timeout_seconds: float,
        mailbox: Mailbox,
    ):
        self.rank, self.size = world.rank, world.world_size
        self._session = session = Session(world, timeout_seconds)
        self._begun = 0
        connections, (following, previous, above, below) = connect(world, exchange, connect_timeout_seconds)
        self._tree = Tree(session, above, below)
        self._ring = Ring(session, self._tree, following, previous, (self.rank, self.size))
        session.tree += self._tree.links
        session.others += [[link.connection for link in self._ring.links], [connections]]
        self._hosts = hosts.connect(session, self._tree, connections, connect_timeout_seconds)
        if self._hosts is not None:
            self._tree.listen_to(self._hosts.neighbours)
            session.tree += self._hosts.neighbours
            session.others += [[link.connection for link in self._hosts.links]]
        self._for_large = self._ring if self._hosts is None else self._hosts
        self.pairs = Pairs(session, connections, mailbox)
        session.others += [self.pairs]

    @property
    def failure(self) -> ClusterError | None:
        """Why the processes are no longer connected; `None` while they are."""
        return self._session.failure

    def excuse(self, excused: Callable[[], bool]) -> None:
        """Has `excused` called when others have been silent for too long; it returns whether to wait as long again."""
        self._session.excused = excused

    def give_up(self, error: ClusterError) -> None:
        """Makes the current operation, or the next one, raise `error`; called from another thread."""
        self._session.give_up(error)

    def traffic(self) -> tuple[int, int]:
        """The number of links of the ring, the tree and the host, and the number of bytes sent over them."""
        links = [*self._ring.links, *self._tree.links, *(() if self._hosts is None else self._hosts.links)]
        return len(links), sum(link.sent_bytes for link in links)

    def close(self) -> None:
        """Closes all connections."""
        self._session.close()

    def sum(self, values: np.ndarray) -> np.ndarray:
        """The sum of an array over the processes, bitwise identical in all of them."""
        operation = self._next(ALL_REDUCE, values.nbytes)
        algorithm = self._tree if values.nbytes <= self._longest_by_tree() else self._for_large
        return algorithm.sum(operation, values)

    def sum_part(self, values: np.ndarray) -> np.ndarray:
        """Part `rank` of the sum of an array `[size * n, ...]`: `[n, ...]`, bitwise identical to that part of `sum`.

        If the number of rows is not a multiple of `size`, the last rows belong to no part.
        """
        operation = self._next(REDUCE_SCATTER, values.nbytes)
        if values.nbytes <= self._longest_by_tree():
            rows = len(values) // self.size
            return self._tree.sum(operation, values)[self.rank * rows : (self.rank + 1) * rows]
        return self._for_large.sum_part(operation, values)

    def join(self, values: np.ndarray) -> np.ndarray:
        """The arrays `[n_rank, ...]` of all processes, concatenated by rank."""
        values = np.asarray(values, order="C")
        operation = self._next(ALL_GATHER, values.itemsize * math.prod(values.shape[1:]))
        parts = self._tree.exchange(operation, memory(values), self._longest_by_tree())
        joined = self._gathered(operation, memory(values))[0] if parts is None else bytearray().join(parts)
        return np.frombuffer(joined, values.dtype).reshape(-1, *values.shape[1:])

    def exchange(self, message: bytes) -> list[bytes]:
        """The message of each process, by rank."""
        operation = self._next(EXCHANGE, 0)
        messages = self._tree.exchange(operation, message, self._longest_by_tree())
        if messages is not None:
            return messages
        joined, parts = self._gathered(operation, message)
        return [joined[part].tobytes() for part in parts]

    def _gathered(self, operation: Operation, message: Body) -> tuple[np.ndarray, list[slice]]:
        """The messages of all processes, which are too long for the tree, concatenated; and the slice of each."""
        lengths = self._tree.exchange(operation, len(message).to_bytes(8, "big"), sys.maxsize)
        assert lengths is not None
        counts = [int.from_bytes(length, "big") for length in lengths]
        return self._for_large.gather(counts, message), slices([0, *itertools.accumulate(counts)])

    def _longest_by_tree(self) -> int:
        """The number of bytes up to which the tree is used."""
        return costs.longest_by_tree(self.size, self.size if self._hosts is None else self._hosts.count)

    def _next(self, kind: int, size_bytes: int) -> Operation:
        self._begun += 1
        return Operation(self._begun, kind, size_bytes)
