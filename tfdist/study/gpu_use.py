"""How busy the GPUs of this machine are while a run is measured, as NVIDIA's `nvidia-smi` tells.

Source: the fields `utilization.gpu`, the percentage of a sample's time in which a kernel ran, and `memory.used` of
NVIDIA's management library (NVML), https://docs.nvidia.com/deploy/nvml-api.
"""

from __future__ import annotations

import contextlib
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

PROGRAM = "nvidia-smi"
EVERY_MILLISECONDS = 500
QUERY = (
    "--query-gpu=index,utilization.gpu,memory.used",
    "--format=csv,noheader,nounits",
    f"--loop-ms={EVERY_MILLISECONDS}",
)


@dataclass
class GpuUse:
    """What was seen in a run; `None` where there is no GPU, or its driver does not tell.

    Attributes:
        busy: GPUs that compute at a time, the mean over the run: 1.5 of two is 75 %.
        memory_bytes: the most that was in use on one GPU, by whatever process.
    """

    busy: float | None = None
    memory_bytes: int | None = None


@contextlib.contextmanager
def watched() -> Iterator[GpuUse]:
    """The context of a run; what it yields is filled at its end."""
    found = GpuUse()
    if shutil.which(PROGRAM) is None:
        yield found
        return
    with tempfile.TemporaryFile("w+") as output:
        watcher = subprocess.Popen(
            [PROGRAM, *QUERY], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.DEVNULL
        )
        try:
            yield found
        finally:
            watcher.kill()
            watcher.wait()
            output.seek(0)
            used = of_samples(output)
            found.busy, found.memory_bytes = used.busy, used.memory_bytes


def of_samples(lines: Iterable[str]) -> GpuUse:
    """The use that samples show, each a line of a GPU's index, its utilization in percent, and its memory in MiB.

    >>> of_samples(["0, 100, 1000", "1, 50, 10", "0, 80, 2000", "1, 30, 10", "0, 9"])
    GpuUse(busy=1.3, memory_bytes=2097152000)
    >>> of_samples(["0, [N/A], [N/A]", "Unable to determine the device handle"])
    GpuUse(busy=None, memory_bytes=None)
    """
    percentages: dict[str, list[float]] = {}
    memory: list[int] = []
    for line in lines:
        with contextlib.suppress(ValueError):  # such as the half of a line that was written last
            index, busy, mebibytes = (part.strip() for part in line.split(","))
            percentages.setdefault(index, []).append(float(busy))
            memory.append(int(mebibytes) * 2**20)
    if not memory:
        return GpuUse()
    return GpuUse(sum(map(statistics.mean, percentages.values())) / 100, max(memory))
