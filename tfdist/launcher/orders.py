"""What the agent of a host is told to start."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.jobs import job_environment, ports
from tfdist.launcher import agent
from tfdist.launcher.job import Job
from tfdist.launcher.process import Process

# Open MPI's default of `odls_base_sigkill_timeout`.
SECONDS_TO_END_OF_MPIRUN = 1.0


def has_terminal(process: Process) -> bool:
    """Whether the process writes to a terminal: a progress bar moves on a terminal alone."""
    return process.rank == 0 and sys.stdout is not None and sys.stdout.isatty()


def of_host(
    job: Job, processes: Sequence[Process], cluster: str | None, environment: Mapping[str, str]
) -> dict[str, Any]:
    """The part of a job that one host runs.

    Args:
        job: the job.
        processes: of this host, by their number there.
        cluster: the addresses of all processes by role, as JSON; `None` if the processes need none.
        environment: the variables of all processes.
    """
    training = [process for process in processes if process.role == "worker"]
    share = {process: [number, len(training)] for number, process in enumerate(training)}
    return {
        "argv": job.argv(),
        "cwd": os.getcwd(),
        "environment": dict(environment),
        "cluster": cluster,
        "size": len(job.roles),
        "processes": [
            {
                "role": process.role,
                "index": process.index,
                "share": share.get(process),
                "output": agent.TERMINAL if has_terminal(process) else agent.TOGETHER if process.rank else agent.APART,
            }
            for process in processes
        ],
    }


def environment(job: Job, restart: int, elastic: bool, closed: bool) -> dict[str, str]:
    """The variables of all processes of a job that was restarted so often; `closed`: it has a network of its own."""
    known = {
        ports.SHARE: "1",
        "PYTHONUNBUFFERED": "1",
        job_environment.JOB: job.name,
        job_environment.TYPED: shlex.join(sys.orig_argv),
        job_environment.RESTART: str(restart),
        job_environment.START_SECONDS: f"{job.start_seconds:g}",
        job_environment.END_SECONDS: f"{SECONDS_TO_END_OF_MPIRUN if job.mpi else agent.SECONDS_TO_END:g}",
    }
    if job.mpi:  # which has its own way to tell its processes who they are
        known[job_environment.SHARE_CORES] = "1"
    if elastic:
        known[job_environment.ELASTIC] = "1"
    if closed:
        known[job_environment.OWN_NETWORK] = "1"
    return known
