"""Horovod's operations, over MPI or Gloo; works with Horovod 0.28.1 as scripts/install_horovod.sh builds it.

Horovod matches tensors by the names of their operations, in any order. Source: horovod/tensorflow/mpi_ops.py.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.errors import ClusterError, UsageError
from tfdist.groups import ExchangeTotals, ProcessGroup, mpi
from tfdist.groups.collective_counter import CollectiveCounter

INSTALL = "run `make horovod`, or scripts/install_horovod.sh with the folder of the virtual environment"


def load() -> Any:
    """The module `horovod.tensorflow`.

    Raises:
        UsageError: Horovod is not installed, or was built for another TensorFlow.
    """
    mpi.yield_when_idle()
    try:
        return importlib.import_module("horovod.tensorflow")
    except ModuleNotFoundError as error:
        raise UsageError("Horovod is not installed", INSTALL) from error
    except Exception as error:  # loading its library raises errors of many types
        raise UsageError(
            f"Horovod's library cannot be loaded with TensorFlow {importlib.metadata.version('tensorflow')}: "
            f"{str(error).partition(chr(10))[0]}",
            f"it was built for another TensorFlow or MPI; {INSTALL}",
        ) from error


class HorovodGroup(ProcessGroup):
    """Connects the processes that Horovod's environment variables describe.

    Raises:
        UsageError: as `load`.
        ClusterError: Horovod cannot start.
    """

    def __init__(self) -> None:
        self._hvd = load()
        try:
            self._hvd.init()
        except Exception as error:
            raise ClusterError(
                f"Horovod cannot start: {str(error).partition(chr(10))[0]}",
                "see that all processes run, and that HOROVOD_GLOO_IFACE names a network interface of this machine",
            ) from error
        self.rank, self.size = self._hvd.rank(), self._hvd.size()
        self.engine = "MPI" if self._hvd.mpi_enabled() else "Gloo"
        # Without NCCL its operations have no kernel for GPUs, and tensors are copied to the host and back.
        self._device = contextlib.nullcontext if self._hvd.nccl_built() else functools.partial(tf.device, "CPU:0")
        self._counter = CollectiveCounter()

    def close(self) -> None:
        self._hvd.shutdown()

    def counts(self) -> tuple[int, int]:
        return self._counter.counts()

    def exchanged(self) -> ExchangeTotals:
        return self._counter.exchanged()

    def _sum(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return self._run(self._hvd.allreduce, tensor, name, op=self._hvd.Sum)

    def _reduce_scatter(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        part = self._run(self._hvd.reducescatter, tensor, name, op=self._hvd.Sum)
        return tf.ensure_shape(part, [tensor.shape[0] // self.size, *tensor.shape[1:]])

    def _all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return self._run(self._hvd.allgather, tensor, name)

    def _broadcast(self, tensor: tf.Tensor, name: str, root: int) -> tf.Tensor:
        return self._run(self._hvd.broadcast, tensor, name, root_rank=root)

    def _run(self, operation: Callable[..., Any], tensor: tf.Tensor, name: str, **options: Any) -> tf.Tensor:
        # Horovod caches what it knows of a name. A reduce-scatter with the name of another operation in another graph
        # ended the process without a message (Horovod 0.28.1, over Gloo).
        unique = f"tfdist.{name}.{operation.__name__}"
        with self._device():
            return self._counter.around(
                lambda: operation(tensor, name=unique, ignore_name_scope=True, **options), [tensor]
            )
