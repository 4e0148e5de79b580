"""MPI by mpi4py: buffers are sent as they lie in memory, without pickling.

MPI pairs exchanges by their order, so that a graph keeps them in the order in which they were traced.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from tfdist.communicators import Communicator
from tfdist.errors import UsageError

INSTALL = "install `tfdist[mpi]`, and MPI as your system does it: on Debian and Ubuntu `apt-get install openmpi-bin`"


def load() -> Any:
    """The module `mpi4py.MPI`; importing it starts MPI.

    Raises:
        UsageError: mpi4py, or an MPI library, is not installed.
    """
    try:
        from mpi4py import MPI
    except ModuleNotFoundError as error:
        raise UsageError("mpi4py is not installed", INSTALL) from error
    except (ImportError, RuntimeError) as error:
        raise UsageError(f"mpi4py finds no MPI library: {str(error).partition(chr(10))[0]}", INSTALL) from error
    return MPI


class MpiCommunicator(Communicator):
    """The processes of MPI's world.

    Raises:
        UsageError: as `load`.
    """

    engine = "MPI"
    in_order: ClassVar[bool] = True

    def __init__(self) -> None:
        self._mpi = load()
        self._world = self._mpi.COMM_WORLD
        self.rank, self.size = self._world.Get_rank(), self._world.Get_size()
        self._last: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    @property
    def library(self) -> str:
        """The name and version of the MPI library, such as `Open MPI v4.1.4`."""
        return self._mpi.Get_library_version().partition(",")[0].partition("\n")[0]

    def sum_in_place(self, buffer: np.ndarray) -> None:
        """Adds up a contiguous array over the processes, in place."""
        self._world.Allreduce(self._mpi.IN_PLACE, buffer, op=self._mpi.SUM)

    def sum_on(self, value: float, root: int = 0) -> float | None:
        """The sum of `value` over the processes, on process `root`; `None` elsewhere."""
        return self._world.reduce(value, op=self._mpi.SUM, root=root)

    def broadcast_in_place(self, buffer: np.ndarray, root: int = 0) -> None:
        """Fills a contiguous array with that of process `root`."""
        self._world.Bcast(buffer, root=root)

    def abort(self, exit_code: int) -> None:
        if self.size > 1:
            print(f"rank {self.rank} ends the job with exit code {exit_code}", file=sys.stderr, flush=True)
            self._world.Abort(exit_code)

    def barrier(self) -> None:
        self._world.Barrier()

    def _sum(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        def add(values: np.ndarray) -> np.ndarray:
            total = np.ascontiguousarray(values).astype(np.float32 if values.dtype == np.float16 else values.dtype)
            self.sum_in_place(total)
            return total.astype(values.dtype, copy=False)

        return self._call(add, tensor, tensor.shape)

    def _reduce_scatter(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        def add_part(values: np.ndarray) -> np.ndarray:
            part = np.empty((len(values) // self.size, *values.shape[1:]), values.dtype)
            self._world.Reduce_scatter_block(np.ascontiguousarray(values), part, op=self._mpi.SUM)
            return part

        return self._call(add_part, tensor, [tensor.shape[0] // self.size, *tensor.shape[1:]])

    def _all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        def join(values: np.ndarray) -> np.ndarray:
            lengths = np.empty(self.size, np.int64)
            self._world.Allgather(np.array([len(values)], np.int64), lengths)
            joined = np.empty((lengths.sum(), *values.shape[1:]), values.dtype)
            row_bytes = values.dtype.itemsize * int(np.prod(values.shape[1:]))
            counts = lengths * row_bytes
            self._world.Allgatherv(
                [
                    np.ascontiguousarray(values).view(np.uint8).reshape(-1) if values.size else np.empty(0, np.uint8),
                    self._mpi.BYTE,
                ],
                [
                    joined.view(np.uint8).reshape(-1) if joined.size else np.empty(0, np.uint8),
                    counts,
                    counts.cumsum() - counts,
                    self._mpi.BYTE,
                ],
            )
            return joined

        return self._call(join, tensor, [None, *tensor.shape[1:]])

    def _broadcast(self, tensor: tf.Tensor, name: str, root: int) -> tf.Tensor:
        def fill(values: np.ndarray) -> np.ndarray:
            values = np.array(values, order="C")
            self.broadcast_in_place(values.view(np.uint8).reshape(-1) if values.ndim else values, root)
            return values

        return self._call(fill, tensor, tensor.shape)

    def _call(self, function: Callable[[np.ndarray], np.ndarray], tensor: tf.Tensor, shape: Any) -> tf.Tensor:
        if tf.executing_eagerly():
            return tf.convert_to_tensor(function(tensor.numpy()))
        with tf.device("CPU:0"), self._after_the_last() as note:
            result = tf.numpy_function(function, [tensor], tensor.dtype)
            note(result.op)
        result.set_shape(shape)
        return result

    @contextlib.contextmanager
    def _after_the_last(self) -> Iterator[Callable[[Any], None]]:
        graph = tf.compat.v1.get_default_graph()
        before = self._last.get(graph)
        with tf.control_dependencies([] if before is None else [before]):
            yield lambda operation: self._last.__setitem__(graph, operation)
