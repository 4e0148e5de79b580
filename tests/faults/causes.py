"""How the faults of the matrix are caused from outside; exceptions and exits are in `tests/faults/program.py`."""

import os
import shutil
import signal
import subprocess
import uuid
from pathlib import Path

import pytest

from tests.faults.strangers import Strangers
from tests.processes.hosts import run_or_skip

UNRESOLVABLE = "no-such-host.invalid"
FRAMES_OF_MEETING = 40
LOSS, DELAY_SECONDS = 0.3, 0.3
DISK = "16m"
CGROUPS = Path("/sys/fs/cgroup/memory")
MEMORY_BYTES = 256 << 20  # more than the process has then
CLOCK_AHEAD = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += 3600;
    return result;
}
time_t time(time_t *seconds) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (seconds) *seconds = now.tv_sec;
    return now.tv_sec;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}
"""


def nothing(job):
    """The program causes the fault itself."""


def _send(number):
    return lambda job: os.kill(job.pid, number)


def _host(job):
    names = [f"{role} {job.row.roles[:position].count(role)}" for position, role in enumerate(job.row.roles)]
    return names.index(job.row.role)


def _cut(job):
    job.hosts.cut.add(_host(job))


def _mute(job):
    job.hosts.mute.add(_host(job))


def _lose(job):
    job.hosts.loss = LOSS


def _delay(job):
    job.hosts.delay_seconds = DELAY_SECONDS


def _limit_memory(job):
    """Gives the process a little memory; the kernel kills it when it takes more."""
    group = CGROUPS / f"tfdist-{uuid.uuid4().hex}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(MEMORY_BYTES))
        job.at_end(group.rmdir)
        (group / "cgroup.procs").write_text(str(job.pid))
    except OSError as error:
        pytest.skip(f"this system does not allow memory cgroups: {error}")


def clock_ahead(job):
    """The environment of a process whose clock is an hour ahead of the others'."""
    if shutil.which("gcc") is None:
        pytest.skip("a clock that is ahead needs gcc")
    source, library = job.folder / "clock.c", job.folder / "clock.so"
    source.write_text(CLOCK_AHEAD)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return {"LD_PRELOAD": str(library)}


def _send_strangers(job):
    job.strangers = Strangers(job)
    job.at_end(job.strangers.close)


def mount_small_disk(job):
    folder = job.folder / "checkpoints"
    run_or_skip("mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", folder)
    job.at_end(lambda: subprocess.run(["umount", "--lazy", folder], check=False))


def _fill_disk(job):
    with (job.folder / "checkpoints" / "filler").open("wb", buffering=0) as file:
        try:
            while file.write(bytes(1 << 16)):
                pass
        except OSError:
            return


CAUSES = {
    "SIGKILL": _send(signal.SIGKILL),
    "SIGTERM": _send(signal.SIGTERM),
    "SIGSTOP": _send(signal.SIGSTOP),
    "cut": _cut,
    "one-way": _mute,
    "loss": _lose,
    "delay": _delay,
    "memory": _limit_memory,
    "strangers": _send_strangers,
    "full disk": _fill_disk,
}
