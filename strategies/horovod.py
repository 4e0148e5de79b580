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

from tfdist.data_parallel import reducing
from tfdist.groups import Communicator, gloo
from tfdist.groups import horovod as engine
from tfdist.groups import horovod_timeline as timelines
from tfdist.interface.traits import Traits
from tfdist.jobs.world import World

# The interval at which Horovod looks for new tensors. Its default, 1 ms, is a noticeable part of a small step. At each
# look rank 0 hears from every other process.
SHORTEST_CYCLE_MS, LONGEST_CYCLE_MS = 0.1, 1.0
CYCLE_MS_PER_PROCESS = 0.05


class HorovodStrategy(reducing.ReducingStrategy):
    """Trains on all processes of a job, over MPI or over Gloo.

    Args:
        timeline: the file to write Horovod's timeline of this job to, see `tfdist.groups.horovod_timeline`.
        options: see `tfdist.data_parallel.reducing.ReducingStrategy`.
    """

    name = "horovod"

    def __init__(self, *, timeline: str | os.PathLike[str] | None = None, **options: Any):
        self._timeline = timeline
        super().__init__(**options)

    def join(self) -> Communicator:
        timeline = None if self._timeline is None else Path(self._timeline).absolute()
        return join(self.world, self.timeout_seconds, self._start_timeout_seconds, timeline)


@functools.cache
def join(world: World, timeout_seconds: float, start_timeout_seconds: float, timeline: Path | None) -> Communicator:
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
        # It takes a busy process for a dead one; `tfdist.jobs.heartbeat` tells them apart.
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
