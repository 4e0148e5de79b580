"""`horovod`: data parallelism over the processes of a job, with Horovod's all-reduce. For MPI's faster communication,
and for workers that come and go.

    horovodrun, mpirun                      set the ranks of the processes, and Horovod connects them
    TF_CONFIG, Slurm, `--workers N`         tfdist connects the processes, with Gloo

Source: Sergeev and Del Balso, Horovod: fast and easy distributed deep learning in TensorFlow, arXiv:1802.05799, 2018.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tfdist.data_parallel.strategy import DataParallel
from tfdist.groups import ProcessGroup, joining
from tfdist.interface.traits import Traits


class HorovodStrategy(DataParallel):
    """Trains on all processes of a job, over MPI or Gloo.

    Args:
        timeline: the file for Horovod's timeline of this job, see docs/horovod.md.
        options: see `tfdist.data_parallel.strategy.DataParallel`.
    """

    name = "horovod"

    def __init__(self, *, timeline: str | os.PathLike[str] | None = None, **options: Any):
        self._timeline = timeline
        super().__init__(**options)

    def join(self) -> ProcessGroup:
        timeline = None if self._timeline is None else Path(self._timeline).absolute()
        return joining.join_horovod(self.world, self.timeout_seconds, self.start_timeout_seconds, timeline)


STRATEGY = HorovodStrategy
TRAITS = Traits(
    processes=True,
    elastic=True,
    package="horovod",
)
