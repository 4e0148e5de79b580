"""Checks the cores, memory and open files that this process may use, and the clock."""

from __future__ import annotations

import os
import resource
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil

from tfdist.doctor.finding import Finding, note, ok, problem
from tfdist.jobs import job_environment
from tfdist.jobs.job_environment import cores
from tfdist.launcher import resources

GIB = 1 << 30
# TensorFlow and Keras alone take 0.6 GiB per process.
LEAST_MEMORY_BYTES = GIB
# Docker's default is 64 MiB; NCCL and MPI exchange tensors between processes through this folder.
SHARED_FOLDER, LEAST_SHARED_BYTES = Path("/dev/shm"), 256 << 20
# A launcher needs one per process, an agent three, and training opens its own files.
LEAST_FILES, USUAL_FILES = 128, 1024
CGROUPS = Path("/sys/fs/cgroup")
CGROUP_OF_PROCESS = Path("/proc/self/cgroup")
UNLIMITED_BYTES = 1 << 60  # cgroup version 1 writes a number close to 2 ** 63 if there is no limit
THREADS = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")


def findings() -> list[Finding]:
    """The findings about this machine."""
    limits, memory = limits_of_cgroup(), psutil.virtual_memory()
    return [
        *core_findings(limits, cores(), os.cpu_count() or 1),
        *load_findings(os.getloadavg()[0], os.cpu_count() or 1),
        *_threads(),
        *memory_findings(limits, memory.total, memory.available),
        *_address_space(),
        *_shared_memory(),
        *open_files(),
        *clock(Path(__file__)),
    ]


@dataclass(frozen=True)
class Limits:
    """The limits of a container or another cgroup; `None` means unlimited.

    Attributes:
        cpus: the mean number of cores that may compute at a time.
        memory_bytes: the memory of all processes together.
    """

    cpus: float | None = None
    memory_bytes: int | None = None


def limits_of_cgroup(root: Path = CGROUPS, names: Path = CGROUP_OF_PROCESS) -> Limits:
    """The tightest limits among the cgroup of this process and its parents.

    Args:
        root: the mount point of cgroups; version 2, or the folders `cpu` and `memory` of version 1.
        names: the file that names the cgroup of this process.

    Source: the Linux documentation, admin-guide/cgroup-v2.rst and scheduler/sched-bwc.rst.
    """
    cpus, memory = [], []
    for folder in _folders(root, names):
        words = (_read(folder / "cpu.max") or "").split()
        quota = [words[0], words[1]] if len(words) == 2 else []
        quota = quota or [_read(folder / "cpu.cfs_quota_us") or "", _read(folder / "cpu.cfs_period_us") or ""]
        if all(part.isdigit() for part in quota) and int(quota[1]):
            cpus.append(int(quota[0]) / int(quota[1]))
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = _read(folder / name) or ""
            if limit.isdigit() and int(limit) < UNLIMITED_BYTES:
                memory.append(int(limit))
    return Limits(min(cpus, default=None), min(memory, default=None))


def _folders(root: Path, names: Path) -> Iterator[Path]:
    """The folders of the cgroups of this process and of their parents."""
    for line in (_read(names) or "0::/").splitlines():
        _, controllers, name = [*line.split(":", 2), "", ""][:3]
        for controller in controllers.split(",") if controllers else [""]:
            top = root / controller
            # In a container the name may be the one on the host; the container's limits are then at the top.
            folder = top / name.lstrip("/")
            yield from (path for path in (folder, *folder.parents) if path == top or top in path.parents)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def core_findings(limits: Limits, usable: int, total: int) -> Iterator[Finding]:
    """Checks that this process may use all cores.

    Args:
        limits: the limits of its cgroup.
        usable: the number of cores on which this process may run.
        total: the number of cores of the machine.
    """
    if limits.cpus is not None and limits.cpus < usable:
        yield note(
            "cores",
            f"This container may compute on {limits.cpus:g} cores at a time, and TensorFlow starts threads for "
            f"{usable}",
            f"use `--strategy-option threads={max(1, int(limits.cpus))}`, or give the container more",
        )
    elif usable < total:
        yield note(
            "cores",
            f"This process may use {usable} of the {total} cores of the machine",
            "if it should use more, see `taskset`, or the options of the scheduler, such as `--cpus-per-task`",
        )
    else:
        yield ok("cores", f"{usable}, and this process may use all of them")


def _threads() -> Iterator[Finding]:
    for name in THREADS:
        if name in os.environ:
            yield note(
                "cores",
                f"`{name}` is `{os.environ[name]}`, which sets the number of threads of TensorFlow or NumPy",
                f"unset `{name}`, and use `--strategy-option threads=N`",
            )


def load_findings(load: float, machine_cores: int) -> Iterator[Finding]:
    """Says whether programs wait for the cores of this machine; `load` is the mean over the last minute."""
    excess = job_environment.excess_load(load, machine_cores)
    if excess is None:
        yield ok("load", f"{load:.1f} in the last minute")
    else:
        yield note("load", excess, "end other programs, or wait, before you measure or start a job")


def memory_findings(limits: Limits, total: int, available: int) -> Iterator[Finding]:
    """Checks that there is enough memory; `total` and `available` are in bytes, for the machine."""
    if limits.memory_bytes is not None and limits.memory_bytes < total:
        yield note(
            "memory",
            f"This container may use {limits.memory_bytes / GIB:.1f} GiB of the {total / GIB:.1f} GiB of the machine, "
            "and is killed above that",
            "give the container more, or see with `tfdist memory` how much training needs",
        )
    if available < LEAST_MEMORY_BYTES:
        yield problem("memory", f"{available / GIB:.1f} GiB are available", "end other programs, or add memory")
    else:
        yield ok("memory", f"{total / GIB:.1f} GiB, of which {available / GIB:.1f} GiB are available")


def _address_space() -> Iterator[Finding]:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        yield note(
            "memory",
            f"A process may reserve {limit / GIB:.1f} GiB of address space, and TensorFlow reserves more than it uses",
            "raise it with `ulimit -v unlimited`",
        )


def _shared_memory() -> Iterator[Finding]:
    try:
        usage = shutil.disk_usage(SHARED_FOLDER)
    except OSError as error:
        yield note("shared memory", f"`{SHARED_FOLDER}` cannot be used: {error.strerror}", f"mount `{SHARED_FOLDER}`")
        return
    if usage.free < LEAST_SHARED_BYTES:
        yield note(
            "shared memory",
            f"`{SHARED_FOLDER}` has {usage.free >> 20} MiB free, and NCCL and MPI use it to exchange tensors",
            "start the container with `--shm-size=1g` (Docker), or mount a larger `/dev/shm`",
        )
    else:
        yield ok("shared memory", f"`{SHARED_FOLDER}` has {usage.free / GIB:.1f} GiB free")


def open_files() -> Iterator[Finding]:
    """Checks that a process may open enough files for a job."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    count = "any number of" if hard == resource.RLIM_INFINITY else f"{hard:,}"
    sentence = f"A process may open {count} files"
    hint = f"an administrator can raise the limit (`ulimit -Hn {USUAL_FILES * 64}`, or /etc/security/limits.conf)"
    if hard != resource.RLIM_INFINITY and hard < LEAST_FILES:
        yield problem("open files", f"{sentence}, which is too few for a job", hint)
    elif hard != resource.RLIM_INFINITY and hard < USUAL_FILES:
        most = (hard - resources.RESERVED_FILES) // 3
        yield note("open files", f"{sentence}, which is enough for {most} processes on a host", hint)
    else:
        yield ok("open files", sentence)


def clock(file: Path) -> Iterator[Finding]:
    """Checks that the clock is not earlier than the last change of `file`, a file of tfdist."""
    now = datetime.now(UTC)
    written = datetime.fromtimestamp(file.stat().st_mtime, UTC)
    if now < written:
        yield problem(
            "clock",
            f"The clock shows {now:%Y-%m-%d %H:%M} UTC, but `{file}` was written at {written:%Y-%m-%d %H:%M}",
            "set the clock (`timedatectl set-ntp true`): downloads and file times depend on it",
        )
    else:
        yield ok("clock", f"{now:%Y-%m-%d %H:%M} UTC, time zone {time.tzname[time.localtime().tm_isdst > 0]}")
