"""`mpi_split`: each process of MPI's world trains on its own part of the data, and the weights are averaged.

The baseline that published comparisons of MPI with TensorFlow's own strategies use: the data are split once by
`np.array_split`, process 0 broadcasts the initial weights, and mpi4py averages outside the graph. `evaluate` and
`predict` are exact.
"""

from __future__ import annotations

import functools
from typing import Any

from tfdist.cluster import process_exit
from tfdist.communicators import mpi
from tfdist.core.inner_loop import Program, Steps
from tfdist.core.verification_bounds import Averaging
from tfdist.data.pipeline import together
from tfdist.errors import UsageError
from tfdist.strategies import _collective as collective
from tfdist.strategies import _local_sgd as local_sgd
from tfdist.strategies._traits import Traits

EPOCH = "epoch"


class MpiSplitStrategy(collective.MultiProcessStrategy):
    """Trains on the processes that `mpirun` has started.

    With `sync_every=1` and SGD, with or without momentum, the result is that of synchronous training on the joined
    batches of the processes. Otherwise the weights of the processes drift apart for up to `sync_every` steps: with SGD
    of rate r and gradients of norm at most G, each moves at most r * G * sync_every from the last average. The norm of
    the difference from the mean, before averaging, is logged as `disagreement`.

    Args:
        sync_every: "epoch", or the number of steps after which the weights are averaged.
        options: see `tfdist.strategies._collective.MultiProcessStrategy`.
    """

    name = "mpi_split"
    as_one_device = False

    def __init__(self, *, sync_every: int | str = EPOCH, **options: Any):
        if sync_every != EPOCH and not (isinstance(sync_every, int) and sync_every >= 1):
            raise UsageError(f"`sync_every` is `{sync_every}`", f"use `{EPOCH}`, or a number of steps from 1")
        self.sync_every = None if sync_every == EPOCH else int(sync_every)
        super().__init__(**options)

    def connect(self) -> mpi.MpiCommunicator:
        return _join()

    @property
    def bound(self) -> Averaging | None:
        return Averaging(self.sync_every) if self.world.world_size > 1 else None

    def options(self) -> dict[str, Any]:
        return super().options() | {"sync_every": self.sync_every or EPOCH}

    def program(self, steps: Steps) -> Program:
        if steps.kind == "train" and self.world.world_size > 1:
            if isinstance(steps.batches, together.JoinedBatches):
                raise UsageError(
                    "`mpi_split` divides the data among the processes itself, and `per_process` has them divided",
                    "pass the whole data to each process; `horovod` and `multiworker` train on parts of your own",
                )
            return local_sgd.AveragingProgram(self, steps, self.sync_every)
        return super().program(steps)


@functools.cache
def _join() -> mpi.MpiCommunicator:
    """Joins MPI's world, which a process can do once."""
    communicator = mpi.MpiCommunicator()
    # The other processes would wait in MPI for ever for a process that has failed.
    process_exit.at_failure(communicator.abort)
    return communicator


STRATEGY = MpiSplitStrategy
TRAITS = Traits(
    processes=True,
    mpi=True,
    asynchronous=True,
    package="mpi4py",
    options=("sync_every", "timeout_seconds", "callback_timeout_seconds"),
)
