"""How the processes of a `parameter_server` job begin: they meet, and all but the chief become servers.

    chief     sees no GPU, and connects to the servers
    worker    a TensorFlow server with one GPU of its machine, by the worker's number there, or with none
    ps        a TensorFlow server without a GPU: variables lie in the memory of the host

A worker computes one step at a time, on one device; a machine with several GPUs takes a worker for each.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.groups import tensorflow as tensorflow_group
from tfdist.interface import gpus as _gpus
from tfdist.internals import tensorflow_coordinator
from tfdist.jobs import rendezvous
from tfdist.jobs.job_environment import cores
from tfdist.jobs.task import Task
from tfdist.jobs.world import World
from tfdist.parameter_server import reader, sharded_variable

# How long a server waits after its chief can no longer be reached.
SECONDS_WITHOUT_CHIEF = 6.0


@functools.cache
def join(world: World, start_timeout_seconds: float, job_settings: tuple[Any, ...]) -> tuple[Any, Any]:
    """TensorFlow's strategy and its coordinator; a process can join once, and this returns in the chief alone.

    Raises:
        UsageError: TensorFlow has already started, or workers have different devices.
        ClusterError: a process is missing, or differs.
    """
    assert world.task is not None
    own = gpus_of(world, tf.config.get_visible_devices("GPU"), os.environ)
    tensorflow_group.meet(world, "parameter_server", job_settings, start_timeout_seconds)
    cluster = tf.train.ClusterSpec(world.cluster())
    if not world.is_chief:
        _serve(world, world.task, cluster, own)
    _gpus.use_only(own)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        cluster, task_type="chief", task_id=0, rpc_layer="grpc"
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    require_alike(world, [device.name for device in tf.config.list_logical_devices("GPU")])
    sharded_variable.install(strategy, parts=len(world.tasks_of("ps")))
    return strategy, tensorflow_coordinator.coordinator(strategy)


def gpus_of(world: World, gpus: Sequence[Any], environment: Mapping[str, str]) -> list[Any]:
    """Which of the `gpus` that this process sees it uses: a worker one, by its number among the machine's workers.

    Raises:
        UsageError: the machine has fewer GPUs than workers, and they are not to be shared.
    """
    task = world.task
    if task is None or task.role != "worker":
        return []
    here = [other for other in world.tasks_of("worker") if other.host == task.host]
    workers = dataclasses.replace(world, local_rank=here.index(task), local_world_size=len(here))
    return _gpus.part_of(gpus, workers, environment)[:1]


def require_alike(world: World, gpus: Sequence[str]) -> None:
    """Refuses a job of which some workers have a GPU and others have none: a step is made for one kind of device.

    Args:
        world: the job.
        gpus: the full names of all GPUs of all processes, such as "/job:worker/replica:0/task:1/device:GPU:0".

    Raises:
        UsageError: the numbers differ.
    """
    found = Counter(name.partition("/device:")[0] for name in gpus)
    workers = world.tasks_of("worker")
    each = {str(task): found[f"/job:worker/replica:0/task:{task.index}"] for task in workers}
    if len(set(each.values())) > 1:
        listed = ", ".join(f"{name}: {count}" for name, count in each.items())
        raise UsageError(
            f"The workers of the job have different numbers of GPUs ({listed}), and all compute the same graph",
            "start workers on machines with GPUs only, one per GPU; or hide the GPUs of all by `CUDA_VISIBLE_DEVICES=`",
        )


def server_config(world: World, gpus: Sequence[Any]) -> Any:
    """The `ConfigProto` of a server that sees only these GPUs: a server does not read what `tf.config` has set."""
    present, needed = cores(), _threads_needed(world)
    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=tf.config.threading.get_intra_op_parallelism_threads(),
        inter_op_parallelism_threads=max(present, needed),
        device_count={"GPU": len(gpus)},
    )
    config.gpu_options.visible_device_list = ",".join(gpu.name.rpartition(":")[2] for gpu in gpus)
    # Threads that spin while they wait for work take cores from threads that compute: a sixth of a small step.
    config.experimental.disable_thread_spinning = needed > present
    return config


def _serve(world: World, task: Task, cluster: tf.train.ClusterSpec, gpus: Sequence[Any]) -> None:
    """Serves the chief until it ends, then ends this process."""
    _gpus.use_only([])  # in this process beside the server, which reads data
    reader.serve(world)
    server = tf.distribute.Server(
        cluster,
        job_name=task.role,
        task_index=task.index,
        protocol="grpc",
        config=server_config(world, gpus),
        start=True,
    )
    chief = world.tasks_of("chief")[0]
    seen = time.monotonic()
    while time.monotonic() - seen < SECONDS_WITHOUT_CHIEF:
        time.sleep(1.0)
        if rendezvous.can_connect(chief):
            seen = time.monotonic()
    del server
    sys.exit(0)


def _threads_needed(world: World) -> int:
    """The threads of a server: with fewer threads than closures that it takes part in, closures would deadlock.

    Source: TensorFlow's guide on parameter server training, which asks for one more than there are workers.
    """
    return 2 * len(world.tasks_of("worker")) + 2
