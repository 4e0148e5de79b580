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
from typing import Any

import tensorflow as tf

from tfdist.cluster import ports, rendezvous
from tfdist.cluster.task import Task
from tfdist.cluster.world import World
from tfdist.core.inner_loop import Program, Steps
from tfdist.core.verification_bounds import Staleness
from tfdist.data.pipeline.feed import Feed
from tfdist.errors import ClusterError, UsageError
from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_patches, tensorflow_coordinator
from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.internals.keras import tf_variable
from tfdist.options import checked_seconds
from tfdist.strategies import _distribute as distribute
from tfdist.strategies import _parameter_server_data as parameter_server_data
from tfdist.strategies import _parameter_server_job as parameter_server_job
from tfdist.strategies import _parameter_server_loop as parameter_server_loop
from tfdist.strategies import _sharded_variable as sharded_variable
from tfdist.strategies import base
from tfdist.strategies._traits import Traits

# A table of a million rows is spread over the servers; a layer of a usual size, which each step reads whole, is not.
SHARD_BYTES = 8 << 20


class ServedReplica(base.Replica):
    """A worker's step on a whole batch, while other workers update the same variables."""

    alone = False

    def __init__(self) -> None:
        super().__init__()
        self._home: str | None = None  # the server that counts the steps

    def apply(
        self, apply: Callable[..., None], gradients: Sequence[Any], optimizer: Any, variables: Sequence[Any] | None
    ) -> None:
        del variables
        # An update reads more than the gradients, all of it from the servers; on a server it need not be sent to the
        # worker and back.
        with tf.device(self._home), sharded_variable.by_part(optimizer):
            self.update_each_copy(apply, list(gradients))

    def update_each_copy(self, function: Callable[[list[Any]], None], values: list[Any]) -> None:
        with tensorflow_internals.without_strategy():
            function(values)

    @contextlib.contextmanager
    def measuring_staleness(self, optimizer: Any) -> Iterator[Callable[[], tf.Tensor]]:
        """Measures the staleness: the updates by others between the reads of variables here and `optimizer`'s update.

        Yields a function that returns it, an int32 scalar, to be called at the end. The count of updates is read as the
        step begins, together with the variables and not before them: waiting for it costs a third of a small step.
        """
        if optimizer is None:
            yield lambda: tf.constant(0)
            return
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        counter = tf_variable(keras_internals.iterations(inner))
        counted: list[tf.Tensor] = []

        def count(variable: Any) -> None:
            counted.append(tf.convert_to_tensor(variable.assign_add(1, read_value=True)))

        def staleness() -> tf.Tensor:
            with tf.device(self._home):
                # A count inside a condition, such as loss scaling's, is out of reach; it is read again, a little later.
                inside = counted and counted[-1].graph is read.graph
                written = counted[-1] if inside else counter.read_value()
                return tf.maximum(tf.cast(written - read, tf.int32) - 1, 0)

        self._home = counter.device
        with tf.device(self._home):
            read = tf.identity(counter.read_value())
        with keras_patches.counting(inner, count):
            yield staleness


class ParameterServerStrategy(distribute.DistributeStrategy):
    """Trains on the workers of a job, with the variables on its parameter servers.

    Every process of the job runs the same program and makes the strategy. On the chief the constructor returns, and the
    program continues; a worker or a parameter server serves the chief until the chief ends, and exits.

    Each step runs on one worker, on a whole batch, with the variables as they are when it reads them: steps do not wait
    for each other. The staleness of a step is the number of updates by others between its reads and its own update.

    Args:
        staleness: the largest staleness of a step; `None` for no bound. Bounds as in Ho et al., More Effective
            Distributed ML via a Stale Synchronous Parallel Parameter Server, NeurIPS 2013; with 0 the steps run one
            after the other, and the result is that of one device.
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
    as_one_device = False

    def __init__(
        self,
        *,
        staleness: int | None = None,
        shard_bytes: int = SHARD_BYTES,
        timeout_seconds: float = 60.0,
        start_timeout_seconds: float | None = None,
        job_settings: Mapping[str, str] | None = None,
        **options: Any,
    ):
        if staleness is not None and staleness < 0:
            raise UsageError(f"`staleness` is {staleness}", "use 0 or more, or leave it out for no bound")
        if shard_bytes < 0:
            raise UsageError(f"`shard_bytes` is {shard_bytes}", "use 0 or more, or leave it out")
        self.staleness = staleness
        self.shard_bytes = shard_bytes
        self.timeout_seconds = checked_seconds("timeout_seconds", timeout_seconds)
        self._start_timeout_seconds = distribute.start_timeout_seconds(start_timeout_seconds)
        self._job_settings = dict(job_settings or {})
        super().__init__(**options)

    @property
    def bound(self) -> Staleness:
        return Staleness(self.staleness)

    def choose_devices(self, wanted: int | str | Sequence[str] | None) -> list[str]:
        if wanted is not None:
            raise UsageError(
                f"`devices` is `{wanted}`, and `parameter_server` uses the job's workers",
                "leave `devices` out; start more workers",
            )
        return ["CPU:0"]

    def set_up(self) -> None:
        self._job = World.detect(os.environ)
        distribute.require_addresses(self._job, self.name)
        if not self._job.tasks_of("ps") or not self._job.tasks_of("chief") or not self._job.tasks_of("worker"):
            raise UsageError(
                f"The job ({self._job.source}) has {_counted(self._job)}, and `parameter_server` needs a chief, "
                "workers and parameter servers",
                "start it with `--workers 2 --ps 1`, or name all three roles in `TF_CONFIG`",
            )
        job_settings = tuple(self._job_settings.items())
        self.tf_strategy, self._coordinator = parameter_server_job.join(
            self._job, self._start_timeout_seconds, job_settings
        )
        self._data = parameter_server_data.Data(self, self._job)

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        with self.tf_strategy.scope(), sharded_variable.above(self.shard_bytes):
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
        own = {"staleness": self.staleness, "shard_bytes": self.shard_bytes}
        return super().options() | own | {"workers": self.num_workers, "ps": len(self._job.tasks_of("ps"))}

    def placed(self, feed: Feed) -> Feed:
        return self._data.placed(feed)

    def program(self, steps: Steps) -> Program:
        if steps.kind == "predict":
            return parameter_server_loop.ClosurePredictProgram(self, steps)
        return parameter_server_loop.ClosureProgram(self, steps)

    def run(self, step: base.Step) -> list[Any]:
        return base.local_results(self.tf_strategy, self.tf_strategy.run(lambda: step(ServedReplica())))

    def schedule(self, function: Any, arguments: Sequence[Any]) -> Any:
        """Lets a free worker run `function(*arguments)`; returns a `RemoteValue`."""
        return self._coordinator.schedule(function, args=tuple(arguments))

    def wait_for_schedule(self, seconds: float) -> bool:
        """Waits until all that was scheduled has ended, for at most `seconds`; whether it has."""
        return tensorflow_coordinator.wait_for_closures(self._coordinator, seconds)

    def on_each_worker(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The results of `function` on all workers, to be passed as an argument to `schedule`."""
        return tensorflow_coordinator.on_each_worker(self._coordinator, function, *arguments)

    def answers(self, function: Callable[..., Any]) -> list[Any] | None:
        """The results of `function` on all workers, as NumPy arrays; `None` if one fails, or is silent for too long."""
        return tensorflow_coordinator.answers_of_workers(self.on_each_worker(function), self.timeout_seconds)

    def names_of(self, role: str) -> list[str]:
        """The tasks of a role, as messages name them."""
        return [str(task) for task in self._job.tasks_of(role)]

    def unreachable(self, role: str) -> list[str]:
        """The tasks of a role that do not answer, as messages name them."""
        return [str(task) for task in self._silent(role)]

    def drop_silent_workers(self) -> list[str]:
        """Ends the connections to workers that do not answer, and returns their names as messages have them.

        Closures on such a worker then fail as if the worker had ended; if it answers again, it gets closures again.
        """
        silent = self._silent("worker")
        for task in silent:
            ports.hang_up(task.host, task.port)
        return [str(task) for task in silent]

    def _silent(self, role: str) -> list[Task]:
        return [task for task in self._job.tasks_of(role) if not rendezvous.serves(task)]

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        try:
            yield
        except tf.errors.OpError as error:
            gone = self.unreachable("ps")
            if not gone:
                raise
            raise ClusterError.lost(f"Gone: {', '.join(gone)}, with its part of the variables") from error


def _counted(world: World) -> str:
    return ", ".join(f"{len(world.tasks_of(role))} of the role `{role}`" for role in ("chief", "worker", "ps"))


STRATEGY = ParameterServerStrategy
TRAITS = Traits(
    processes=True, servers=True, asynchronous=True, options=("staleness", "shard_bytes", "timeout_seconds")
)
