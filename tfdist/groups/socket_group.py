"""Sockets: TensorFlow's collective operations on CPUs, from the memory of one process to the memory of the next.

TensorFlow itself sends tensors as gRPC messages, which copies them several times.
`tfdist.groups.sockets` does the rest.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfdist.errors import ClusterError
from tfdist.groups.arrays import ArrayGroup
from tfdist.groups.sockets.connections import Exchange
from tfdist.groups.sockets.sockets import Sockets
from tfdist.jobs.world import World


class SocketGroup(ArrayGroup):
    """The processes of a job, connected by sockets.

    Args:
        world: the job with the addresses of all processes, and which of them this one is.
        exchange: returns the message of each process, by rank; used once, to connect the sockets.
        connect_timeout_seconds: how long connecting may take.
        timeout_seconds: how long a process may be silent afterwards.

    Attributes:
        sockets: what carries the arrays.

    Raises:
        ClusterError: the processes cannot be connected; raised in all of them.
    """

    added = (*ArrayGroup.added, tf.bfloat16)
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
        # As a sum with zeros: what is gathered would go once around the ring before the next message begins.
        mine = values if self.rank == 0 else np.zeros_like(values)
        words = np.append(mine, np.zeros(-len(values) % 4, np.uint8)).view(np.int32)
        with self.counted(len(values)) as received:
            received(len(values))
            return self.sockets.sum(words).view(np.uint8)[: len(values)]

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
        of_root = tensor[tf.newaxis][: int(self.rank == root)]  # the others send no rows
        return tf.ensure_shape(self._all_gather(of_root, name)[0], tensor.shape)

    def _post(self, values: np.ndarray, to: int, tag: int) -> None:
        self.sockets.pairs.post(values, to, tag)

    def _await_message(self, rank: int, tag: int) -> None:
        self.sockets.pairs.await_message(rank, tag)

    def _take_in(self) -> None:
        self.sockets.pairs.take_in()
