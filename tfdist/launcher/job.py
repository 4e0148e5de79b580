"""A job: a command, and the processes and hosts that run it."""

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
EXPORTED_VARIABLES = (
    job_environment.JOB,
    job_environment.SECRET,
    job_environment.SHARE_CORES,
    job_environment.RESTART,
    job_environment.START_SECONDS,
    job_environment.END_SECONDS,
    "PYTHONUNBUFFERED",
)
# The length of the secret that a job for a scheduler gets.
SECRET_BYTES = 32
# ssh probes the host after this many seconds of silence, and closes the connection after this many unanswered probes.
PROBE_SECONDS, MAX_UNANSWERED_PROBES = 5, 4
# A name, an IPv4 address, or an IPv6 address in brackets. It becomes part of command lines, so it must not look like an
# option.
HOST = r"[A-Za-z0-9_][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.]+\]"
# Variables that `mpirun` and `horovodrun` set to the same value in all processes of a job, and to a different value for
# each job.
JOB_ID_VARIABLES = ("PMIX_NAMESPACE", "HOROVOD_GLOO_RENDEZVOUS_PORT")


def new_name(
    world: World = World(),  # noqa: B008 - frozen
    environment: Mapping[str, str] = os.environ,
) -> str:
    """Returns a name for a job that starts now, unique even among the jobs that start in the same second.

    Args:
        world: the world of this process; all processes of a job that `mpirun` or a similar program has started get the
            same name.
        environment: the environment variables of this process.
    """
    shared = [str(world.cluster()), *(environment.get(name, "") for name in JOB_ID_VARIABLES)]
    mark = secrets.token_bytes(16) if world.world_size == 1 else "\n".join(shared).encode()
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{hashlib.sha256(mark).hexdigest()[:8]}"


@dataclass(frozen=True)
class Job:
    """A command and the processes that run it.

    Attributes:
        command: the arguments of `python` in every process: `("-m", "module", ...)` or `("script.py", ...)`.
        workers: the number of processes that train.
        ps: the number of parameter servers; with any, there is also a coordinating process, the chief.
        hosts: the host of each process, started over ssh in this order; if empty, all start on this machine.
        ssh_options: further options of `ssh`.
        mpi: start the processes with `mpirun`, which the launcher supervises.
        on: "ray" to start each process in an actor of a Ray cluster; empty for `hosts`, or this machine.
        restarts: how often the job may be started again after a process has failed.
        expose: do not isolate the job's network.
        start_seconds: how long the processes wait for each other at the start.
        log_dir: the folder for the output of each process.
        verbose: show the output of all processes, not only that of the chief.
        name: the name of the job, which stays the same after a restart.

    Raises:
        UsageError: a number is out of range.
    """

    command: tuple[str, ...]
    workers: int = 2
    ps: int = 0
    hosts: tuple[str, ...] = ()
    ssh_options: tuple[str, ...] = ()
    mpi: bool = False
    on: str = ""
    restarts: int = 0
    expose: bool = False
    start_seconds: float = 60.0
    log_dir: Path = Path("logs")
    verbose: bool = False
    name: str = field(default_factory=new_name)

    def __post_init__(self) -> None:
        for option, value, minimum in (
            ("--workers", self.workers, 1),
            ("--ps", self.ps, 0),
            ("--restarts", self.restarts, 0),
        ):
            if value < minimum:
                raise UsageError(f"`{option}` is {value}", f"use {minimum} or more")
        checked_seconds("--start-seconds", self.start_seconds)
        if self.mpi and self.ps:
            raise UsageError(f"`--ps` is {self.ps}, but MPI has no parameter servers", "leave `--ps` or `--mpi` out")
        if self.on:
            self._check_cluster()
        if not self.command:
            raise UsageError("There is no program to start", "name a script, or a module after `-m`")

    def _check_cluster(self) -> None:
        if self.on != "ray":
            raise UsageError(f"`--on` is `{self.on}`", "use `ray`")
        for option, is_set in (("--hosts", self.hosts), ("--mpi", self.mpi)):
            if is_set:
                raise UsageError(
                    f"`{option}` is set with `--on {self.on}`, which starts the processes itself",
                    f"leave `{option}` or `--on` out",
                )

    @property
    def roles(self) -> list[tuple[str, int]]:
        """The role of each process that the launcher starts, and its index within the role, by rank."""
        if self.mpi:
            return [("mpirun", 0)]
        chief = [("chief", 0)] if self.ps else []
        return [*chief, *(("worker", i) for i in range(self.workers)), *(("ps", i) for i in range(self.ps))]

    def cluster(self, addresses: Sequence[str]) -> dict[str, list[str]]:
        """Groups the addresses of all ranks by role, as in TF_CONFIG."""
        cluster: dict[str, list[str]] = {}
        for (role, _), address in zip(self.roles, addresses, strict=True):
            cluster.setdefault(role, []).append(address)
        return cluster

    def host(self, rank: int) -> str | None:
        """Returns the host of a rank; `None` for this machine."""
        return self.hosts[rank % len(self.hosts)] if self.hosts and not self.mpi else None

    def ssh_arguments(self) -> list[str]:
        """Returns the arguments of `ssh` before the host: no password prompts, and limited waiting times."""
        limits = {
            "ConnectTimeout": int(self.start_seconds) or 1,
            "ServerAliveInterval": PROBE_SECONDS,
            "ServerAliveCountMax": MAX_UNANSWERED_PROBES,
        }
        # If an option is given twice, ssh uses the first.
        options = [part for name, value in limits.items() for part in ("-o", f"{name}={value}")]
        return ["-o", "BatchMode=yes", *self.ssh_options, *options]

    def argv(self) -> list[str]:
        """Returns the command that the launcher starts for each rank.

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
            # If `-x` named an unset variable, `mpirun` would start all processes on this machine.
            names = [*EXPORTED_VARIABLES, *(["PYTHONPATH"] if "PYTHONPATH" in os.environ else [])]
            options += [part for name in names for part in ("-x", name)]
        else:
            options.append("--oversubscribe")
        return ["mpirun", *options, *program]


def _require(program: str, hint: str) -> None:
    if shutil.which(program) is None:
        raise UsageError(f"There is no `{program}` on the path", hint)


def _require_open_mpi() -> None:
    _require("mpirun", "install MPI; on Debian and Ubuntu with `apt-get install openmpi-bin`")
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False).stdout
    if "Open MPI" not in version:
        raise UsageError(
            f"`{shutil.which('mpirun')}` is `{version.strip().partition(chr(10))[0]}`, not Open MPI's `mpirun`",
            "put Open MPI's `mpirun` first on the path; on Debian and Ubuntu use `update-alternatives --config mpirun`",
        )


def parse_hosts(text: str) -> tuple[str, ...]:
    """Returns the host of each process: for `a:2,b,[fd00::1]:2` a, a, b, [fd00::1], [fd00::1].

    Raises:
        UsageError: a host name is not valid, or a count is not a positive integer.
    """
    return tuple(host for item in text.split(",") if item.strip() for host in _counted(item.strip(), ":"))


def read_hostfile(path: Path) -> tuple[str, ...]:
    """Returns the host of each process from a file in the format of `mpirun`: lines `a slots=2` and `#` comments.

    Raises:
        UsageError: the file cannot be read, or a line is not valid.
    """
    try:
        lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
    except OSError as error:
        raise UsageError(f"The host file `{path}` cannot be read: {error.strerror}", "name another file") from error
    return tuple(host for line in lines if line for host in _counted(" ".join(line.split()), " slots="))


def _counted(text: str, separator: str) -> list[str]:
    match = re.fullmatch(f"({HOST})(?:{separator}([0-9]{{1,6}}))?", text)
    if match is None or (match[2] and int(match[2]) < 1) or not _is_valid_host(match[1]):
        raise UsageError(
            f"`{text}` is not a host with its number of processes",
            f"write it as `name{separator}2`, or `name` for a single process, and an IPv6 address as "
            f"`[fd00::1]{separator}2`; to set the user, use `--ssh-options`",
        )
    return [match[1]] * int(match[2] or 1)


def _is_valid_host(text: str) -> bool:
    if not text.startswith("["):
        return True
    try:
        return bool(ipaddress.IPv6Address(text.strip("[]")))
    except ValueError:
        return False


def refuse_hosts(job: Job, target: str, hint: str) -> None:
    """Raises a `UsageError` if the job names hosts, although the scheduler `target` chooses them."""
    if job.hosts:
        raise UsageError(f"`--hosts` is `{','.join(job.hosts)}` with `--emit {target}`", f"leave it out: {hint}")
