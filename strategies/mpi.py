"""`mpi`: MPI adds the gradients, through mpi4py; a copy of every variable in each process that `mpirun` has started.

It is what `horovod` is over MPI, without Horovod: nothing has to be built for the version of TensorFlow.
"""

from __future__ import annotations

from tfdist.communicators import Communicator
from tfdist.strategies import _engines as engines
from tfdist.strategies import _reducing as reducing
from tfdist.strategies._traits import Traits


class MpiStrategy(reducing.ReducingStrategy):
    """Trains on the processes that `mpirun` has started.

    Args:
        options: see `tfdist.strategies._reducing.ReducingStrategy`.
    """

    name = "mpi"

    def join(self) -> Communicator:
        return engines.join_mpi()


STRATEGY = MpiStrategy
TRAITS = Traits(
    processes=True,
    mpi=True,
    package="mpi4py",
    options=("compression", "shard", "speeds", "timeout_seconds", "callback_timeout_seconds"),
)
