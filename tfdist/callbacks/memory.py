"""Peak memory in the logs of each epoch.

Synopsis:

    >>> peak_resident_bytes() > 1_000_000
    True
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf


class MemoryUsage(keras.callbacks.Callback):
    """Adds `peak_memory_bytes` to the epoch's logs, and `peak_gpu_memory_bytes` if there are GPUs.

    `peak_memory_bytes` is the largest resident set size of this process since its start, in bytes; it never decreases
    from one epoch to the next. `peak_gpu_memory_bytes` is the maximum over the GPUs of TensorFlow's peak allocation.
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is None:
            return
        logs["peak_memory_bytes"] = peak_resident_bytes()
        gpu_bytes = peak_gpu_bytes()
        if gpu_bytes is not None:
            logs["peak_gpu_memory_bytes"] = gpu_bytes


def peak_resident_bytes() -> int:
    """The largest resident set size of this process so far, in bytes."""
    # On Linux a process inherits ru_maxrss from its parent across fork and exec; VmHWM belongs to this program.
    return _high_water_mark() or _maximum_resident_set()


def peak_gpu_bytes() -> int | None:
    """The largest allocation so far on a single GPU, in bytes; `None` without a GPU."""
    peaks = []
    for gpu in tf.config.list_logical_devices("GPU"):
        # A cluster also lists the GPUs of other processes, of which TensorFlow knows only the names.
        with contextlib.suppress(ValueError, tf.errors.OpError):
            peaks.append(tf.config.experimental.get_memory_info(gpu.name)["peak"])
    return max(peaks, default=None)


def _high_water_mark() -> int | None:
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    kibibytes = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    return int(kibibytes[0]) * 1024 if kibibytes else None


def _maximum_resident_set() -> int:
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kibibytes on Linux
