"""Chooses devices of this machine by name or by number."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist.errors import UnknownNameError, UsageError
from tfdist.interface import gpus as _gpus
from tfdist.internals import tensorflow as tensorflow_internals


def choose(devices: int | Sequence[str] | None, default_cpus: int = 1) -> list[str]:
    """Returns the names of the devices to use, such as `GPU:0` or `CPU:1`.

    Args:
        devices: the number of devices or their names; `None` means all GPUs or, without a GPU, `default_cpus` logical
            CPU devices. Without a GPU, a number creates that many logical CPU devices.
        default_cpus: the number of logical CPU devices if `devices` is `None` and there is no GPU.

    Raises:
        UsageError: there are too few devices, and no more can be created.
    """
    if isinstance(devices, Sequence):
        names = [devices] if isinstance(devices, str) else list(devices)
        return [_existing(name) for name in names]
    gpus = _gpus.count(tf.config.get_visible_devices("GPU"))
    if gpus:
        return _first("GPU", gpus if devices is None else devices, gpus)
    count = default_cpus if devices is None else devices
    _make_logical_cpus(count)
    return _first("CPU", count, len(tf.config.list_logical_devices("CPU")))


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
            "create the strategy before anything else uses TensorFlow",
        )
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    if operations is not None:
        tf.config.threading.set_inter_op_parallelism_threads(operations)


def _first(kind: str, count: int, available: int) -> list[str]:
    if count < 1:
        raise UsageError(f"`devices` is {count}", "use 1 or more devices")
    if count > available:
        raise UsageError(
            f"`devices` is {count}, and TensorFlow has {available} {kind} device{'s' * (available != 1)}",
            f"use at most {available}, or create the strategy before anything else uses TensorFlow"
            if kind == "CPU"
            else f"use at most {available}",
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
