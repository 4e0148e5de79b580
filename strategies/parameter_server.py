"""`parameter_server`: `tf.distribute.ParameterServerStrategy`, one copy of the variables, on servers.

    chief     runs the user's program, and schedules the steps       (the coordinator)
    worker    computes the next step as soon as it is free
    ps        has its part of the variables, and updates them

Source: Li et al., Scaling Distributed Machine Learning with the Parameter Server, OSDI 2014.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import tensorflow as tf
from pydantic import Field

from tfdist.data.input.division import Division
from tfdist.data.input.feed import Feed
from tfdist.data_parallel.tensorflow_variables import TensorFlowVariables
from tfdist.errors import UsageError
from tfdist.interface.bound import Bound
from tfdist.interface.program import Program, Steps
from tfdist.interface.traits import Traits
from tfdist.internals import keras_variables
from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.jobs import timeouts
from tfdist.jobs.world import World
from tfdist.options import Count, Fraction, Seconds, checked_seconds
from tfdist.parameter_server import closures, copies, modes, sharded_variable
from tfdist.parameter_server import data as parameter_server_data
from tfdist.parameter_server import job as parameter_server_job
from tfdist.parameter_server.closure_replica import ClosureReplica
from tfdist.parameter_server.round_mesh import RoundMesh
from tfdist.parameter_server.workers import Processes
from tfdist.strategies import base

# A table of a million rows is spread over the servers; a layer of a usual size, which each step reads whole, is not.
SHARD_BYTES = 8 << 20


class ParameterServerStrategy(base.Strategy):
    """Trains on the workers of a job, with the variables on its parameter servers.

    Every process of the job runs the same program and makes the strategy. On the chief the constructor returns, and the
    program continues; a worker or a parameter server serves the chief until the chief ends, and exits.

    In the mode "asp" each step runs on one worker, on a whole batch, with the variables as they are when it reads them:
    steps do not wait for each other. The staleness of a step is the number of updates by others between its reads and
    its own update. The other modes are listed in `tfdist.parameter_server.modes`.

    Args:
        mode: what workers do with the weights on the servers, and when: "asp", "rounds", "ssp", "bsp", "downpour",
            "easgd" or "eamsgd"; if not said, "rounds" where a staleness is given, else "asp".
        staleness: of `rounds`, the largest staleness of a step: with 0 the steps run one after the other, and the
            result is that of one device. Of `ssp`, the number of steps that a worker may be ahead of the slowest (Ho et
            al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server, NIPS 2013). 3 if not
            said.
        push_every: of `downpour`, the steps from one push of what has changed to the next; 10 if not said.
        fetch_every: of `downpour`, the steps from one fetch of the weights to the next; 10 if not said.
        sync_every: of `easgd` and `eamsgd`, the steps of a worker from one exchange with the centre to the next; 10 if
            not said.
        moving_rate: of `easgd` and `eamsgd`, the part of their distance by which worker and centre move towards each
            other; 0.9 divided by the number of workers if not said.
        momentum: of `eamsgd`; 0.99 if not said.
        shard_bytes: the rows of a variable that is larger than this are spread over the servers.
        timeout_seconds: how long to wait for a worker that is silent, before its steps are given to another.
        start_timeout_seconds: how long the start waits for all processes; `None` is the launcher's setting, else 60.
        job_settings: settings that must be the same in all processes, as the versions of packages must.
        options: see `tfdist.strategies.base.Strategy`.

    Raises:
        UsageError: the job has no chief or no parameter servers, or TensorFlow has already started.
        ClusterError: a process is missing, or has other versions or settings.
    """

    name = "parameter_server"
    locks = True

    def __init__(
        self,
        *,
        mode: str | None = None,
        staleness: int | None = None,
        push_every: Count | None = None,
        fetch_every: Count | None = None,
        sync_every: Count | None = None,
        moving_rate: Annotated[float, Field(ge=0, le=1)] | None = None,
        momentum: Fraction | None = None,
        shard_bytes: int = SHARD_BYTES,
        timeout_seconds: Seconds = 60.0,
        start_timeout_seconds: Seconds | None = None,
        job_settings: Mapping[str, str] | None = None,
        **options: Any,
    ):
        if staleness is not None and staleness < 0:
            raise UsageError(f"`staleness` is {staleness}", "use 0 or more, or leave it out for no bound")
        if shard_bytes < 0:
            raise UsageError(f"`shard_bytes` is {shard_bytes}", "use 0 or more, or leave it out")
        self.mode = modes.Mode(
            mode,
            {
                "staleness": staleness,
                "push_every": push_every,
                "fetch_every": fetch_every,
                "sync_every": sync_every,
                "moving_rate": moving_rate,
                "momentum": momentum,
            },
        )
        self.shard_bytes = shard_bytes
        self.timeout_seconds = checked_seconds("timeout_seconds", timeout_seconds)
        self._start_timeout_seconds = timeouts.start_timeout_seconds(start_timeout_seconds)
        self._job_settings = dict(job_settings or {})
        super().__init__(**options)

    @property
    def as_one_device(self) -> bool:  # type: ignore[override]
        return self.mode.as_one_device

    @property
    def division(self) -> Division:
        return Division(self.num_workers) if self.mode.name == "bsp" else super().division

    @property
    def mesh(self) -> RoundMesh | None:
        return RoundMesh(0, self.num_workers) if self.mode.name == "bsp" else None

    @contextlib.contextmanager
    def tracing(self, model: Any) -> Iterator[None]:
        # Not as for other strategies of TensorFlow: variables in parts, and their optimizers, need this one.
        with keras_variables.drawing_from(self.unseeded()), ClosureReplica(self.scope).updating(model):
            yield

    @property
    def bound(self) -> Bound | None:
        return self.mode.bound(self.num_workers)

    def check(self, model: Any) -> None:
        super().check(model)
        self.mode.check(model)

    def choose_devices(self, wanted: int | str | Sequence[str] | None) -> list[str]:
        if wanted is not None:
            raise UsageError(
                f"`devices` is `{wanted}`, and `parameter_server` uses the job's workers",
                "leave `devices` out; start more workers",
            )
        return ["CPU:0"]

    def set_up(self) -> None:
        self._job = World.detect(os.environ)
        self._job.require_addresses(self.name)
        if not self._job.tasks_of("ps") or not self._job.tasks_of("chief") or not self._job.tasks_of("worker"):
            raise UsageError(
                f"The job ({self._job.source}) has {_counted(self._job)}, and `parameter_server` needs a chief, "
                "workers and parameter servers",
                "start it with `--workers 2 --ps 1`, or name all three roles in `TF_CONFIG`",
            )
        job_settings = tuple(self._job_settings.items())
        self._tf_strategy, coordinator = parameter_server_job.join(self._job, self._start_timeout_seconds, job_settings)
        self.variables = TensorFlowVariables(self._tf_strategy, self.name)
        self.workers = Processes(self._job, coordinator, self.timeout_seconds)
        self.mode.settle(self.num_workers)
        self._data = parameter_server_data.Data(self.workers, self._job, self.device_data_bytes)

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        with self._tf_strategy.scope(), sharded_variable.above(self.shard_bytes):
            yield

    @property
    def num_workers(self) -> int:
        """The number of workers of the job."""
        return len(self._job.tasks_of("worker"))

    @property
    def single_threaded(self) -> bool:
        return False

    def runs_eagerly(self, model: Any) -> bool:
        return False  # only graphs can be sent to workers

    @property
    def servers(self) -> dict[str, str]:
        tasks = (*self._job.tasks_of("worker"), *self._job.tasks_of("ps"))
        return {f"{task.host}-{task.role}-{task.index}": task.address for task in tasks}

    def options(self) -> dict[str, Any]:
        own = {"mode": self.mode.name, **self.mode.options, "shard_bytes": self.shard_bytes}
        return super().options() | own | {"workers": self.num_workers, "ps": len(self._job.tasks_of("ps"))}

    def placed(self, feed: Feed) -> Feed:
        return self._data.placed(feed)

    def program(self, steps: Steps) -> Program:
        if steps.kind == "predict":
            return closures.ClosurePredictProgram(self, steps)
        return self.mode.program(self, steps)

    @property
    def alone(self) -> bool:
        return False  # other workers update the same variables

    def replica(self) -> ClosureReplica:
        """What a worker's step on a whole batch does."""
        return self.mode.replica()

    def run(self, step: Callable[[], Any]) -> Any:
        with tensorflow_internals.without_strategy():  # whose replicas do not meet, as those of `tf.distribute` do
            return step()

    def unseeded(self) -> Any:
        return closures.unseeded_of(self)  # Keras' own is of the coordinator

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        try:
            yield
        except tf.errors.OpError as error:
            copies.require_finite(error)
            explained = self.workers.explained(error)
            if explained is None:
                raise
            raise explained from error


def _counted(world: World) -> str:
    return ", ".join(f"{len(world.tasks_of(role))} of the role `{role}`" for role in ("chief", "worker", "ps"))


STRATEGY = ParameterServerStrategy
TRAITS = Traits(
    processes=True,
    servers=True,
    asynchronous=True,
)
