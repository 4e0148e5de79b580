"""TensorFlow's collective operations between the replicas of several processes: rings over gRPC, and NCCL."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.communicators import CARRIED_AS, gathered_in_pieces, structures
from tfdist.core import gradient_reduction
from tfdist.strategies import _distribute as distribute
from tfdist.strategies import base


class WorkerReplica(distribute.MirroredReplica):
    """A replica that meets those of other processes by TensorFlow's collective operations."""

    def __init__(self, count: int, packing: gradient_reduction.Packing):
        super().__init__(base.current_index(), count)
        self.packing = packing

    def all_gather(self, structure: Any) -> Any:
        """The examples of all replicas, in their order, on every replica."""
        context = tf.distribute.get_replica_context()

        def gather(tensor: tf.Tensor) -> tf.Tensor:
            numbers = _as_gathered(tensor)
            # A tensor from outside the step, such as an input of the graph, has no device to gather on.
            gathered = context.all_gather(tf.identity(numbers), axis=0)
            return tf.bitcast(gathered, tensor.dtype) if _is_bitcast(tensor) else tf.cast(gathered, tensor.dtype)

        return structures.gathered(structure, gather, self.index)


def exchange(strategy: tf.distribute.Strategy, message: bytes) -> list[bytes]:
    """The messages of all processes of the job, by rank."""
    replicas = len(strategy.extended.worker_devices)  # of this process, each of which sends the message

    def gather(piece: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
        # Collectives carry no bytes, so four of them are sent as an int32; with no element at all they crash.
        words = np.frombuffer(piece.tobytes() + bytes(4 - len(piece) % 4), np.int32)
        ends = np.cumsum(np.repeat([size // 4 + 1 for size in sizes], replicas))
        parts = np.split(all_gather(strategy)(tf.constant(words)).numpy(), ends[:-1])[::replicas]
        return [part.view(np.uint8)[:size] for part, size in zip(parts, sizes, strict=True)]

    length = np.array([len(message)], np.int64).view(np.int32)
    lengths = all_gather(strategy)(tf.constant(length)).numpy().view(np.int64)[::replicas]
    return gathered_in_pieces(message, lengths.tolist(), gather)


@functools.cache
def all_gather(strategy: tf.distribute.Strategy) -> Callable[..., Any]:
    """A function that gathers an int32 vector of each replica; all processes call it together."""

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int32)], autograph=False)
    def gather(values: tf.Tensor) -> Any:
        def on_replica() -> Any:
            replica = WorkerReplica(strategy.num_replicas_in_sync, gradient_reduction.Packing())
            return replica.all_gather(values)

        return base.local_results(strategy, strategy.run(on_replica))[0]

    return gather


def _as_gathered(tensor: tf.Tensor) -> tf.Tensor:
    """`tensor` in a dtype that collectives can gather, without loss."""
    if _is_bitcast(tensor):
        return tf.bitcast(tensor, CARRIED_AS[tensor.dtype])
    if tensor.dtype in (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64):
        return tensor
    return tf.cast(tensor, tf.float32 if tensor.dtype.is_floating else tf.int32)


def _is_bitcast(tensor: tf.Tensor) -> bool:
    return tensor.dtype != tf.bfloat16 and tensor.dtype in CARRIED_AS
