"""`mpi_split`: each MPI process trains on its own part of the data, and the weights are averaged at intervals. The MPI
baseline of comparisons.

It is the baseline in published comparisons of MPI with TensorFlow's own strategies: local SGD with the plain mean, the
data split once by `np.array_split`, the initial weights of process 0, and averaging outside the graph with mpi4py.
`evaluate` and `predict` are exact.
"""

from __future__ import annotations

from typing import Any, Literal

from tfdist.interface.traits import Traits
from tfdist.options import Count
from tfdist.strategies import local_sgd


class MpiSplitStrategy(local_sgd.LocalSgdStrategy):
    """Trains on the processes that `mpirun` has started.

    With `sync_every=1` and SGD, with or without momentum, the result is that of synchronous training on the joined
    batches of the processes. Otherwise the weights of the processes diverge for up to `sync_every` steps: with SGD at
    learning rate r and gradients of norm at most G, each moves at most r * G * sync_every from the last average. The
    norm of the difference from the mean, before averaging, is logged as `disagreement`.

    Args:
        sync_every: "epoch", or the number of steps between averagings.
        options: see `tfdist.training.job_strategy.JobStrategy`.
    """

    name = "mpi_split"
    split_once = True

    def __init__(self, *, sync_every: Count | Literal["epoch"] = "epoch", **options: Any):
        super().__init__(sync_every=sync_every, engine="mpi", **options)


STRATEGY = MpiSplitStrategy
TRAITS = Traits(
    processes=True,
    mpi=True,
    asynchronous=True,
    package="mpi4py",
)
