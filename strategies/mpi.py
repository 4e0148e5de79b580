"""`mpi`: MPI adds the gradients, through mpi4py; a copy of every variable in each process that `mpirun` has started.

It is what `horovod` is over MPI, without Horovod: nothing has to be built for the version of TensorFlow.
"""

from __future__ import annotations

from tfdist.data_parallel.strategy import DataParallel
from tfdist.groups import ProcessGroup, joining
from tfdist.interface.traits import Traits


class MpiStrategy(DataParallel):
    """Trains on the processes that `mpirun` has started.

    Args:
        options: see `tfdist.data_parallel.strategy.DataParallel`.
    """

    name = "mpi"

    def join(self) -> ProcessGroup:
        return joining.join_mpi()


STRATEGY = MpiStrategy
TRAITS = Traits(
    processes=True,
    mpi=True,
    package="mpi4py",
)
