"""Which GPUs this process uses: TensorFlow reserves the memory of every GPU that it sees.

    alone       all that there are; `single` can leave the others to other programs
    of a job    those that its launcher has given it, else its equal part of the machine's, by its local rank

A process' own part may be given by CUDA_VISIBLE_DEVICES, as `python -m tfdist.launch` does and Slurm's
`--gpus-per-task`, or by `tf.config.set_visible_devices` before the strategy is made. Logical devices, into which
`tf.config.set_logical_device_configuration` divides a GPU, and MIG instances count as devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.internals.tensorflow import runtime_started
from tfdist.jobs import job_environment
from tfdist.jobs.world import World

VISIBLE = "CUDA_VISIBLE_DEVICES"
# Who sets one of these has given each process GPUs of its own.
OWN = (job_environment.OWN_GPUS, "SLURM_GPUS_PER_TASK")
# TensorFlow then takes memory as it needs it, so that processes can share a GPU.
GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"


def of_process(world: World, environment: Mapping[str, str]) -> list[Any]:
    """The GPUs of this process of a job, as TensorFlow's physical devices; empty if the machine has none.

    Raises:
        UsageError: there are fewer GPUs than processes on this machine, and they are not to be shared.
    """
    seen = tf.config.get_visible_devices("GPU")
    if len(seen) < len(tf.config.list_physical_devices("GPU")):  # the user's own code, or an earlier strategy, chose
        return seen
    return part_of(seen, world, environment)


def part_of(gpus: Sequence[Any], world: World, environment: Mapping[str, str]) -> list[Any]:
    """The part of `gpus`, which this process sees, that is its own.

    Raises:
        UsageError: as `of_process`.
    """
    each = len(gpus) // world.local_world_size
    if not gpus or _are_given(gpus, environment):
        return list(gpus)
    if each:
        return list(gpus[world.local_rank * each :][:each])
    if environment.get(GROWTH, "").lower() in ("1", "true"):
        return [gpus[world.local_rank % len(gpus)]]
    raise UsageError(
        f"{world.local_world_size} processes of the job are on this machine, and it has {len(gpus)} GPU"
        + "s" * (len(gpus) > 1),
        f"start one process per GPU; or let processes share a GPU by `{GROWTH}=true`, more slowly",
    )


def are_shared(world: World, environment: Mapping[str, str]) -> bool:
    """Whether processes of this machine have the same GPU, which NCCL does not allow."""
    gpus = tf.config.list_physical_devices("GPU")
    return 0 < len(gpus) < world.local_world_size and not _are_given(gpus, environment)


def _are_given(gpus: Sequence[Any], environment: Mapping[str, str]) -> bool:
    """Whether `gpus`, which this process sees, are its own."""
    by_script = len(gpus) == 1 and bool(environment.get(VISIBLE))  # set by the local rank
    return by_script or any(name in environment for name in OWN)


def use_only(gpus: Sequence[Any]) -> list[str]:
    """Hides all other GPUs from TensorFlow; the names of the devices that are left, such as `GPU:0`.

    Raises:
        UsageError: TensorFlow has already started with others.
    """
    if list(gpus) != tf.config.get_visible_devices("GPU"):
        if runtime_started():
            raise UsageError(
                "TensorFlow has already started with all GPUs, and this process is to use a part of them",
                "create the strategy before anything else uses TensorFlow",
            )
        tf.config.set_visible_devices(list(gpus), "GPU")
    return [f"GPU:{index}" for index in range(count(gpus))]


def hide_others(wanted: int | str | Sequence[str]) -> int | str | Sequence[str]:
    """Hides the GPUs that a program with the one device `wanted` does not use; what the device is called afterwards.

    Raises:
        UsageError: as `use_only`.
    """
    gpus = tf.config.get_visible_devices("GPU")
    name = str(wanted[0] if isinstance(wanted, list | tuple) else wanted).upper()
    kind, _, number = ("GPU:0" if wanted == 1 else name).rpartition("/")[2].removeprefix("DEVICE:").partition(":")
    if kind == "CPU":
        use_only([])
    elif number.isdigit() and int(number) < len(gpus) == count(gpus):
        return use_only([gpus[int(number)]])
    return wanted  # which the choice of devices refuses, if it cannot be


def count(gpus: Sequence[Any]) -> int:
    """The number of logical devices of `gpus`."""
    return sum(len(tf.config.get_logical_device_configuration(gpu) or [None]) for gpu in gpus)
