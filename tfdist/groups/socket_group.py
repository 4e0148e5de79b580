"""Collective operations on CPUs over sockets, from the memory of one process to the memory of the next.

TensorFlow itself sends tensors as gRPC messages, which copies them several times. The implementation is in
`tfdist.groups.sockets`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfdist.errors import ClusterError
from tfdist.groups import broadcast_by_sum
from tfdist.groups.arrays import ArrayGroup
from tfdist.groups.sockets.sockets import Sockets
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
