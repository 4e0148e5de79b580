"""Horovod's API for Keras 3: to port a script, change its imports.

    import tfdist.horovod as hvd  # was: import horovod.tensorflow.keras as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01 * hvd.size()))
    model.compile(optimizer, ...)
    model.fit(..., callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()])

`DistributedOptimizer`, `DistributedGradientTape`, `load_model`, `broadcast_variables`, the four collectives for values
and the `callbacks` are written for Keras 3. `init` also joins a job that TF_CONFIG or Slurm describes, and refuses the
`mpirun` of a different MPI library. All other names (`rank`, `local_rank`, `Average`, `Compression`, ...) come from
`horovod.tensorflow`, which is imported when one of them is first used.
"""

from __future__ import annotations

import contextlib
from typing import Any

from tfdist.groups import horovod as engine
from tfdist.horovod import callbacks, job
from tfdist.horovod.collectives import (
    allgather,
    allreduce,
    broadcast,
    broadcast_,
    broadcast_global_variables,
    broadcast_variables,
    reducescatter,
)
from tfdist.horovod.normalization import SyncBatchNormalization
from tfdist.horovod.optimizer import DistributedOptimizer, load_model
from tfdist.horovod.tape import DistributedGradientTape, PartialDistributedGradientTape
from tfdist.jobs import rendezvous
from tfdist.jobs.heartbeat import Limits, checked_callback_timeout
from tfdist.jobs.world import World
from tfdist.options import checked_seconds

# One of these is set if `horovodrun`, `mpirun` or `srun --mpi` passes the rank of this process to Horovod itself.
KNOWN_TO_HOROVOD = {engine.RANK, "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"}

__all__ = [
    "DistributedGradientTape",
    "DistributedOptimizer",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_variables",
    "callbacks",
    "init",
    "load_model",
    "reducescatter",
    "shutdown",
]


def init(
    comm: Any = None,
    process_sets: Any = None,
    *,
    timeout_seconds: float = 20.0,
    callback_timeout_seconds: float | None = None,
) -> None:
    """Joins the job, as `horovod.tensorflow.init` does.

    The job is joined over Gloo if `tfdist.launch`, TF_CONFIG or Slurm describes it and Horovod's own environment
    variables are not set.

    Args:
        comm: see `horovod.tensorflow.init`.
        process_sets: see `horovod.tensorflow.init`.
        timeout_seconds: how long processes may wait for different operations, and how long a process may be silent,
            until the job ends with an error that names them.
        callback_timeout_seconds: how long a process may be busy, for example in a callback, while others wait for it;
            `None` means without limit.

    Raises:
        UsageError: Horovod is not installed, its MPI library differs from that of the `mpirun` that started this
            process, other hosts cannot reach this one over Gloo, or a timeout is not a positive number.
        ClusterError: a process is missing.
    """
    busy_seconds = checked_callback_timeout(callback_timeout_seconds)
    limits = Limits(checked_seconds("timeout_seconds", timeout_seconds), busy_seconds)
    horovod = engine.load()
    world = World.detect()
    world.require_training("tfdist.horovod")
    meeting: contextlib.AbstractContextManager[dict[str, str]] = contextlib.nullcontext({})
    if comm is None and world.tasks and not KNOWN_TO_HOROVOD & engine.set_by_others():
        start_seconds = rendezvous.start_timeout_seconds(None)
        meeting = engine.meeting_over_gloo(world, {"script of": __name__}, limits.seconds, start_seconds)
    else:
        engine.require_reachable(world)
    with meeting as variables:
        engine.set_unless_set(variables)
        horovod.init(comm, process_sets)
    # Gloo reads the same variables as `World`; with `comm`, some processes may not take part.
    if comm is None and horovod.mpi_enabled():
        world.require_size(horovod.size(), "Horovod's MPI")
    if (world.rank, world.world_size) != (horovod.rank(), horovod.size()):
        places = (horovod.rank(), horovod.size(), horovod.local_rank(), horovod.local_size())
        world = World(*places, source="hvd.init")
    job.begin(world, limits)


def shutdown() -> None:
    """Leaves the job, as `horovod.tensorflow.shutdown` does."""
    job.end()
    engine.load().shutdown()


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module `{__name__}` has no attribute `{name}`")
    return getattr(engine.load(), name)
