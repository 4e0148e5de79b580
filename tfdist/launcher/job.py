"""What to start: one command in a number of processes."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from tfdist.errors import UsageError
from tfdist.jobs import job_environment
from tfdist.jobs.world import World
from tfdist.options import checked_seconds

# The environment variables that `mpirun` passes to other hosts.
TAKEN_ALONG = (
    job_environment.JOB,
    job_environment.SHARE_CORES,
    job_environment.RESTART,
    job_environment.START_SECONDS,
    job_environment.END_SECONDS,
    "PYTHONUNBUFFERED",
)
# An ssh connection is given up when its host has not answered this many probes, each after this many seconds.
SECONDS_BETWEEN_ANSWERS, ANSWERS_MISSED = 5, 4
# A name or an IPv4 address, or an IPv6 address in brackets. It is put on command lines, so it must not look like an
# option.
HOST = r"[A-Za-z0-9_][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.]+\]"
# Variables that `mpirun` and `horovodrun` set to the same value in all processes of a job, and differently for each
# job.
ALIKE_IN_A_JOB = ("PMIX_NAMESPACE", "HOROVOD_GLOO_RENDEZVOUS_PORT")


def new_name(
    world: World = World(),  # noqa: B008 - frozen
    environment: Mapping[str, str] = os.environ,
) -> str:
    """A name for a job that starts now; another job that starts in the same second gets another name.

    Args:
        world: of this process; processes of one job that `mpirun` or a similar program has started get the same name.
        environment: of this process.
    """
    shared = [str(world.cluster()), *(environment.get(name, "") for name in ALIKE_IN_A_JOB)]
    mark = secrets.token_bytes(16) if world.world_size == 1 else "\n".join(shared).encode()
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{hashlib.sha256(mark).hexdigest()[:8]}"


@dataclass(frozen=True)
class Job:
    """A command and the processes that run it.

    Attributes:
        command: the arguments of `python` in every process: `("-m", "module", ...)` or `("script.py", ...)`.
        workers: the number of processes that train.
        ps: the number of parameter servers; if there are any, there is also a coordinating process, the chief.
        hosts: the host of each process, started over ssh in this order; if empty, all start on this machine.
        ssh_options: options of `ssh` besides the host.
        mpi: start the processes with `mpirun`, which the launcher then supervises.
        restarts: how often the job is started again after a process failed.
        expose: do not isolate the job's network.
        start_seconds: how long the processes wait for each other at the start.
        log_dir: the folder for the output of each process.
        verbose: show the output of all processes, not only of the chief.
        name: the name of the job, the same in all processes and after a restart.

    Raises:
        UsageError: a number is out of range.
    """

    command: tuple[str, ...]
    workers: int = 2
    ps: int = 0
    hosts: tuple[str, ...] = ()
    ssh_options: tuple[str, ...] = ()
    mpi: bool = False
    restarts: int = 0
    expose: bool = False
    start_seconds: float = 60.0
    log_dir: Path = Path("logs")
    verbose: bool = False
    name: str = field(default_factory=new_name)

    def __post_init__(self) -> None:
        for option, value, least in (
            ("--workers", self.workers, 1),
            ("--ps", self.ps, 0),
            ("--restarts", self.restarts, 0),
        ):
            if value < least:
                raise UsageError(f"`{option}` is {value}", f"use {least} or more")
        checked_seconds("--start-seconds", self.start_seconds)
        if self.mpi and self.ps:
            raise UsageError(f"`--ps` is {self.ps}, but MPI has no parameter servers", "leave `--ps` or `--mpi` out")
        if not self.command:
            raise UsageError("There is no program to start", "name a script, or a module after `-m`")

    @property
    def roles(self) -> list[tuple[str, int]]:
        """The role and the index in that role of each process that the launcher starts, by rank."""
        if self.mpi:
            return [("mpirun", 0)]
        chief = [("chief", 0)] if self.ps else []
        return [*chief, *(("worker", i) for i in range(self.workers)), *(("ps", i) for i in range(self.ps))]

    def cluster(self, addresses: Sequence[str]) -> dict[str, list[str]]:
        """The addresses of all ranks by role, as in TF_CONFIG."""
        found: dict[str, list[str]] = {}
        for (role, _), address in zip(self.roles, addresses, strict=True):
            found.setdefault(role, []).append(address)
        return found

    def host(self, rank: int) -> str | None:
        """The host of a rank; `None` is this machine."""
        return self.hosts[rank % len(self.hosts)] if self.hosts and not self.mpi else None

    def ssh_arguments(self) -> list[str]:
        """The arguments of `ssh` before the host: the user's keys and agent, no questions, and limited waits."""
        limits = {
            "ConnectTimeout": int(self.start_seconds) or 1,
            "ServerAliveInterval": SECONDS_BETWEEN_ANSWERS,
            "ServerAliveCountMax": ANSWERS_MISSED,
        }
        # If an option is given twice, ssh uses the first.
        options = [part for name, value in limits.items() for part in ("-o", f"{name}={value}")]
        return ["-o", "BatchMode=yes", *self.ssh_options, *options]

    def argv(self) -> list[str]:
        """The command that the launcher starts for each rank.

        Raises:
            UsageError: `ssh` or Open MPI's `mpirun` is needed but not installed.
        """
        if self.hosts:
            _require("ssh", "install it; on Debian and Ubuntu with `apt-get install openssh-client`")
        program = [sys.executable, "-m", "tfdist.launcher.script", *self.command]
        if not self.mpi:
            return program
        _require_open_mpi()
        options = ["-np", str(self.workers), "--bind-to", "none", "--output-filename", str(self.log_dir.absolute())]
        if os.geteuid() == 0:
            options.append("--allow-run-as-root")
        if self.hosts:
            slots = [f"{host}:{count}" for host, count in Counter(self.hosts).items()]
            options += ["--host", ",".join(slots), "--mca", "plm_rsh_args", shlex.join(self.ssh_arguments())]
            # If a variable were not set, the other processes would stay on this machine.
            names = [*TAKEN_ALONG, *(["PYTHONPATH"] if "PYTHONPATH" in os.environ else [])]
            options += [part for name in names for part in ("-x", name)]
        else:
            options.append("--oversubscribe")
        return ["mpirun", *options, *program]


def _require(program: str, hint: str) -> None:
    if shutil.which(program) is None:
        raise UsageError(f"There is no `{program}` on the path", hint)


def _require_open_mpi() -> None:
    _require("mpirun", "install MPI; on Debian and Ubuntu with `apt-get install openmpi-bin`")
    said = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False).stdout
    if "Open MPI" not in said:
        raise UsageError(
            f"`{shutil.which('mpirun')}` is `{said.strip().partition(chr(10))[0]}`, not Open MPI's",
            "put Open MPI's first on the path; on Debian and Ubuntu use `update-alternatives --config mpirun`",
        )


def parse_hosts(text: str) -> tuple[str, ...]:
    """The hosts of `a:2,b,[fd00::1]:2`, once per process: a, a, b, [fd00::1], [fd00::1].

    Raises:
        UsageError: a name that is not valid for a host, or a count that is not a number from 1.
    """
    return tuple(host for item in text.split(",") if item.strip() for host in _counted(item.strip(), ":"))


def read_hostfile(path: Path) -> tuple[str, ...]:
    """The same for a file with one line `a slots=2` per host, as `mpirun` reads it; `#` begins a comment.

    Raises:
        UsageError: the file cannot be read, or a line cannot be understood.
    """
    try:
        lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
    except OSError as error:
        raise UsageError(f"The host file `{path}` cannot be read: {error.strerror}", "name another file") from error
    return tuple(host for line in lines if line for host in _counted(" ".join(line.split()), " slots="))


def _counted(text: str, separator: str) -> list[str]:
    found = re.fullmatch(f"({HOST})(?:{separator}([0-9]{{1,6}}))?", text)
    if found is None or (found[2] and int(found[2]) < 1) or not _is_host(found[1]):
        raise UsageError(
            f"`{text}` is not a host with its number of processes",
            f"write it as `name{separator}2`, or `name` for one, and an IPv6 address as `[fd00::1]{separator}2`; "
            "to set the user, use `--ssh-options`",
        )
    return [found[1]] * int(found[2] or 1)


def _is_host(text: str) -> bool:
    if not text.startswith("["):
        return True
    try:
        return bool(ipaddress.IPv6Address(text.strip("[]")))
    except ValueError:
        return False
