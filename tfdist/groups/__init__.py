"""How the processes of a job exchange tensors: one interface over Horovod, mpi4py and sockets.

    all_reduce       every process gets the sum             all_gather   every process gets all parts, concatenated
    reduce_scatter   each process gets its part of the sum  broadcast    every process gets the tensor of one process
    barrier          waits for all processes

Every process calls the same operations in the same order, inside a graph or outside. Each engine has a file in this
folder, and only that file imports the engine's package.

    send, receive    an array from one process to another   probe        which processes have sent one

Only the two processes concerned call these, outside of graphs. A large message leaves once its receiver sends, receives
or probes, so that two processes which send to each other at the same time do not deadlock. A process in a collective
operation takes in no messages: if it waits there for the sender, both end with an error after the job's timeout.

Synopsis:

    >>> alone = Alone()
    >>> [float(total) for total in alone.all_reduce([tf.constant(2.0)], "example")]
    [2.0]
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from tfdist.errors import ClusterError, DisagreementError, UsageError
from tfdist.jobs import process_exit
from tfdist.jobs.connections import gone
from tfdist.jobs.heartbeat import Heartbeat

# Engines count with 32 bits. Longer messages are sent in pieces; the pieces of all processes have this size in total.
GATHERED_BYTES = 1 << 28
# Dtypes that no engine supports are sent as other dtypes of the same size, complex numbers as two floats.
CARRIED_AS = {
    tf.bfloat16: tf.uint16,
    tf.uint32: tf.int32,
    tf.uint64: tf.int64,
    tf.complex64: tf.float32,
    tf.complex128: tf.float64,
}


@dataclass(frozen=True)
class ExchangeTotals:
    """The exchanges of one process so far, or of several processes in an interval.

    An engine may send more bytes than these, such as headers, or fewer, if two processes share memory.

    Attributes:
        exchanges: the number of collective operations, and of messages that were sent or received.
        exchange_seconds: their time, including waiting for others; simultaneous exchanges count separately.
        sent_bytes: the size of the values that were passed to exchanges.
        received_bytes: the size of the values that exchanges returned.
    """

    exchanges: int
    exchange_seconds: float
    sent_bytes: int
    received_bytes: int

    def since(self, before: ExchangeTotals) -> ExchangeTotals:
        """The exchanges after `before`."""
        return ExchangeTotals(
            self.exchanges - before.exchanges,
            self.exchange_seconds - before.exchange_seconds,
            self.sent_bytes - before.sent_bytes,
            self.received_bytes - before.received_bytes,
        )


class CollectiveCounter:
    """Counts collectives inside graphs and outside.

    The counts are one vector, so that a collective needs only two small additional operations: the numbers of
    collectives that have begun and ended, their seconds, and the bytes sent and received.
    """

    def __init__(self) -> None:
        with tf.device("CPU:0"):
            self._counts = tf.Variable(tf.zeros([5], tf.float64), trainable=False)

    def counts(self) -> tuple[int, int]:
        """How many collectives have begun, and how many have ended."""
        begun, ended, *_ = self._counts.numpy()
        return int(begun), int(ended)

    def exchanged(self) -> ExchangeTotals:
        """The exchanges so far; to be called while no collective is running."""
        _, ended, seconds, sent, received = self._counts.numpy().tolist()
        return ExchangeTotals(int(ended), seconds, int(sent), int(received))

    def around(self, make: Callable[[], tf.Tensor], inputs: Sequence[tf.Tensor]) -> tf.Tensor:
        """Counts the collective that `make` adds to the graph, or runs eagerly; returns its result.

        It counts as begun once `inputs` are computed, so that computing them does not count as waiting.
        """
        with tf.control_dependencies(inputs):
            began = self._now()
            begun = self._add([1, 0, 0, sum(map(_size_bytes, inputs)), 0])
        with tf.control_dependencies([begun, began]):
            result = make()
        # This counts when the graph runs. It also keeps a collective whose result this process does not use, if only
        # another process prints it: TensorFlow would prune it here, and the other process would wait forever.
        received = tf.raw_ops.Size(input=result, out_type=tf.int64) * result.dtype.size
        with tf.control_dependencies([result]):
            self._add([0, 1, self._now() - began, 0, received])
        return result

    def _now(self) -> tf.Tensor:
        with tf.device(self._counts.device):
            return tf.timestamp()

    def _add(self, counts: Sequence[Any]) -> Any:
        # On the variable's device, not that of the collective. The raw operation, because replicas synchronize what a
        # step assigns by the method.
        with tf.device(self._counts.device):
            if any(map(tf.is_tensor, counts)):
                value = tf.stack([tf.cast(count, tf.float64) for count in counts])
            else:
                value = tf.constant(counts, tf.float64)
            return tf.raw_ops.AssignAddVariableOp(resource=self._counts.handle, value=value)


class ProcessGroup:
    """The connection of a process to all processes of its job; this base class is for a job of one process.

    Tensors are sent from the memory of the host. Only one thread at a time uses a process group.

    Tensors of different processes belong together if their exchange has the same name: each exchange of a graph needs a
    different name, which is the same in every process.

    Attributes:
        engine: what exchanges the tensors: "MPI", "Gloo", "sockets", or "none".
        rank: the rank of this process, 0 to `size - 1`.
        size: the number of processes.
        dense_below_bytes: sparse gradients (`tf.IndexedSlices`) of tables below this size are sent as the whole table,
            and added row by row. Larger ones are concatenated: a row that several processes have touched occurs several
            times, as on one device, and Keras' adaptive optimizers notice the difference.
    """

    summed_dtypes: ClassVar[tuple[tf.DType, ...]] = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
    engine: str = "none"
    rank: int = 0
    size: int = 1
    dense_below_bytes: int = 0
    carries_tensors: ClassVar[bool] = True  # not only messages between steps

    def all_reduce(self, tensors: Sequence[Any], name: str) -> list[Any]:
        """The sum of each tensor over the processes, in its dtype; `tf.IndexedSlices` of large tables stay sparse.

        Args:
            tensors: dense tensors have the same shape in all processes.
            name: the name of this exchange.
        """
        return [self._all_reduce_tensor(tensor, f"{name}.{index}") for index, tensor in enumerate(tensors)]

    def reduce_scatter(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Part `rank` of the sum of `tensor` `[size * n, ...]` over the processes: `[n, ...]`."""
        if tensor.dtype.is_complex:
            return _uncarried(self.reduce_scatter(_carried(tensor), name), tensor.dtype)
        if tensor.dtype in self.summed_dtypes:
            return _exchange_opaque(self._reduce_scatter, tensor, name)
        return tf.cast(_exchange_opaque(self._reduce_scatter, tf.cast(tensor, _wide(tensor.dtype)), name), tensor.dtype)

    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """The tensors `[n_rank, ...]` of all processes, concatenated by rank; `n_rank` may differ between them."""
        dtype = tensor.dtype
        return _uncarried(_exchange_opaque(self._all_gather, _carried(tensor), name), dtype)

    def numbers_of_all(self, number: tf.Tensor) -> tf.Tensor:
        """The `number` of each process, an int32 scalar, by rank: int32 `[size]`."""
        own = number[tf.newaxis]
        return own if self.size == 1 else self.all_gather(own, "numbers")

    def broadcast(self, tensor: tf.Tensor, name: str, root: int = 0) -> tf.Tensor:
        """The `tensor` of process `root`; all have the same shape and dtype."""
        return _uncarried(_exchange_opaque(self._broadcast, _carried(tensor), name, root), tensor.dtype)

    def broadcast_bytes(self, values: np.ndarray) -> np.ndarray:
        """The `values`, `[n]` uint8, of process 0; the others pass an array of the same length. Not inside a graph."""
        return self.broadcast(tf.constant(values), "broadcast").numpy()

    def sum_in_place(self, buffer: np.ndarray) -> None:
        """Sums a contiguous array over the processes, in place; not inside a graph."""
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
        self._check_rank("to", to)
        raise self._no_messages()

    def receive(self, from_: int, tag: int = 0) -> np.ndarray:
        """The next message with `tag` from process `from_`, in the dtype and shape in which it was sent.

        Waits for it as long as a collective operation waits for other processes.
        """
        self._check_rank("from_", from_)
        raise self._no_messages()

    def probe(self, tag: int = 0) -> list[int]:
        """The ranks from which a message with `tag` has arrived that was not received yet; does not wait."""
        if self.size == 1:
            return []
        raise self._no_messages()

    def around_branches(self) -> contextlib.AbstractContextManager[None]:
        """The context for tracing a graph that has exchanges in the branches of a condition, or in a loop.

        All processes must take the same branch, and a later exchange must depend on what the branch computes, or wait
        for it by `note_branches`.
        """
        return contextlib.nullcontext()

    def note_branches(self, result: tf.Tensor) -> None:
        """Makes later exchanges of the current graph wait for `result`, which a condition or a loop computes."""

    def counts(self) -> tuple[int, int]:
        """How many exchanges this process has begun, and how many have ended; read from any thread."""
        return 0, 0

    def exchanged(self) -> ExchangeTotals:
        """The exchanges of this process so far."""
        return ExchangeTotals(0, 0.0, 0, 0)

    def abort(self, exit_code: int) -> None:
        """Ends the other processes too, if the engine can; called in a process that ends with an error."""

    @property
    def failure(self) -> ClusterError | None:
        """Why the processes are no longer connected; `None` while they are, and if the engine does not know."""
        return None

    def explained(self, error: Exception, heartbeat: Heartbeat | None, timeout_seconds: float) -> ClusterError | None:
        """The error to raise in place of an `error` of the engine: it names the processes concerned.

        Args:
            error: an error of TensorFlow, or a `ClusterError`.
            heartbeat: the heartbeat of this process, which knows silent processes; `None` in a job of one process.
            timeout_seconds: how long a process may be silent.

        Returns:
            `None` if `error` does not concern other processes, or names them already.
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
        """Ends the wait of this process for others with `error`; called from another thread."""
        # Engines wait for silent processes without limit, and their wait cannot be interrupted.
        process_exit.end_process(error, self.abort)

    def excuse(self, excused: Callable[[], bool]) -> None:
        """Sets the function that an engine with a time limit calls at its end; it returns whether to wait again."""

    def close(self) -> None:
        """Leaves the job."""

    def _all_reduce_tensor(self, tensor: Any, name: str) -> Any:
        if isinstance(tensor, tf.IndexedSlices):
            return self._all_reduce_slices(tensor, name)
        if tensor.dtype.is_complex:
            return _uncarried(self._all_reduce_tensor(_carried(tensor), name), tensor.dtype)
        if tensor.dtype in self.summed_dtypes:
            return _exchange_opaque(self._sum, tensor, name)
        if tensor.dtype == tf.bfloat16:
            parts = self.all_gather(tensor[tf.newaxis], name)
            return tf.cast(tf.reduce_sum(tf.cast(parts, tf.float32), 0), tf.bfloat16)
        return tf.cast(_exchange_opaque(self._sum, tf.cast(tensor, _wide(tensor.dtype)), name), tensor.dtype)

    def _all_reduce_slices(self, slices: tf.IndexedSlices, name: str) -> tf.IndexedSlices:
        if _dense_bytes(slices) >= self.dense_below_bytes:
            values = self.all_gather(slices.values, f"{name}.values")
            return tf.IndexedSlices(values, self.all_gather(slices.indices, f"{name}.indices"), slices.dense_shape)
        # Rows that no process has touched are left out again, since optimizers do not skip rows of zeros.
        touched = tf.scatter_nd(
            slices.indices[:, tf.newaxis], tf.ones_like(slices.indices, tf.float32), slices.dense_shape[:1]
        )
        dense, touched = self.all_reduce([tf.convert_to_tensor(slices), touched], name)
        rows = tf.where(touched > 0)[:, 0]
        return tf.IndexedSlices(tf.gather(dense, rows), tf.cast(rows, slices.indices.dtype), slices.dense_shape)

    def _check_rank(self, argument: str, rank: int) -> None:
        """Requires that `rank` is the rank of another process."""
        if rank == self.rank or not 0 <= rank < self.size:
            others = ", ".join(f"`{other}`" for other in range(self.size) if other != self.rank)
            raise UsageError(
                f"`{argument}` is `{rank}`, and the other processes of this job have the ranks {others}"
                if others
                else f"`{argument}` is `{rank}`, and this job has no other process",
                "use the rank of another process",
            )

    def _no_messages(self) -> UsageError:
        return UsageError(
            f"`{type(self).__name__}` has only collective operations, and no messages between two processes",
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

    Folding would run an engine's operation on a constant once, while the graph is optimized, and only in the processes
    where the tensor is a constant: the others would wait forever.
    """
    tensor = tf.convert_to_tensor(tensor)
    if tf.executing_eagerly():
        return tensor
    if tensor.shape.rank == 0:
        return tf.reshape(opaque(tf.reshape(tensor, [1])), [])
    # A slice from row 0, where the graph does not know this 0; a slice of everything shares the memory of the tensor.
    rank = tf.rank(tensor) if tensor.shape.rank is None else tensor.shape.rank
    hidden = tf.slice(tensor, _zeros()[:rank], tf.fill([rank], -1))
    hidden.set_shape(tensor.shape)
    return hidden


def _exchange_opaque(exchange: Callable[..., tf.Tensor], tensor: Any, *arguments: Any) -> tf.Tensor:
    """The result of `exchange` for a tensor whose values and lengths TensorFlow does not know when it optimizes."""
    tensor = tf.convert_to_tensor(tensor)
    if tensor.shape.rank == 0:
        return tf.reshape(_exchange_opaque(exchange, tensor[tf.newaxis], *arguments), [])
    return exchange(opaque(tensor), *arguments)


def _zeros() -> tf.Tensor:
    # TensorFlow 2.21 copies eager tensors of up to 128 numbers into a graph as constants; larger ones are arguments.
    # It also folds a constant behind `tf.raw_ops.PlaceholderWithDefault`.
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.zeros([256], tf.int32)


def gathered_in_pieces(
    message: bytes, lengths: Sequence[int], gather: Callable[[np.ndarray, Sequence[int]], list[np.ndarray]]
) -> list[bytes]:
    """The message of each process, by rank.

    Args:
        message: the message of this process.
        lengths: the lengths of the messages of all processes, by rank.
        gather: returns the pieces `[n_rank]` uint8 of all processes, for this process's piece and all `n_rank`.
    """
    own, most = np.frombuffer(message, np.uint8), max(GATHERED_BYTES // len(lengths), 1)
    messages = [bytearray() for _ in lengths]
    for begin in range(0, max(lengths), most):
        sizes = [min(max(length - begin, 0), most) for length in lengths]
        for rank, piece in enumerate(gather(own[begin : begin + most], sizes)):
            messages[rank] += piece.data
    return [bytes(whole) for whole in messages]


def broadcast_by_sum(values: np.ndarray, is_root: bool, sum_words: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """The `values`, `[n]` uint8, of one process, as a sum with the zeros of the others.

    Collectives do not sum bytes, so `sum_words` sums four of them as an int32, which is exact.
    """
    own = values if is_root else np.zeros_like(values)
    words = np.append(own, np.zeros(-len(values) % 4, np.uint8)).view(np.int32)
    return sum_words(words).view(np.uint8)[: len(values)]


def _dense_bytes(slices: tf.IndexedSlices) -> float:
    shape = tf.get_static_value(slices.dense_shape)
    if shape is None:
        return float("inf")
    return float(shape.prod()) * slices.dtype.size


def _wide(dtype: tf.DType) -> tf.DType:
    """The dtype for sums of numbers that no engine sums in their own dtype."""
    return tf.int64 if dtype.is_integer else tf.float32


def _carried(tensor: tf.Tensor) -> tf.Tensor:
    return tf.bitcast(tensor, CARRIED_AS[tensor.dtype]) if tensor.dtype in CARRIED_AS else tensor


def _uncarried(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    return tf.bitcast(tensor, dtype) if dtype in CARRIED_AS else tensor


def _size_bytes(tensor: tf.Tensor) -> Any:
    count = tensor.shape.num_elements()
    return tf.size(tensor, tf.int64) * tensor.dtype.size if count is None else count * tensor.dtype.size
