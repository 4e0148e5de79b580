"""`mpi`: data parallelism over the processes that `mpirun` has started, with MPI's all-reduce through mpi4py. For MPI
where Horovod is not installed.

It does the same as `horovod` over MPI, without Horovod: nothing has to be built for the version of TensorFlow.
"""

from __future__ import annotations

from tfdist.data_parallel.strategy import DataParallel
from tfdist.groups import ProcessGroup, joining
from tfdist.interface.traits import Traits


class MpiStrategy(DataParallel):
    """Trains on the processes that `mpirun` has started; for its options see `tfdist.data_parallel.strategy`."""

    name = "mpi"

    def join(self) -> ProcessGroup:
        return joining.join_mpi()


STRATEGY = MpiStrategy
TRAITS = Traits(
    processes=True,
    mpi=True,
    package="mpi4py",
)
