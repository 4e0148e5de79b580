"""The base of the strategy `parameter_server`: the job, its variables on servers, and the steps on its workers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.data.input.division import Division
from tfdist.data.input.feed import Feed
from tfdist.errors import UsageError
from tfdist.interface.bound import Bound
from tfdist.interface.program import Program, Steps
from tfdist.internals import keras_variables
from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.jobs import rendezvous
from tfdist.jobs.world import World
from tfdist.options import checked_seconds
from tfdist.parameter_server import closures, copies, job, sharded_variable
from tfdist.parameter_server import data as parameter_server_data
from tfdist.parameter_server.closure_replica import ClosureReplica
from tfdist.parameter_server.modes import Mode
from tfdist.parameter_server.round_mesh import RoundMesh
from tfdist.parameter_server.workers import Processes
from tfdist.training.strategy import TrainingStrategy


class ServedStrategy(TrainingStrategy):
    """Trains on the workers of a job, with the variables on its parameter servers.

    For the options see `tfdist.strategies.parameter_server.ParameterServerStrategy`.
    """

    locks = True

    def __init__(
        self,
        mode: Mode,
        *,
        shard_bytes: int,
        timeout_seconds: float,
        start_timeout_seconds: float | None,
        job_settings: Mapping[str, str] | None,
        **options: Any,
    ):
        if shard_bytes < 0:
            raise UsageError(f"`shard_bytes` is {shard_bytes}", "use 0 or more, or leave it out")
        self.mode = mode
        self.shard_bytes = shard_bytes
        self.timeout_seconds = checked_seconds("timeout_seconds", timeout_seconds)
        self._start_timeout_seconds = rendezvous.start_timeout_seconds(start_timeout_seconds)
        self._job_settings = dict(job_settings or {})
        super().__init__(**options)

    def set_up(self) -> None:
        self._job = World.detect(os.environ)
        self._job.require_addresses(self.name)
        if not all(self._job.tasks_of(role) for role in ("ps", "chief", "worker")):
            raise UsageError(
                f"The job ({self._job.source}) has {_counted(self._job)}, and `{self.name}` needs a chief, workers and "
                "parameter servers",
                "start it with `--workers 2 --ps 1`, or name all three roles in `TF_CONFIG`",
            )
        job_settings = tuple(self._job_settings.items())
        self._tf_strategy, coordinator = job.join(self._job, self._start_timeout_seconds, job_settings)
        self.workers = Processes(self._job, coordinator, self.timeout_seconds)
        self.mode.settle(self.num_workers)
        self._data = parameter_server_data.Data(self.workers, self._job, self.device_data_bytes)

    def choose_devices(self, wanted: int | str | Sequence[str] | None) -> list[str]:
        if wanted is not None:
            raise UsageError(
                f"`devices` is `{wanted}`, and `{self.name}` uses the job's workers",
                "leave `devices` out; start more workers",
            )
        return ["CPU:0"]

    @property
    def num_workers(self) -> int:
        """The number of workers of the job."""
        return len(self._job.tasks_of("worker"))

    @property
    def servers(self) -> dict[str, str]:
        tasks = (*self._job.tasks_of("worker"), *self._job.tasks_of("ps"))
        return {f"{task.host}-{task.role}-{task.index}": task.address for task in tasks}

    def options(self) -> dict[str, Any]:
        mode = {"mode": self.mode.name, **self.mode.options}
        sizes = {"workers": self.num_workers, "ps": len(self._job.tasks_of("ps"))}
        return super().options() | mode | {"shard_bytes": self.shard_bytes} | sizes

    @property
    def as_one_device(self) -> bool:  # type: ignore[override]
        return self.mode.as_one_device

    @property
    def bound(self) -> Bound | None:
        return self.mode.bound(self.num_workers)

    @property
    def division(self) -> Division:
        return Division(self.num_workers) if self.mode.name == "bsp" else super().division

    @property
    def mesh(self) -> RoundMesh | None:
        return RoundMesh(0, self.num_workers) if self.mode.name == "bsp" else None

    @property
    def alone(self) -> bool:
        return False  # other workers update the same variables

    @property
    def single_threaded(self) -> bool:
        return False

    def runs_eagerly(self, model: Any) -> bool:
        return False  # only graphs can be sent to workers

    def check(self, model: Any) -> None:
        super().check(model)
        self.mode.check(model)

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        with self._tf_strategy.scope(), sharded_variable.above(self.shard_bytes):
            yield

    @contextlib.contextmanager
    def tracing(self, model: Any) -> Iterator[None]:
        # Unlike for other strategies with TensorFlow's variables: sharded variables and their optimizers need this one.
        with keras_variables.drawing_from(self.unseeded()), ClosureReplica(self.scope).updating(model):
            yield

    def placed(self, feed: Feed) -> Feed:
        return self._data.placed(feed)

    def program(self, steps: Steps) -> Program:
        if steps.kind == "predict":
            return closures.ClosurePredictProgram(self, steps)
        return self.mode.program(self, steps)

    def replica(self) -> ClosureReplica:
        """What a worker's step on a whole batch does."""
        return self.mode.replica()

    def run(self, step: Callable[[], Any]) -> Any:
        with tensorflow_internals.without_strategy():  # its replicas are not those of `tf.distribute`
            return step()

    def unseeded(self) -> Any:
        return closures.unseeded_of(self)  # Keras' own generator is on the coordinator

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
