"""How the processes of a job exchange tensors: one interface over Horovod, mpi4py and sockets.

    all_reduce       every process gets the sum            all_gather   every process gets all parts, concatenated
    reduce_scatter   each process gets its part of the sum broadcast    every process gets one process' value
    barrier          waits for all processes

Every process calls the same operations in the same order, inside a graph or outside. Each engine has a file beside this
one, and only that file imports the engine's package.

    send, receive    an array from one process to another  probe        which processes have sent one

Only the two processes concerned call these, outside of graphs. A large message leaves once its receiver sends, receives
or probes, so that two processes which send to each other at once do not deadlock. A process in a collective operation
takes in no messages: if it waits there for the sender, both are ended with an error after the job's timeout.

Synopsis:

    >>> alone = Alone()
    >>> [float(total) for total in alone.all_reduce([tf.constant(2.0)], "example")]
    [2.0]
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from tfdist.errors import ClusterError, DisagreementError, UsageError
from tfdist.groups.exchanged import Exchanged
from tfdist.jobs import process_exit
from tfdist.jobs.heartbeat import Heartbeat, gone

# Engines count with 32 bits. Longer messages travel in pieces; the pieces of all processes have this size together.
GATHERED_BYTES = 1 << 28
# Types that no engine carries travel as other types of the same size, complex numbers as two floats.
CARRIED_AS = {
    tf.bfloat16: tf.uint16,
    tf.uint32: tf.int32,
    tf.uint64: tf.int64,
    tf.complex64: tf.float32,
    tf.complex128: tf.float64,
}


class ProcessGroup:
    """The connection of a process to all processes of its job; this base class is for a process without others.

    Tensors are sent from the memory of the host. One thread at a time uses a process group.

    Tensors of different processes belong together if their exchange has the same name: each exchange of a graph needs a
    different one, which is the same in every process.

    Attributes:
        engine: what carries the tensors: "MPI", "Gloo", "sockets", or "none".
        rank: this process' number, 0 to `size - 1`.
        size: the number of processes.
        dense_below_bytes: sparse gradients (`tf.IndexedSlices`) of tables below this size are sent as the whole table,
            and added up row by row. Sparse ones are concatenated instead: a row that several processes have touched
            occurs several times, as it does on one device, and Keras' adaptive optimizers tell the difference.
    """

    added: ClassVar[tuple[tf.DType, ...]] = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)  # without a cast
    engine: str = "none"
    rank: int = 0
    size: int = 1
    dense_below_bytes: int = 0
    carries_tensors: ClassVar[bool] = True  # not only messages between steps
    in_order: ClassVar[bool] = False  # whether the engine matches exchanges by their order instead of their names

    def all_reduce(self, tensors: Sequence[Any], name: str) -> list[Any]:
        """The sum of each tensor over the processes, in its own dtype; `tf.IndexedSlices` of large tables stay sparse.

        Args:
            tensors: dense tensors have the same shape in all processes.
            name: identifies this exchange.
        """
        return [self._all_reduce_one(tensor, f"{name}.{index}") for index, tensor in enumerate(tensors)]

    def reduce_scatter(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Part `rank` of the sum of `tensor` `[size * n, ...]` over the processes: `[n, ...]`."""
        if tensor.dtype.is_complex:
            return _given_back(self.reduce_scatter(_carried(tensor), name), tensor.dtype)
        if tensor.dtype in self.added:
            return _hidden(self._reduce_scatter, tensor, name)
        return tf.cast(_hidden(self._reduce_scatter, tf.cast(tensor, _wide(tensor.dtype)), name), tensor.dtype)

    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """The tensors `[n_rank, ...]` of all processes, of which `n_rank` may differ, concatenated by rank."""
        dtype = tensor.dtype
        return _given_back(_hidden(self._all_gather, _carried(tensor), name), dtype)

    def numbers_of_all(self, number: tf.Tensor) -> tf.Tensor:
        """The `number` of each process, an int32 scalar, by rank: int32 `[size]`."""
        one = number[tf.newaxis]
        return one if self.size == 1 else self.all_gather(one, "numbers")

    def broadcast(self, tensor: tf.Tensor, name: str, root: int = 0) -> tf.Tensor:
        """The `tensor` of process `root`; all have the same shape and dtype."""
        return _given_back(_hidden(self._broadcast, _carried(tensor), name, root), tensor.dtype)

    def broadcast_bytes(self, values: np.ndarray) -> np.ndarray:
        """The `values`, `[n]` uint8, of process 0; the others call it with as many. Not inside a graph."""
        return self.broadcast(tf.constant(values), "broadcast").numpy()

    def sum_in_place(self, buffer: np.ndarray) -> None:
        """Adds up a contiguous array over the processes, in place; not inside a graph."""
        if self.size > 1:
            buffer[...] = self._sum(tf.constant(buffer), "sum").numpy()

    def barrier(self) -> None:
        """Waits until every process has called this; not inside a graph."""
        self._all_gather(tf.zeros([1], tf.int32), "barrier")

    def exchange(self, message: bytes) -> list[bytes]:
        """The message of each process, by rank; not inside a graph."""
        if self.size == 1:
            return [message]
        lengths = self._all_gather(tf.constant([len(message)], tf.int64), "exchange.lengths").numpy()

        def gather(piece: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
            return np.split(self._all_gather(tf.constant(piece), "exchange").numpy(), np.cumsum(sizes)[:-1])

        return gathered_in_pieces(message, lengths.tolist(), gather)

    def send(self, array: Any, to: int, tag: int = 0) -> None:
        """Sends a tensor, or an array of numbers, to process `to`.

        Returns when `array` may be changed again. Messages with the same tag are received in the order in which they
        were sent.
        """
        self._send(array, self._other("to", to), tag)

    def receive(self, from_: int, tag: int = 0) -> np.ndarray:
        """The next message with `tag` from process `from_`, in the dtype and shape in which it was sent.

        Waits for it as long as a collective operation waits for other processes.
        """
        return self._receive(self._other("from_", from_), tag)

    def probe(self, tag: int = 0) -> list[int]:
        """The ranks of the processes from which a message with `tag` has come and was not received; does not wait."""
        return self._probe(tag)

    def around_branches(self) -> contextlib.AbstractContextManager[None]:
        """The context in which a graph is traced that has exchanges in the branches of a condition, or in a loop.

        All processes must take the same branch, and a later exchange must depend on what the branch computes, or wait
        for it by `note_branches`.
        """
        return contextlib.nullcontext()

    def note_branches(self, result: tf.Tensor) -> None:
        """Later exchanges of the present graph wait for `result`, which a condition or a loop computes."""

    def counts(self) -> tuple[int, int]:
        """How many exchanges this process has begun, and how many have ended; read from any thread."""
        return 0, 0

    def exchanged(self) -> Exchanged:
        """What this process has exchanged so far."""
        return Exchanged(0, 0.0, 0, 0)

    def abort(self, exit_code: int) -> None:
        """Ends the other processes too, if the engine can; called by a process that ends with an error."""

    @property
    def failure(self) -> ClusterError | None:
        """Why the processes are no longer connected; `None` while they are, and of an engine that does not know."""
        return None

    def explained(self, error: Exception, heartbeat: Heartbeat | None, timeout_seconds: float) -> ClusterError | None:
        """The error to raise in place of an `error` of the engine, which says what the other processes did.

        Args:
            error: of TensorFlow, or a `ClusterError`.
            heartbeat: of this process, which knows who is silent; `None` in a job of one process.
            timeout_seconds: how long a process may be silent.

        Returns:
            `None` if `error` is not about other processes, or names them already.
        """
        if self.failure is not None or isinstance(error, ClusterError):
            return self.failure
        mismatch = next((line for line in str(error).splitlines() if "Mismatched" in line), None)
        if mismatch is not None:
            return DisagreementError(
                "The processes of the job disagree on the model, or on the data: " + mismatch.strip(),
                "build the same model, on the same data, in all processes",
            )
        silent = heartbeat.silent() if heartbeat is not None else []
        return gone(heartbeat.world, silent, timeout_seconds) if heartbeat is not None and silent else None

    def give_up(self, error: ClusterError) -> None:
        """Ends the wait of this process for others, of which `error` tells; called from another thread."""
        # Engines wait for silent processes without limit, and their wait cannot be interrupted.
        process_exit.end_process(error, self.abort)

    def excuse(self, excused: Callable[[], bool]) -> None:
        """Has an engine that waits with a limit call `excused`, which returns whether to wait as long again."""

    def close(self) -> None:
        """Leaves the job."""

    def _all_reduce_one(self, tensor: Any, name: str) -> Any:
        if isinstance(tensor, tf.IndexedSlices):
            return self._all_reduce_slices(tensor, name)
        if tensor.dtype.is_complex:
            return _given_back(self._all_reduce_one(_carried(tensor), name), tensor.dtype)
        if tensor.dtype in self.added:
            return _hidden(self._sum, tensor, name)
        if tensor.dtype == tf.bfloat16:
            parts = self.all_gather(tensor[tf.newaxis], name)
            return tf.cast(tf.reduce_sum(tf.cast(parts, tf.float32), 0), tf.bfloat16)
        return tf.cast(_hidden(self._sum, tf.cast(tensor, _wide(tensor.dtype)), name), tensor.dtype)

    def _all_reduce_slices(self, slices: tf.IndexedSlices, name: str) -> tf.IndexedSlices:
        if _dense_bytes(slices) >= self.dense_below_bytes:
            values = self.all_gather(slices.values, f"{name}.values")
            return tf.IndexedSlices(values, self.all_gather(slices.indices, f"{name}.indices"), slices.dense_shape)
        # Rows that no process has touched are left out again: optimizers treat missing rows unlike rows of zeros.
        touched = tf.scatter_nd(
            slices.indices[:, tf.newaxis], tf.ones_like(slices.indices, tf.float32), slices.dense_shape[:1]
        )
        dense, touched = self.all_reduce([tf.convert_to_tensor(slices), touched], name)
        rows = tf.where(touched > 0)[:, 0]
        return tf.IndexedSlices(tf.gather(dense, rows), tf.cast(rows, slices.indices.dtype), slices.dense_shape)

    def _other(self, argument: str, rank: int) -> int:
        if rank == self.rank or not 0 <= rank < self.size:
            others = ", ".join(f"`{other}`" for other in range(self.size) if other != self.rank)
            raise UsageError(
                f"`{argument}` is `{rank}`, and the other processes of this job have the ranks {others}"
                if others
                else f"`{argument}` is `{rank}`, and this job has no other process",
                "use the rank of another process",
            )
        return rank

    def _send(self, array: Any, to: int, tag: int) -> None:
        raise self._no_messages()

    def _receive(self, from_: int, tag: int) -> np.ndarray:
        raise self._no_messages()

    def _probe(self, tag: int) -> list[int]:
        if self.size == 1:
            return []
        raise self._no_messages()

    def _no_messages(self) -> UsageError:
        return UsageError(
            f"`{type(self).__name__}` has collective operations alone, and no messages between two processes",
            'use MPI by mpi4py (`mpi_split`), or sockets (`multiworker` with `communication="sockets"`)',
        )

    def _sum(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return tensor

    def _reduce_scatter(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return tensor

    def _all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return tensor

    def _broadcast(self, tensor: tf.Tensor, name: str, root: int) -> tf.Tensor:
        return tensor


Alone = ProcessGroup


def opaque(tensor: Any) -> tf.Tensor:
    """`tensor`, hidden from TensorFlow's constant folding.

    Folding would run an engine's operation on a constant once, while the graph is optimized, and only in those
    processes where the tensor is a constant: the others would wait for it for ever.
    """
    tensor = tf.convert_to_tensor(tensor)
    if tf.executing_eagerly():
        return tensor
    if tensor.shape.rank == 0:
        return tf.reshape(opaque(tf.reshape(tensor, [1])), [])
    # A slice from row 0, which the graph gets from its caller; a slice of everything is the same memory.
    rank = tf.rank(tensor) if tensor.shape.rank is None else tensor.shape.rank
    hidden = tf.slice(tensor, _zeros()[:rank], tf.fill([rank], -1))
    hidden.set_shape(tensor.shape)
    return hidden


def _hidden(exchange: Callable[..., tf.Tensor], tensor: Any, *arguments: Any) -> tf.Tensor:
    """What `exchange` returns for a tensor of which TensorFlow knows neither values nor lengths when it optimizes."""
    tensor = tf.convert_to_tensor(tensor)
    if tensor.shape.rank == 0:
        return tf.reshape(_hidden(exchange, tensor[tf.newaxis], *arguments), [])
    return exchange(opaque(tensor), *arguments)


def _zeros() -> tf.Tensor:
    # TensorFlow 2.21 copies eager tensors of up to 128 numbers into a graph as constants; larger ones are arguments.
    # It was seen to fold a constant behind `tf.raw_ops.PlaceholderWithDefault`.
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.zeros([256], tf.int32)


def gathered_in_pieces(
    message: bytes, lengths: Sequence[int], gather: Callable[[np.ndarray, Sequence[int]], list[np.ndarray]]
) -> list[bytes]:
    """The message of each process, by rank.

    Args:
        message: of this process.
        lengths: of the messages of all processes, by rank.
        gather: returns the pieces `[n_rank]` uint8 of all processes, given this process' piece and all `n_rank`.
    """
    mine, most = np.frombuffer(message, np.uint8), max(GATHERED_BYTES // len(lengths), 1)
    messages = [bytearray() for _ in lengths]
    for begin in range(0, max(lengths), most):
        sizes = [min(max(length - begin, 0), most) for length in lengths]
        for rank, piece in enumerate(gather(mine[begin : begin + most], sizes)):
            messages[rank] += piece.data
    return [bytes(whole) for whole in messages]


def _dense_bytes(slices: tf.IndexedSlices) -> float:
    shape = tf.get_static_value(slices.dense_shape)
    if shape is None:
        return float("inf")
    return float(shape.prod()) * slices.dtype.size


def _wide(dtype: tf.DType) -> tf.DType:
    """The type in which numbers are added that no engine adds in their own type."""
    return tf.int64 if dtype.is_integer else tf.float32


def _carried(tensor: tf.Tensor) -> tf.Tensor:
    return tf.bitcast(tensor, CARRIED_AS[tensor.dtype]) if tensor.dtype in CARRIED_AS else tensor


def _given_back(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    return tf.bitcast(tensor, dtype) if dtype in CARRIED_AS else tensor
