"""The engines that a strategy of several processes can choose among to carry its arrays."""

from __future__ import annotations

import functools

from tfdist.data_parallel import socket_job
from tfdist.groups import Communicator
from tfdist.groups.mpi import MpiCommunicator
from tfdist.jobs import process_exit
from tfdist.jobs.world import World
from tfdist.strategies import horovod

NAMES = ("auto", "sockets", "mpi", "horovod")


def join(engine: str, world: World, name: str, timeout_seconds: float, start_timeout_seconds: float) -> Communicator:
    """Joins the job of the strategy `name`, which a process can do once for each engine.

    Args:
        engine: one of `NAMES`; "auto" is MPI in processes without addresses, which `mpirun` has started, else sockets.
        world: the job, and which of its processes this one is.
        name: of the strategy.
        timeout_seconds: how long a process may be silent.
        start_timeout_seconds: how long the start waits for all processes.

    Raises:
        UsageError: the engine is not installed, or cannot connect these processes.
        ClusterError: a process is missing, or has other settings.
    """
    if engine == "horovod":
        return horovod.join(world, timeout_seconds, start_timeout_seconds, None)
    if world.world_size == 1 and engine == "auto":
        return Communicator()
    if engine == "mpi" or (engine == "auto" and not world.tasks):
        return join_mpi()
    return socket_job.join(world, name, timeout_seconds, start_timeout_seconds)


@functools.cache
def join_mpi() -> MpiCommunicator:
    """Joins MPI's world, which a process can do once."""
    communicator = MpiCommunicator()
    # The other processes would wait in MPI for ever for a process that has failed.
    process_exit.at_failure(communicator.abort)
    return communicator
