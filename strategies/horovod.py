"""`horovod`: Horovod's operations add the gradients; a copy of every variable in each process of a job.

    horovodrun, mpirun                      set the ranks of the processes, and Horovod connects them
    TF_CONFIG, Slurm, `--workers N`         tfdist connects the processes, over Gloo

Source: Sergeev and Del Balso, Horovod: fast and easy distributed deep learning in TensorFlow, arXiv:1802.05799, 2018.
"""

from __future__ import annotations

import atexit
import functools
import os
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfdist.cluster.world import World
from tfdist.communicators import Communicator, gloo
from tfdist.communicators import horovod as engine
from tfdist.communicators import horovod_timeline as timelines
from tfdist.core import gradient_reduction
from tfdist.errors import UnknownNameError
from tfdist.strategies import _collective as collective
from tfdist.strategies import _staging as staging
from tfdist.strategies._traits import Traits
from tfdist.transport import costs

# The interval at which Horovod looks for new tensors. Its default, 1 ms, is a noticeable part of a small step. At each
# look rank 0 hears from every other process.
SHORTEST_CYCLE_MS, LONGEST_CYCLE_MS = 0.1, 1.0
CYCLE_MS_PER_PROCESS = 0.05
WIRE_DTYPES = {"none": None, "bf16": tf.bfloat16, "fp16": tf.float16}


class HorovodStrategy(staging.StagingStrategy):
    """Trains on all processes of a job, over MPI or over Gloo.

    Args:
        compression: "none"; "bf16" or "fp16" send gradients in that type, half the bytes.
        buffer_bytes: gradients below this size are sent together, in buffers of this size; `None` is 1 MiB, and 128 KiB
            per process from nine processes on, since Horovod's rings send each process' part of a buffer by itself.
        dense_below_bytes: sparse gradients of tables below this size are sent as dense tensors; not for adaptive
            optimizers, see `tfdist.communicators.Communicator`.
        timeline: the file to write Horovod's timeline of this job to, see `tfdist.communicators.horovod_timeline`.
        options: see `tfdist.strategies._staging.StagingStrategy`; `shard`, see `tfdist.strategies._sharding`.
    """

    name = "horovod"
    takes_speeds = True

    def __init__(
        self,
        *,
        compression: str = "none",
        buffer_bytes: int | None = None,
        dense_below_bytes: int = 0,
        timeline: str | os.PathLike[str] | None = None,
        **options: Any,
    ):
        if compression not in WIRE_DTYPES:
            raise UnknownNameError("compression", compression, WIRE_DTYPES)
        self.compression = compression
        self._buffer_bytes = buffer_bytes
        self._dense_below_bytes = dense_below_bytes
        self._timeline = timeline
        super().__init__(**options)

    @property
    def packing(self) -> gradient_reduction.Packing:
        chosen = costs.buffer_bytes(self.world.world_size) if self._buffer_bytes is None else self._buffer_bytes
        return gradient_reduction.Packing(chosen, WIRE_DTYPES[self.compression])

    def connect(self) -> Communicator:
        timeline = None if self._timeline is None else Path(self._timeline).absolute()
        communicator = _join(self.world, self.timeout_seconds, self._start_timeout_seconds, timeline)
        communicator.dense_below_bytes = self._dense_below_bytes
        return communicator

    def replica(self) -> collective.CollectiveReplica:
        return collective.CollectiveReplica(self.communicator, self.packing, self.sharded)

    def options(self) -> dict[str, Any]:
        return super().options() | {
            "compression": self.compression,
            "buffer_bytes": self.packing.buffer_bytes,
            "dense_below_bytes": self._dense_below_bytes,
        }


@functools.cache
def _join(world: World, timeout_seconds: float, start_timeout_seconds: float, timeline: Path | None) -> Communicator:
    """Joins the job, which a process can do once."""
    engine.load()
    settings = _settings(world.world_size, timeout_seconds)
    if world.world_size == 1 or world.tasks:
        settings |= gloo.meet(world, {"strategy": HorovodStrategy.name}, start_timeout_seconds)
    gloo.set_unless_set(settings)
    if timeline is not None:
        # The second is known to a Horovod that scripts/install_horovod.sh has built; others write rank 0's alone.
        os.environ["HOROVOD_TIMELINE"] = str(timelines.begin(timeline, world.rank))
        os.environ["HOROVOD_TIMELINE_EVERY_RANK"] = "1"
    communicator = engine.HorovodCommunicator()
    if timeline is not None:
        atexit.register(_end_timeline, communicator, timeline)
    return communicator


def _end_timeline(communicator: Communicator, timeline: Path) -> None:
    communicator.close()  # which closes the file
    timelines.end(timeline, communicator.rank, communicator.size)


def _settings(world_size: int, timeout_seconds: float) -> dict[str, str]:
    seconds = max(1, round(timeout_seconds))
    cycle_ms = min(max(SHORTEST_CYCLE_MS, CYCLE_MS_PER_PROCESS * world_size), LONGEST_CYCLE_MS)
    return {
        "HOROVOD_CYCLE_TIME": f"{cycle_ms:g}",
        # Gradients come packed; Horovod's own packing would copy them once more.
        "HOROVOD_FUSION_THRESHOLD": "0",
        # It takes a busy process for a dead one; `tfdist.cluster.heartbeat` tells them apart.
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(seconds),
    }


STRATEGY = HorovodStrategy
TRAITS = Traits(
    processes=True,
    elastic=True,
    package="horovod",
    options=("compression", "shard", "speeds", "timeline", "timeout_seconds", "callback_timeout_seconds"),
)
