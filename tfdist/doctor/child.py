"""Child processes with a time limit, for what may crash or block: native libraries, other programs, jobs.

A child leads a process group, which is killed as a whole when the child ends or reaches its time limit. One that `run`
starts does not inherit the variables that describe the job of this process; otherwise MPI would take it for a member of
that job.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from tfdist.jobs import job_environment, sagemaker
from tfdist.jobs.tf_config import CLUSTER_SPEC
from tfdist.jobs.world import PMI, VARIABLES_OF_RANKS

SECONDS_TO_END = 5.0
# Names, or prefixes of names, of the variables with which launchers describe a job to its processes. The user's own
# settings, such as OMPI_MCA_btl and HOROVOD_GLOO_IFACE, are not among them.
JOB_VARIABLES = (
    *(job_environment.TF_CONFIG, CLUSTER_SPEC, sagemaker.HOSTS, sagemaker.CURRENT_HOST),
    *(name for names in (*VARIABLES_OF_RANKS.values(), *PMI.values()) for name in names),
    *(job_environment.JOB, job_environment.CLUSTER, job_environment.TASK, job_environment.PROCESS),
    *(job_environment.SHARE_CORES, job_environment.ELASTIC, job_environment.OWN_NETWORK),
    *("HOROVOD_CROSS_", "HOROVOD_GLOO_RENDEZVOUS", "HOROVOD_CONTROLLER", "HOROVOD_HOSTNAME"),
    *("OMPI_COMM_WORLD_", "OMPI_MCA_ess", "OMPI_MCA_orte_", "OMPI_MCA_pmix", "ORTE_", "PMIX_", "PMI_", "SLURM_"),
)


@dataclass(frozen=True)
class Result:
    """The result of a child process.

    Attributes:
        code: its exit code, negative for a signal; `None` if it exceeded its time limit or could not be started.
        out: its standard output.
        err: its standard error.
        reason: why it has no exit code.
    """

    code: int | None
    out: str = ""
    err: str = ""
    reason: str = ""

    @property
    def succeeded(self) -> bool:
        """Whether the exit code is 0."""
        return self.code == 0

    def description(self) -> str:
        """How the child ended, as the predicate of a sentence."""
        if self.code is None:
            return self.reason
        if self.code < 0:
            return f"was killed by {signal.Signals(-self.code).name}"
        return f"ended with exit code {self.code}"

    def last_line(self) -> str:
        """The last line of standard error, or of standard output if there is none."""
        lines = [line.strip() for line in (self.err or self.out).splitlines() if line.strip()]
        return lines[-1] if lines else ""


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of this process without those that describe its job, plus `extra`."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(JOB_VARIABLES)}
    return inherited | dict(extra or {})


def run(command: Sequence[str], seconds: float, extra: Mapping[str, str] | None = None) -> Result:
    """Runs a program until it ends or reaches its time limit.

    Args:
        command: the program and its arguments.
        seconds: the time limit.
        extra: additional environment variables.
    """
    # Output goes to memory: reading a pipe would wait for every process that inherited it, and a disk may be full.
    with _memory_file() as out, _memory_file() as err:
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environment(extra),
                start_new_session=True,
            )
        except OSError as error:
            return Result(None, reason=f"cannot be started: {error.strerror}")
        code = wait(child, seconds)
        return Result(code, _read(out), _read(err), f"did not finish within {seconds:g} s")


def wait(child: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Waits for a child to end, terminates it after `seconds`, and always kills the rest of its process group.

    Args:
        child: started with `start_new_session=True`.
        seconds: the time limit.

    Returns:
        The exit code of the child; `None` if it was terminated.
    """
    try:
        return child.wait(seconds)
    except subprocess.TimeoutExpired:
        child.terminate()  # so that a launcher can end its processes
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(SECONDS_TO_END)
        return None
    finally:
        kill(child)


def kill(child: subprocess.Popen[bytes]) -> None:
    """Kills a child and its process group, if they still run."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _memory_file() -> IO[bytes]:
    return os.fdopen(os.memfd_create("tfdist-doctor"), "w+b")


def _read(file: IO[bytes]) -> str:
    """The text of a file, without terminal escape sequences."""
    file.seek(0)
    return re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", file.read().decode(errors="replace"))
