"""`horovod`: Horovod's operations add the gradients; a copy of every variable in each process of a job.

    horovodrun, mpirun                      set the ranks of the processes, and Horovod connects them
    TF_CONFIG, Slurm, `--workers N`         tfdist connects the processes, over Gloo

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
    """Trains on all processes of a job, over MPI or over Gloo.

    Args:
        timeline: the file to write Horovod's timeline of this job to, see `tfdist.groups.horovod_timeline`.
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
