"""The peak of this machine: the most FLOPs per second that a product of two matrices reaches.

Other programs on the machine hide a part of it. Therefore small matrices are multiplied, of several tries the fastest
counts, and of all runs on a machine the highest figure, see `tfdist.machine`.

`python -m tfdist.run.peak CORE...` measures the cores with these numbers, and prints the peak. NumPy and TensorFlow are
imported only to measure: a library under NumPy counts the cores once.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from tfdist import machine

SECONDS = 0.3  # of trying
MOST_SECONDS = 60.0  # of a child process
CPU_SIZE, GPU_SIZE = 512, 8192  # rows and columns of a matrix
# With these, launchers make the libraries under NumPy use fewer threads than there are cores.
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def of_cores(count: int) -> float:
    """The peak of `count` cores of this machine together, for float32 and NumPy's product, in FLOPs per second."""
    return machine.highest("cpu-peak", lambda: _measured_in_child(count), cores=count, dtype="float32")


def of_gpu(device: str, dtype: str) -> float:
    """The peak of a GPU for TensorFlow's product, in FLOPs per second.

    Args:
        device: its name, such as "GPU:0".
        dtype: the dtype of the matrices, such as "float32" or "bfloat16".
    """
    import tensorflow as tf

    details = tf.config.experimental.get_device_details(tf.config.list_physical_devices("GPU")[0])
    tf32 = tf.config.experimental.tensor_float_32_execution_enabled()

    def measure() -> float:
        with tf.device(device):
            matrix = tf.cast(tf.random.stateless_uniform((GPU_SIZE, GPU_SIZE), (0, 0)), dtype)

            def product() -> Any:
                return (matrix @ matrix)[0, 0].numpy()  # which waits for the result

            return _fastest(GPU_SIZE, product)

    return machine.highest("gpu-peak", measure, gpu=details.get("device_name", ""), dtype=dtype, tf32=tf32)


def _measured_in_child(count: int) -> float:
    """Measures in a child process, since this process may use fewer cores; its own are among those that are measured.

    Raises:
        OSError: the child cannot be started.
        subprocess.SubprocessError: it has failed, or took too long.
    """
    own = sorted(os.sched_getaffinity(0))
    others = [core for core in range(os.cpu_count() or 1) if core not in own]
    command = [sys.executable, "-m", __name__, *map(str, [*own, *others][:count])]
    environment = {name: value for name, value in os.environ.items() if name not in THREADS}
    child = subprocess.run(command, env=environment, timeout=MOST_SECONDS, stdout=subprocess.PIPE, check=True)
    return float(child.stdout)


def _measure_cores(cores: Sequence[int]) -> float:
    with contextlib.suppress(OSError):  # this process may not use them: then the peak is that of its own cores
        os.sched_setaffinity(0, cores)
    import numpy as np

    matrix = np.random.default_rng(0).random((CPU_SIZE, CPU_SIZE), np.float32)
    return _fastest(CPU_SIZE, lambda: matrix @ matrix)


def _fastest(size: int, product: Callable[[], Any]) -> float:
    """The FLOPs per second of the fastest product within some time, after one that warms up."""
    product()
    seconds: list[float] = []
    end = time.perf_counter() + SECONDS
    while not seconds or time.perf_counter() < end:
        begin = time.perf_counter()
        product()
        seconds.append(time.perf_counter() - begin)
    return 2 * size**3 / min(seconds)


if __name__ == "__main__":
    print(_measure_cores(list(map(int, sys.argv[1:]))))
