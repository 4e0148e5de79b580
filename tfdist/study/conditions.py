"""The conditions under which a run is measured: other programs on its cores, and the speed of the processor.

Sources: the runnable threads in `/proc/loadavg` and the times in `/proc/stat` (proc(5)). The speed is that of a loop in
this process, by the time that it has a core: the fastest of many passes, which a throttled clock, or a program on the
other half of the same core, makes slower, and a thread that only waits for its turn does not.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

LOAD = Path("/proc/loadavg")
SAMPLES, SAMPLE_SECONDS = 10, 0.03
PASSES, ADDITIONS = 100, 10_000


@dataclass
class Conditions:
    """The conditions of a run; `None` for what cannot be measured here.

    Attributes:
        cores: the number of cores on which this process may run.
        load_before: the mean number of runnable threads of other programs just before the run.
        cores_of_others: the mean number of this process' cores that other programs used during the run.
        loop_seconds: the seconds of the loop, before and after the run.
    """

    cores: int
    load_before: float | None = None
    cores_of_others: float | None = None
    loop_seconds: tuple[float, ...] = ()


@contextlib.contextmanager
def watched() -> Iterator[Conditions]:
    """Measures the conditions of what the context runs in child processes; the object is filled at the end."""
    conditions = Conditions(len(os.sched_getaffinity(0)), load_of_others(), loop_seconds=(loop_seconds(),))
    busy, our, started = _busy_seconds(), cpu_seconds(), time.perf_counter()
    try:
        yield conditions
    finally:
        seconds = time.perf_counter() - started
        of_others = _busy_seconds() - busy - (cpu_seconds() - our)
        conditions.cores_of_others = max(0.0, of_others / seconds)
        conditions.loop_seconds += (loop_seconds(),)


def load_of_others() -> float | None:
    """The mean number of runnable threads, without this one; `None` where the system does not tell it."""
    counts = []
    for _ in range(SAMPLES):
        time.sleep(SAMPLE_SECONDS)
        try:
            runnable = LOAD.read_text(encoding="ascii").split()[3].partition("/")[0]
            counts.append(max(0, int(runnable) - 1))
        except (OSError, ValueError, IndexError):
            return None
    return sum(counts) / len(counts)


def loop_seconds() -> float:
    """The processor time of the fastest of many passes through the same loop."""
    return min(_pass_seconds() for _ in range(PASSES))


def _pass_seconds() -> float:
    started, total = time.thread_time(), 0
    for number in range(ADDITIONS):
        total += number
    return time.thread_time() - started


def cpu_seconds() -> float:
    """The processor time of this process and of its children that have ended, in user and system mode."""
    return sum(os.times()[:4])


def _busy_seconds() -> float:
    """The seconds in which the cores of this process computed, or were taken by the host of a virtual machine."""
    per_core: list[Any] = psutil.cpu_times(percpu=True)
    cores = os.sched_getaffinity(0)
    return sum(_busy(times) for core, times in enumerate(per_core) if core in cores)


def _busy(times: Any) -> float:
    # `user` and `nice` include what guests of this machine use.
    return sum(times) - sum(getattr(times, name, 0.0) for name in ("idle", "iowait", "guest", "guest_nice"))
