"""`hogwild`: threads of one process take steps on the same variables, without waiting for each other. For sparse
gradients on several cores, and to study staleness without a cluster.

    thread    reads the variables, computes the gradients of a whole batch, and updates the variables

There are no locks: a thread may read a value that another thread is about to change, and one of two simultaneous
updates of the same element may be lost. Both are rare where a step changes few rows of a large table, such as the
embedding of a bag of words, for which the method is meant.

Source: Recht, Ré, Wright and Niu, Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent,
NIPS 2011.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import tensorflow as tf

from tfdist.data.input.array_feed import ArrayFeed
from tfdist.data.input.feed import Feed
from tfdist.errors import UsageError
from tfdist.interface.bound import Bound, Staleness
from tfdist.interface.program import Program, Steps
from tfdist.interface.traits import Traits
from tfdist.jobs.job_environment import cores
from tfdist.options import Count
from tfdist.parameter_server import closures
from tfdist.parameter_server.closures import IndexedArrays, LockingReplica
from tfdist.parameter_server.workers import Threads
from tfdist.strategies import base

_numbers = itertools.count()


class HogwildStrategy(base.Strategy):
    """Trains on one device with several threads, each of which takes whole batches.

    Args:
        workers: the number of threads; default: the number of cores. One thread computes what `single` does.
        locks: only one thread at a time updates the variables; for comparisons.
        options: see `tfdist.strategies.base.Strategy`.
    """

    name = "hogwild"
    one_device = True

    def __init__(self, *, workers: Count | None = None, locks: bool = False, **options: Any):
        self.num_workers = self.steps_at_once = cores() if workers is None else workers
        self.locks = locks
        super().__init__(**options)

    def set_up(self) -> None:
        self.workers = Threads(self.num_workers, self.name)
        with tf.device("CPU:0"):
            self._mutex = tf.raw_ops.MutexV2(shared_name=f"{self.name}_{next(_numbers)}") if self.locks else None

    @property
    def alone(self) -> bool:
        return self.num_workers == 1

    @property
    def as_one_device(self) -> bool:  # type: ignore[override]
        return self.alone

    @property
    def bound(self) -> Bound | None:
        return None if self.alone else Staleness(None)

    @property
    def single_threaded(self) -> bool:
        return self.alone and super().single_threaded

    def check(self, model: Any) -> None:
        super().check(model)
        if not self.alone:
            if model.run_eagerly:
                raise UsageError(
                    f"The model `{model.name}` runs eagerly, and Python lets only one thread at a time compute",
                    "compile without `run_eagerly`, or use `single`",
                )
            closures.refuse_accumulation(model, "several threads")

    def options(self) -> dict[str, Any]:
        return super().options() | {"workers": self.num_workers, "locks": self.locks}

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        return tf.device(self.devices[0])

    def placed(self, feed: Feed) -> Feed:
        if self.alone or not isinstance(feed, ArrayFeed):
            return super().placed(feed)
        return IndexedArrays(feed, feed.arrays)

    def program(self, steps: Steps) -> Program:
        if self.alone:
            return super().program(steps)
        if steps.kind == "predict":
            return closures.ClosurePredictProgram(self, steps)
        return closures.ClosureProgram(self, steps)

    def unseeded(self) -> Any:
        return None if self.alone else closures.unseeded_of(self)  # Keras' own generator is for one thread

    def replica(self) -> LockingReplica:
        """The replica of a thread, which computes steps on whole batches."""
        return LockingReplica(self._mutex)


STRATEGY = HogwildStrategy
TRAITS = Traits(asynchronous=True)
