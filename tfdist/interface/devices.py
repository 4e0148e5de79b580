"""Chooses the devices of this process, by name or by number.

TensorFlow reserves the memory of every GPU that it sees. Therefore a process hides the GPUs that it does not use:

    a single process      uses all GPUs; `single` can leave the others to other programs
    a process of a job    uses the GPUs that its launcher assigned to it, otherwise an equal share by its local rank

The GPUs are assigned by CUDA_VISIBLE_DEVICES, as `python -m tfdist.launch` and Slurm's `--gpus-per-task` set it, or by
`tf.config.set_visible_devices` before the strategy is created. Logical devices, into which
`tf.config.set_logical_device_configuration` divides a GPU, and MIG instances count as devices.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist import startup
from tfdist.errors import CostWarning, UnknownNameError, UsageError
from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.jobs import job_environment
from tfdist.jobs.world import World

VISIBLE = "CUDA_VISIBLE_DEVICES"
# Variables that a launcher sets if it has assigned GPUs to each process.
OWN = (job_environment.OWN_GPUS, "SLURM_GPUS_PER_TASK")
# With this variable, TensorFlow allocates memory as needed, so that processes can share a GPU.
GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"


def choose(devices: int | Sequence[str] | None, default_cpus: int = 1) -> list[str]:
    """Returns the names of the devices to use, such as `GPU:0` or `CPU:1`.

    Args:
        devices: the number of devices or their names; `None` means all GPUs or, without a GPU, `default_cpus` logical
            CPU devices. Without a GPU, a number creates that many logical CPU devices, with a warning if it is above
            the number of cores.
        default_cpus: the number of logical CPU devices if `devices` is `None` and there is no GPU.

    Raises:
        UsageError: there are too few devices, and no more can be created.
    """
    if isinstance(devices, Sequence):
        names = [devices] if isinstance(devices, str) else list(devices)
        if not names:
            raise UsageError("`devices` is empty", "name one device or more, such as `CPU:0`, or leave it out")
        return [_existing(name) for name in names]
    gpus = _count(tf.config.get_visible_devices("GPU"))
    if gpus:
        return _first("GPU", gpus if devices is None else devices, gpus)
    count = default_cpus if devices is None else devices
    _make_logical_cpus(count)
    chosen = _first("CPU", count, len(tf.config.list_logical_devices("CPU")))
    if devices is not None and (sentence := job_environment.crowding(count, "logical devices")):
        warnings.warn(sentence, CostWarning, stacklevel=2)
    return chosen


def set_threads(threads: int, operations: int | None) -> None:
    """Sets the number of threads per operation and, unless `None`, the number of `operations` that run in parallel.

    Raises:
        UsageError: `threads` is below 1, or TensorFlow has already started with another number.
    """
    if threads < 1:
        raise UsageError(f"`threads` is {threads}", "use 1 or more, or leave it out")
    if tf.config.threading.get_intra_op_parallelism_threads() == threads:
        return
    if tensorflow_internals.runtime_started():
        raise UsageError(
            f"`threads` is {threads}, and TensorFlow has already started with "
            f"{tf.config.threading.get_intra_op_parallelism_threads() or 'all cores'}",
            startup.CREATE_EARLIER,
        )
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    if operations is not None:
        tf.config.threading.set_inter_op_parallelism_threads(operations)


def gpus_of_process(world: World, environment: Mapping[str, str]) -> list[Any]:
    """Returns the GPUs of this process of a job as TensorFlow's physical devices; empty if the machine has none.

    Raises:
        UsageError: there are fewer GPUs than processes on this machine, and sharing is not enabled.
    """
    visible = tf.config.get_visible_devices("GPU")
    if len(visible) < len(tf.config.list_physical_devices("GPU")):  # chosen by the user's code or an earlier strategy
        return visible
    return part_of_gpus(visible, world, environment)


def part_of_gpus(gpus: Sequence[Any], world: World, environment: Mapping[str, str]) -> list[Any]:
    """Returns the part of the visible `gpus` that belongs to this process.

    Raises:
        UsageError: there are fewer GPUs than processes on this machine, and sharing is not enabled.
    """
    gpus_per_process = len(gpus) // world.local_world_size
    if not gpus or _gpus_are_assigned(gpus, environment):
        return list(gpus)
    if gpus_per_process:
        return list(gpus[world.local_rank * gpus_per_process :][:gpus_per_process])
    if environment.get(GROWTH, "").lower() in ("1", "true"):
        return [gpus[world.local_rank % len(gpus)]]
    raise UsageError(
        f"{world.local_world_size} processes of the job are on this machine, and it has {len(gpus)} GPU"
        + "s" * (len(gpus) > 1),
        f"start one process per GPU, or let processes share a GPU with `{GROWTH}=true`, which is slower",
    )


def gpus_are_shared(world: World, environment: Mapping[str, str]) -> bool:
    """Whether processes of this machine share a GPU, which NCCL does not allow."""
    gpus = tf.config.list_physical_devices("GPU")
    return 0 < len(gpus) < world.local_world_size and not _gpus_are_assigned(gpus, environment)


def _gpus_are_assigned(gpus: Sequence[Any], environment: Mapping[str, str]) -> bool:
    """Whether the visible `gpus` were assigned to this process alone."""
    by_script = len(gpus) == 1 and bool(environment.get(VISIBLE))  # a user's script has set it from the local rank
    return by_script or any(name in environment for name in OWN)


def use_only_gpus(gpus: Sequence[Any]) -> list[str]:
    """Hides all other GPUs from TensorFlow; returns the names of the remaining devices, such as `GPU:0`.

    Raises:
        UsageError: TensorFlow has already started with other GPUs.
    """
    if list(gpus) != tf.config.get_visible_devices("GPU"):
        if tensorflow_internals.runtime_started():
            raise UsageError(
                "TensorFlow has already started with all GPUs, and this process is to use a part of them",
                startup.CREATE_EARLIER,
            )
        tf.config.set_visible_devices(list(gpus), "GPU")
    return [f"GPU:{index}" for index in range(_count(gpus))]


def hide_other_gpus(wanted: int | str | Sequence[str]) -> int | str | Sequence[str]:
    """Hides all GPUs but the single device `wanted`; returns the name of the device afterwards.

    Raises:
        UsageError: TensorFlow has already started with other GPUs.
    """
    gpus = tf.config.get_visible_devices("GPU")
    name = str(wanted[0] if isinstance(wanted, list | tuple) else wanted).upper()
    kind, _, number = ("GPU:0" if wanted == 1 else name).rpartition("/")[2].removeprefix("DEVICE:").partition(":")
    if kind == "CPU":
        use_only_gpus([])
    elif number.isdigit() and int(number) < len(gpus) == _count(gpus):
        return use_only_gpus([gpus[int(number)]])
    return wanted  # an invalid value raises an error where the devices are chosen


def _count(gpus: Sequence[Any]) -> int:
    """Returns the number of logical devices of `gpus`."""
    return sum(len(tf.config.get_logical_device_configuration(gpu) or [None]) for gpu in gpus)


def _first(kind: str, count: int, available: int) -> list[str]:
    if count < 1:
        raise UsageError(f"`devices` is {count}", "use 1 or more devices")
    if count > available:
        raise UsageError(
            f"`devices` is {count}, and TensorFlow has {available} {kind} device{'s' * (available != 1)}",
            f"use at most {available}, or {startup.CREATE_EARLIER}"
            if kind == "CPU"
            else f"use at most {available}, or leave `devices` out, which means all GPUs",
        )
    return [f"{kind}:{index}" for index in range(count)]


def _existing(name: str) -> str:
    known = [d.name.removeprefix("/device:") for d in tf.config.list_logical_devices()]
    wanted = name.removeprefix("/").removeprefix("device:").upper()
    if wanted not in known:
        raise UnknownNameError("device", name, known)
    return wanted


def _make_logical_cpus(count: int) -> None:
    """Splits the CPU into logical devices, which is possible until TensorFlow first runs an operation."""
    if count <= 1 or tensorflow_internals.runtime_started():
        return
    cpu = tf.config.list_physical_devices("CPU")[0]
    configured = tf.config.get_logical_device_configuration(cpu) or []
    if len(configured) < count:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
