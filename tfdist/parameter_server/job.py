"""Startup of a `parameter_server` job: the rendezvous, after which all processes but the chief become servers.

    chief     connects to the servers; it uses no GPU
    worker    a TensorFlow server with at most one GPU of its machine, chosen by the worker's local rank
    ps        a TensorFlow server without a GPU: variables are stored in host memory

A worker computes one step at a time, on one device; use one worker per GPU.
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
from tfdist.interface import devices as device_choice
from tfdist.internals import tensorflow_coordinator
from tfdist.jobs import rendezvous
from tfdist.jobs.job_environment import cores
from tfdist.jobs.tf_config import Task
from tfdist.jobs.world import World
from tfdist.parameter_server import reader, sharded_variable

# How long a server keeps running after its chief can no longer be reached.
SECONDS_WITHOUT_CHIEF = 6.0


@functools.cache
def join(world: World, start_timeout_seconds: float, job_settings: tuple[Any, ...]) -> tuple[Any, Any]:
    """Joins the job; on workers and parameter servers this does not return.

    A process can join only once.

    Returns:
        TensorFlow's strategy and its cluster coordinator, on the chief.

    Raises:
        UsageError: TensorFlow has already started, or workers have different numbers of GPUs.
        ClusterError: a process is missing, or has other versions or settings.
    """
    assert world.task is not None
    gpus = gpus_of(world, tf.config.get_visible_devices("GPU"), os.environ)
    tensorflow_group.meet(world, "parameter_server", job_settings, start_timeout_seconds)
    cluster = tf.train.ClusterSpec(world.cluster())
    if not world.is_chief:
        _serve(world, world.task, cluster, gpus)
    device_choice.use_only_gpus(gpus)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        cluster, task_type="chief", task_id=0, rpc_layer="grpc"
    )
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


def _serve(world: World, task: Task, cluster: tf.train.ClusterSpec, gpus: Sequence[Any]) -> None:
    """Serves the chief until the chief ends, then exits."""
    device_choice.use_only_gpus([])  # for the input pipeline, which runs in this process outside the server
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
    last_contact = time.monotonic()
    while time.monotonic() - last_contact < SECONDS_WITHOUT_CHIEF:
        time.sleep(1.0)
        if rendezvous.can_connect(chief):
            last_contact = time.monotonic()
    del server
    sys.exit(0)
