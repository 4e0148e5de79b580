"""How a process joins its job, by each of the engines that exchange tensors."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import warnings
from pathlib import Path

from tfdist.errors import ClusterError, UsageError
from tfdist.groups import ProcessGroup, horovod
from tfdist.groups.mpi import MpiGroup
from tfdist.groups.socket_group import SocketGroup
from tfdist.groups.tensorflow import JoinedJob, SocketsOverTensorFlow
from tfdist.jobs import process_exit, rendezvous
from tfdist.jobs.world import World

SECONDS_TO_CONNECT = 10.0
# The interval at which Horovod looks for new tensors. Its default, 1 ms, is a noticeable part of a small step. At each
# look, every other process sends a message to rank 0.
SHORTEST_CYCLE_MS, LONGEST_CYCLE_MS = 0.1, 1.0
CYCLE_MS_PER_PROCESS = 0.05
# Gloo waits longer than the heartbeat for a silent process, whose error names the process.
SECONDS_TO_NAME = 10
NAMES = ("auto", "sockets", "mpi", "horovod")


def join(engine: str, world: World, name: str, timeout_seconds: float, start_timeout_seconds: float) -> ProcessGroup:
    """Joins the job of a strategy, which a process can do once for each engine.

    Args:
        engine: one of `NAMES`; "auto" is MPI in processes without addresses, which `mpirun` has started, else sockets.
        world: the job, and the rank of this process.
        name: the name of the strategy.
        timeout_seconds: how long a process may be silent.
        start_timeout_seconds: how long the start waits for all processes.

    Raises:
        UsageError: the engine is not installed, or cannot connect these processes.
        ClusterError: a process is missing, or has other settings.
    """
    if engine == "horovod":
        return join_horovod(world, timeout_seconds, start_timeout_seconds, None)
    if world.world_size == 1 and engine in ("auto", "sockets"):
        return ProcessGroup()
    if engine == "mpi" or (engine == "auto" and not world.tasks):
        return join_mpi()
    return join_sockets(world, name, timeout_seconds, start_timeout_seconds)


@functools.cache
def join_mpi() -> MpiGroup:
    """Joins MPI's world, which a process can do once."""
    group = MpiGroup()
    # The other processes would wait in MPI forever for a process that has failed.
    process_exit.at_failure(group.abort)
    return group


@functools.cache
def join_sockets(world: World, name: str, timeout_seconds: float, start_timeout_seconds: float) -> SocketGroup:
    """Joins the job of a strategy by sockets, which stay open until this process ends; it can do so once.

    Raises:
        UsageError: the addresses of the processes are not known, or some are parameter servers.
        ClusterError: a process is missing, or has other settings.
    """
    if world.tasks_of("ps"):
        raise UsageError(
            f"`TF_CONFIG` has parameter servers, and `{name}` does not use any",
            "use the strategy `parameter_server`, or a cluster of workers alone",
        )
    world.require_addresses(name)
    with rendezvous.joined(world, {"strategy": name}, start_timeout_seconds) as exchange:
        if exchange is None:
            raise rendezvous.begun_without(world)
        return SocketGroup(world, exchange, min(timeout_seconds, SECONDS_TO_CONNECT), timeout_seconds)


@functools.cache
def join_horovod(
    world: World, timeout_seconds: float, start_timeout_seconds: float, timeline: Path | None
) -> ProcessGroup:
    """Joins the job by Horovod, which a process can do once; `timeline` is the file to write its timeline to."""
    horovod.load()
    settings = horovod_settings(world.world_size, timeout_seconds)
    meeting: contextlib.AbstractContextManager[dict[str, str]] = contextlib.nullcontext({})
    if world.world_size == 1 or world.tasks:
        meeting = horovod.meeting_over_gloo(world, {"strategy": "horovod"}, timeout_seconds, start_timeout_seconds)
    else:
        horovod.require_reachable(world)
    with meeting as variables:
        horovod.set_unless_set(settings | variables)
        if timeline is not None:
            # The second variable makes a Horovod of scripts/install_horovod.sh write a file per rank; others ignore it.
            os.environ["HOROVOD_TIMELINE"] = str(horovod.begin_timeline(timeline, world.rank))
            os.environ["HOROVOD_TIMELINE_EVERY_RANK"] = "1"
        group = horovod.HorovodGroup()
    if timeline is not None:
        atexit.register(_end_timeline, group, timeline)
    return group


def _end_timeline(group: ProcessGroup, timeline: Path) -> None:
    group.close()  # which closes the file
    horovod.end_timeline(timeline, group.rank, group.size)


def horovod_settings(world_size: int, timeout_seconds: float) -> dict[str, str]:
    """The environment variables that Horovod reads when it starts."""
    seconds = max(1, round(timeout_seconds))
    cycle_ms = min(max(SHORTEST_CYCLE_MS, CYCLE_MS_PER_PROCESS * world_size), LONGEST_CYCLE_MS)
    return {
        "HOROVOD_CYCLE_TIME": f"{cycle_ms:g}",
        # Gradients are packed already; Horovod's own packing would copy them once more.
        "HOROVOD_FUSION_THRESHOLD": "0",
        # Horovod takes a busy process for a dead one; `tfdist.jobs.heartbeat` distinguishes them.
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(seconds + SECONDS_TO_NAME),
    }


@functools.cache
def sockets_over_tensorflow(
    world: World, joined: JoinedJob, timeout_seconds: float, required: bool
) -> SocketsOverTensorFlow | None:
    """Connects the processes of `multiworker` by sockets, which stay open until they end.

    Returns:
        `None` if the processes cannot connect, and the sockets are not `required`.

    Raises:
        ClusterError: the processes cannot connect, and the sockets are `required`; raised in all of them.
    """
    try:
        return SocketsOverTensorFlow(world, joined, min(timeout_seconds, SECONDS_TO_CONNECT), timeout_seconds)
    except ClusterError as error:
        if required:
            raise
        warnings.warn(f"{error.sentence}. TensorFlow's slower ring is used", RuntimeWarning, stacklevel=2)
        return None
