"""How the faults of the matrix are caused from outside; exceptions and exits are in `tests/faults/program.py`."""

import os
import signal
import subprocess
import uuid
from pathlib import Path

import pytest

from tests.processes.hosts import run_or_skip

UNRESOLVABLE = "no-such-host.invalid"
FRAMES_OF_MEETING = 40
LOSS, DELAY_SECONDS = 0.3, 0.3
DISK = "16m"
CGROUPS = Path("/sys/fs/cgroup/memory")
MEMORY_BYTES = 256 << 20  # more than the process has then


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
    "full disk": _fill_disk,
}
