"""The base of the strategy `parameter_server`: the job, its variables on servers, and the steps on its workers.

After the rendezvous all processes but the chief become servers:

    chief     connects to the servers; it uses no GPU
    worker    a TensorFlow server with at most one GPU of its machine, chosen by the worker's local rank
    ps        a TensorFlow server without a GPU: variables are stored in host memory

A worker computes one step at a time, on one device; use one worker per GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import tensorflow as tf

from tfdist.data.input.division import Division
from tfdist.data.input.feed import Feed
from tfdist.errors import UsageError
from tfdist.groups import tensorflow as tensorflow_group
from tfdist.interface import devices as device_choice
from tfdist.interface.bound import Bound
from tfdist.interface.program import Program, Steps
from tfdist.internals import keras_variables, tensorflow_coordinator
from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.jobs import process_exit, rendezvous
from tfdist.jobs.job_environment import cores
from tfdist.jobs.liveness import Limits
from tfdist.jobs.tf_config import Task
from tfdist.jobs.world import World
from tfdist.options import checked_seconds
from tfdist.parameter_server import closures, copies, data, sharded_variable
from tfdist.parameter_server.closures import ClosureReplica
from tfdist.parameter_server.endings import ChiefLiveness, ServerLiveness
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
            roles = ("chief", "worker", "ps")
            counted = ", ".join(f"{len(self._job.tasks_of(role))} of the role `{role}`" for role in roles)
            raise UsageError(
                f"The job ({self._job.source}) has {counted}, and `{self.name}` needs a chief, workers and "
                "parameter servers",
                "start it with `--workers 2 --ps 1`, or name all three roles in `TF_CONFIG`",
            )
        job_settings = tuple(self._job_settings.items())
        limits = Limits(self.timeout_seconds, self._start_timeout_seconds)
        self._tf_strategy, coordinator = join(self._job, limits, job_settings)
        self.workers = Processes(self._job, coordinator, self.timeout_seconds)
        self.mode.settle(self.num_workers)
        self._data = data.Data(self.workers, self._job, self.device_data_bytes)

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


@functools.cache
def join(world: World, limits: Limits, job_settings: tuple[Any, ...]) -> tuple[Any, Any]:
    """Joins the job; on workers and parameter servers this does not return.

    A process can join only once.

    Returns:
        TensorFlow's strategy and its cluster coordinator, on the chief.

    Raises:
        UsageError: TensorFlow has already started, or workers have different numbers of GPUs.
        ClusterError: a process is missing, or has other versions or settings.
    """
    assert world.task is not None
    process_exit.end_with_exit_codes()
    gpus = gpus_of(world, tf.config.get_visible_devices("GPU"), os.environ)
    tensorflow_group.meet(world, "parameter_server", job_settings, limits.start_seconds)
    cluster = tf.train.ClusterSpec(world.cluster())
    if not world.is_chief:
        _serve(world, world.task, cluster, gpus, limits)
    device_choice.use_only_gpus(gpus)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        cluster, task_type="chief", task_id=0, rpc_layer="grpc"
    )
    tensorflow_coordinator.keep_functions()
    with ChiefLiveness(world, limits).start(), _starting(world):
        strategy = tf.distribute.ParameterServerStrategy(resolver)
    require_equal_gpus(world, [device.name for device in tf.config.list_logical_devices("GPU")])
    sharded_variable.install(strategy, parts=len(world.tasks_of("ps")))
    return strategy, tensorflow_coordinator.coordinator(strategy)


def gpus_of(world: World, gpus: Sequence[Any], environment: Mapping[str, str]) -> list[Any]:
    """Returns the GPUs that this process uses: for a worker, one of the visible `gpus`, by its local rank; else none.

    Raises:
        UsageError: the machine has fewer GPUs than workers, and GPUs may not be shared.
    """
    task = world.task
    if task is None or task.role != "worker":
        return []
    local_workers = [other for other in world.tasks_of("worker") if other.host == task.host]
    workers = dataclasses.replace(world, local_rank=local_workers.index(task), local_world_size=len(local_workers))
    return device_choice.part_of_gpus(gpus, workers, environment)[:1]


def require_equal_gpus(world: World, gpus: Sequence[str]) -> None:
    """Requires that all workers or none have a GPU, because a step is traced for one kind of device.

    Args:
        world: the job.
        gpus: the full names of all GPUs of all processes, such as "/job:worker/replica:0/task:1/device:GPU:0".

    Raises:
        UsageError: the numbers of GPUs differ between workers.
    """
    gpus_by_process = Counter(name.partition("/device:")[0] for name in gpus)
    workers = world.tasks_of("worker")
    counts = {str(task): gpus_by_process[f"/job:worker/replica:0/task:{task.index}"] for task in workers}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name}: {count}" for name, count in counts.items())
        raise UsageError(
            f"The workers of the job have different numbers of GPUs ({listed}), and all compute the same graph",
            "start workers only on machines with GPUs, one per GPU; or hide all GPUs with `CUDA_VISIBLE_DEVICES=`",
        )


def server_config(world: World, gpus: Sequence[Any]) -> Any:
    """Returns the `ConfigProto` of a server that sees only `gpus`; a server ignores the settings of `tf.config`."""
    available = cores()
    # With fewer threads than closures in progress, closures would deadlock. TensorFlow's guide on parameter server
    # training asks for one thread more than there are workers.
    needed = 2 * len(world.tasks_of("worker")) + 2
    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=tf.config.threading.get_intra_op_parallelism_threads(),
        inter_op_parallelism_threads=max(available, needed),
        device_count={"GPU": len(gpus)},
    )
    config.gpu_options.visible_device_list = ",".join(gpu.name.rpartition(":")[2] for gpu in gpus)
    # Threads that spin while they wait for work take cores from threads that compute: a sixth of a small step.
    config.experimental.disable_thread_spinning = needed > available
    return config


def _serve(world: World, task: Task, cluster: tf.train.ClusterSpec, gpus: Sequence[Any], limits: Limits) -> NoReturn:
    """Serves the chief until the chief ends, then exits."""
    device_choice.use_only_gpus([])  # for the input pipeline, which runs in this process outside the server
    data.serve(world)
    server_liveness = ServerLiveness(world, limits)
    with _starting(world):
        server = tf.distribute.Server(
            cluster,
            job_name=task.role,
            task_index=task.index,
            protocol="grpc",
            config=server_config(world, gpus),
            start=True,
        )
    try:
        server_liveness.end_with_chief()
    finally:
        del server


@contextlib.contextmanager
def _starting(world: World) -> Iterator[None]:
    """The context in which TensorFlow starts its server in this process."""
    try:
        yield
    except tf.errors.OpError as error:
        raise tensorflow_group.start_error(world, error, ()) from error
