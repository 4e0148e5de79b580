"""MPI through mpi4py: buffers are sent from memory as they are, without pickling."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import extras
from tfdist.errors import UsageError
from tfdist.groups.arrays import ArrayGroup
from tfdist.groups.sockets import messages

INSTALL_MPI = "install MPI as your system does it: on Debian and Ubuntu `apt-get install openmpi-bin`"
MOST_ELEMENTS = 1 << 28
HEADER, VALUES = range(2)  # MPI's tags for the parts of a message, whose own tag is in its header


def yield_when_idle() -> None:
    """Lets a process that waits in Open MPI yield its core to threads that compute; call it before MPI starts.

    Otherwise MPI polls without a pause: in a process with few cores, the thread that exchanges gradients takes time
    from the threads that compute the next ones. A setting in the environment takes precedence.
    Source: Open MPI's FAQ on running jobs, "Can I oversubscribe nodes (run more processes than processors)?"
    """
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")


def load() -> Any:
    """The module `mpi4py.MPI`; importing it starts MPI.

    Raises:
        UsageError: mpi4py, or an MPI library, is not installed.
    """
    yield_when_idle()
    try:
        from mpi4py import MPI
    except ModuleNotFoundError as error:
        hint = f"run `{extras.command('mpi')}`, and {INSTALL_MPI}"
        raise UsageError("mpi4py is not installed", hint) from error
    except (ImportError, RuntimeError) as error:
        raise UsageError(f"mpi4py finds no MPI library: {str(error).partition(chr(10))[0]}", INSTALL_MPI) from error
    return MPI


class MpiGroup(ArrayGroup):
    """The processes of MPI's world.

    Raises:
        UsageError: as `load`.
    """

    engine = "MPI"

    def __init__(self) -> None:
        super().__init__()
        self._mpi = load()
        self._world = self._mpi.COMM_WORLD
        self.rank, self.size = self._world.Get_rank(), self._world.Get_size()
        self._messages = self._world.Dup()  # a communicator for messages, separate from those of the user's code

    @property
    def library(self) -> str:
        """The name and version of the MPI library, such as `Open MPI v4.1.4`."""
        return self._mpi.Get_library_version().partition(",")[0].partition("\n")[0]

    def sum_in_place(self, buffer: np.ndarray) -> None:
        with self.counted(buffer.nbytes) as received:
            received(buffer.nbytes)
            for piece in _pieces(buffer):
                self._world.Allreduce(self._mpi.IN_PLACE, piece, op=self._mpi.SUM)

    def broadcast_in_place(self, buffer: np.ndarray, root: int = 0) -> None:
        """Fills a contiguous array with the values of process `root`."""
        with self.counted(buffer.nbytes) as received:
            received(buffer.nbytes)
            for piece in _pieces(buffer):
                self._world.Bcast(piece, root=root)

    def broadcast_bytes(self, values: np.ndarray) -> np.ndarray:
        filled = values.copy()
        self.broadcast_in_place(filled)
        return filled

    def abort(self, exit_code: int) -> None:
        if self.size > 1:
            print(f"rank {self.rank} ends the job with exit code {exit_code}", file=sys.stderr, flush=True)
            self._world.Abort(exit_code)

    def barrier(self) -> None:
        with self.counted():
            self._world.Barrier()

    def _post(self, values: np.ndarray, to: int, tag: int) -> None:
        parts = [(messages.header(values, tag), HEADER), *((piece, VALUES) for piece in _pieces(_bytes(values)))]
        requests = [self._messages.Isend(part, to, kind) for part, kind in parts]
        while not self._mpi.Request.Testall(requests):
            if not self._take_in_one():
                os.sched_yield()

    def _await_message(self, rank: int, tag: int) -> None:
        status = self._mpi.Status()
        while not self.mailbox.has(rank, tag):
            self._read(self._messages.Mprobe(tag=HEADER, status=status), status)

    def _take_in(self) -> None:
        while self._take_in_one():
            pass

    def _take_in_one(self) -> bool:
        status = self._mpi.Status()
        message = self._messages.Improbe(tag=HEADER, status=status)
        if message is None:
            return False
        self._read(message, status)
        return True

    def _read(self, message: Any, status: Any) -> None:
        """Receives a message whose header has arrived, and puts it into the mailbox."""
        header = np.empty(messages.HEADER_NUMBERS, np.int64)
        message.Recv(header)
        tag, values = messages.space_for(header)
        source = status.Get_source()
        requests = [self._messages.Irecv(piece, source, VALUES) for piece in _pieces(_bytes(values))]
        self._mpi.Request.Waitall(requests)
        self.mailbox.put(source, tag, values)

    def _sum(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        def add(values: np.ndarray) -> np.ndarray:
            total = np.array(values, np.float32 if values.dtype == np.float16 else values.dtype, order="C")
            self.sum_in_place(total)
            return total.astype(values.dtype, copy=False)

        return self._call(add, tensor, tensor.shape)

    def _reduce_scatter(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        def add_part(values: np.ndarray) -> np.ndarray:
            count, dtype = len(values) // self.size, values.dtype
            whole = np.asarray(values[: count * self.size], np.float32 if dtype == np.float16 else dtype, order="C")
            part = np.empty((count, *values.shape[1:]), whole.dtype)
            self._world.Reduce_scatter_block(whole, part, op=self._mpi.SUM)
            return part.astype(dtype, copy=False)

        return self._call(add_part, tensor, [tensor.shape[0] // self.size, *tensor.shape[1:]])

    def _all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        def join(values: np.ndarray) -> np.ndarray:
            lengths = np.empty(self.size, np.int64)
            self._world.Allgather(np.array([len(values)], np.int64), lengths)
            joined = np.empty((lengths.sum(), *values.shape[1:]), values.dtype)
            counts = lengths * values.dtype.itemsize * int(np.prod(values.shape[1:]))
            received = [_bytes(joined), counts, counts.cumsum() - counts, self._mpi.BYTE]
            self._world.Allgatherv([_bytes(values), self._mpi.BYTE], received)
            return joined

        return self._call(join, tensor, [None, *tensor.shape[1:]])

    def _broadcast(self, tensor: tf.Tensor, name: str, root: int) -> tf.Tensor:
        def fill(values: np.ndarray) -> np.ndarray:
            values = np.array(values, order="C")  # a copy, since it is written to
            self.broadcast_in_place(_bytes(values), root)
            return values

        return self._call(fill, tensor, tensor.shape)


def _pieces(buffer: np.ndarray) -> Iterator[np.ndarray]:
    """Splits a contiguous array into pieces short enough for MPI, which counts elements with 32 bits."""
    flat = buffer.reshape(-1)
    for begin in range(0, max(flat.size, 1), MOST_ELEMENTS):
        yield flat[begin : begin + MOST_ELEMENTS]


def _bytes(values: np.ndarray) -> np.ndarray:
    """The memory of an array, as an array `[n]` of bytes."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)
