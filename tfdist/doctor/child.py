"""Child processes with a time limit, for what may crash or hang: native libraries, other programs, jobs.

A child leads a process group, which is killed as a whole when its time is over. It does not inherit the variables that
describe the job of this process, so that it is a process alone, and MPI does not take it for a member of that job.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from tfdist.jobs import cluster_file, job_environment
from tfdist.jobs.world import PMI, VARIABLES_OF_RANKS
from tfdist.launcher import limited

# By these names or beginnings of names, launchers describe a job to its processes. Settings of the user's, such as
# OMPI_MCA_btl and HOROVOD_GLOO_IFACE, are none of them.
OF_A_JOB = (
    cluster_file.TF_CONFIG,
    *(name for names in (*VARIABLES_OF_RANKS.values(), *PMI.values()) for name in names),
    *(job_environment.JOB, job_environment.CLUSTER, job_environment.TASK, job_environment.PROCESS),
    *(job_environment.SHARE_CORES, job_environment.ELASTIC, job_environment.OWN_NETWORK),
    *("HOROVOD_CROSS_", "HOROVOD_GLOO_RENDEZVOUS", "HOROVOD_CONTROLLER", "HOROVOD_HOSTNAME"),
    *("OMPI_COMM_WORLD_", "OMPI_MCA_ess", "OMPI_MCA_orte_", "OMPI_MCA_pmix", "ORTE_", "PMIX_", "PMI_", "SLURM_"),
)


@dataclass(frozen=True)
class Ended:
    """How a child has ended.

    Attributes:
        code: its exit code, negative for a signal; `None` if its time was over, or it could not be started.
        out: what it wrote to standard output.
        err: what it wrote to standard error.
        reason: why it has no exit code.
    """

    code: int | None
    out: str = ""
    err: str = ""
    reason: str = ""

    @property
    def is_well(self) -> bool:
        """Whether it ended with exit code 0."""
        return self.code == 0

    def how(self) -> str:
        """How it ended, as the end of a sentence."""
        if self.code is None:
            return self.reason
        if self.code < 0:
            return f"was ended by {signal.Signals(-self.code).name}"
        return f"ended with exit code {self.code}"

    def last_line(self) -> str:
        """The last line that it wrote, of errors if there are any."""
        lines = [line.strip() for line in (self.err or self.out).splitlines() if line.strip()]
        return lines[-1] if lines else ""


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of this process without those of its job, and `more`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OF_A_JOB)}
    return kept | dict(more or {})


def run(command: Sequence[str], seconds: float, more: Mapping[str, str] | None = None) -> Ended:
    """Runs a program to its end, or until its time is over.

    Args:
        command: the program and its arguments.
        seconds: its time.
        more: variables that it gets beside those of this process.
    """
    # In memory: who waits for a pipe would wait for every process that has inherited it, and a disk may be full.
    with _memory() as out, _memory() as err:
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environment(more),
                start_new_session=True,
            )
        except OSError as error:
            return Ended(None, reason=f"cannot be started: {error.strerror}")
        code = limited.wait(child, seconds)
        return Ended(code, _read(out), _read(err), f"did not end within {seconds:g} s")


def _memory() -> IO[bytes]:
    return os.fdopen(os.memfd_create("tfdist-doctor"), "w+b")


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", file.read().decode(errors="replace"))
