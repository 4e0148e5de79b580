"""What to start: the same command in so many processes."""

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

from tfdist.cluster import job_environment
from tfdist.cluster.world import World
from tfdist.errors import UsageError
from tfdist.options import checked_seconds

# What `mpirun` takes along to other hosts.
TAKEN_ALONG = (
    job_environment.JOB,
    job_environment.SHARE_CORES,
    job_environment.RESTART,
    job_environment.START_SECONDS,
    "PYTHONUNBUFFERED",
)
# An ssh connection whose host has not answered for so long, so often, is given up.
SECONDS_BETWEEN_ANSWERS, ANSWERS_MISSED = 5, 4
# A name or an IPv4 address; an IPv6 address in brackets. It goes on command lines, where no option may be taken for it.
HOST = r"[A-Za-z0-9_][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.]+\]"
# What `mpirun` and `horovodrun` set alike in the processes of one job, and otherwise in those of another.
ALIKE_IN_A_JOB = ("PMIX_NAMESPACE", "HOROVOD_GLOO_RENDEZVOUS_PORT")


def new_name(
    world: World = World(),  # noqa: B008 - frozen
    environment: Mapping[str, str] = os.environ,
) -> str:
    """A name for a job that starts now, which no other job has that starts in the same second.

    Args:
        world: of a process that `mpirun` or the like has started: those of one job get one name in the same second.
        environment: of this process.
    """
    shared = [str(world.cluster()), *(environment.get(name, "") for name in ALIKE_IN_A_JOB)]
    mark = secrets.token_bytes(16) if world.world_size == 1 else "\n".join(shared).encode()
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{hashlib.sha256(mark).hexdigest()[:8]}"


@dataclass(frozen=True)
class Job:
    """A command and the processes that run it.

    Attributes:
        command: what every process runs after `python`: `("-m", "module", ...)` or `("script.py", ...)`.
        workers: the processes that train.
        ps: the parameter servers; with any, there is a coordinating process, the chief, as well.
        hosts: where to start them, in turn, over ssh; empty is this machine.
        ssh_options: what `ssh` is given besides the host.
        mpi: have `mpirun` start them, which the launcher keeps in their place.
        restarts: how often the job is started again after a process failed.
        expose: leave the job in this machine's network, open to others.
        start_seconds: how long the processes wait for each other at the start.
        log_dir: where each process' output goes.
        verbose: show the output of all processes, not the chief's alone.
        name: the same in all processes, and after a restart.

    Raises:
        UsageError: a number that cannot be.
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
            raise UsageError(f"`--ps` is {self.ps}, and MPI knows no parameter servers", "leave `--ps` or `--mpi` out")
        if not self.command:
            raise UsageError("There is no program to start", "name a script, or a module after `-m`")

    @property
    def roles(self) -> list[tuple[str, int]]:
        """The role of each process that the launcher starts and its number in that role, by rank."""
        if self.mpi:
            return [("mpirun", 0)]
        chief = [("chief", 0)] if self.ps else []
        return [*chief, *(("worker", i) for i in range(self.workers)), *(("ps", i) for i in range(self.ps))]

    def cluster(self, addresses: Sequence[str]) -> dict[str, list[str]]:
        """The addresses of all ranks by role, as TF_CONFIG has them."""
        found: dict[str, list[str]] = {}
        for (role, _), address in zip(self.roles, addresses, strict=True):
            found.setdefault(role, []).append(address)
        return found

    def host(self, rank: int) -> str | None:
        """Where a rank runs; `None` is this machine."""
        return self.hosts[rank % len(self.hosts)] if self.hosts and not self.mpi else None

    def ssh_arguments(self) -> list[str]:
        """What `ssh` is given before the host: the user's own keys and agent, no question, no waiting for ever."""
        limits = {
            "ConnectTimeout": int(self.start_seconds) or 1,
            "ServerAliveInterval": SECONDS_BETWEEN_ANSWERS,
            "ServerAliveCountMax": ANSWERS_MISSED,
        }
        # Of an option that is given twice, ssh takes the first.
        options = [part for name, value in limits.items() for part in ("-o", f"{name}={value}")]
        return ["-o", "BatchMode=yes", *self.ssh_options, *options]

    def argv(self) -> list[str]:
        """What the launcher starts for each role.

        Raises:
            UsageError: `ssh` or Open MPI's `mpirun` is needed, and not installed.
        """
        if self.hosts:
            _require("ssh", "install it as your system does it: on Debian and Ubuntu `apt-get install openssh-client`")
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
            # A variable that is not set would keep the others here.
            names = [*TAKEN_ALONG, *(["PYTHONPATH"] if "PYTHONPATH" in os.environ else [])]
            options += [part for name in names for part in ("-x", name)]
        else:
            options.append("--oversubscribe")
        return ["mpirun", *options, *program]


def _require(program: str, hint: str) -> None:
    if shutil.which(program) is None:
        raise UsageError(f"There is no `{program}` on the path", hint)


def _require_open_mpi() -> None:
    _require("mpirun", "install MPI as your system does it: on Debian and Ubuntu `apt-get install openmpi-bin`")
    said = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False).stdout
    if "Open MPI" not in said:
        raise UsageError(
            f"`{shutil.which('mpirun')}` says that it is `{said.strip().partition(chr(10))[0]}`, and not Open MPI's",
            "put Open MPI's first on the path; on Debian and Ubuntu `update-alternatives --config mpirun` chooses",
        )


def parse_hosts(text: str) -> tuple[str, ...]:
    """The hosts of `a:2,b,[fd00::1]:2`, each as often as it gets a process: a, a, b, [fd00::1], [fd00::1].

    Raises:
        UsageError: what no host can be called, or a count that is no number from 1.
    """
    return tuple(host for item in text.split(",") if item.strip() for host in _counted(item.strip(), ":"))


def read_hostfile(path: Path) -> tuple[str, ...]:
    """The same of a file with a line `a slots=2` for each host, as `mpirun` reads it; `#` begins a comment.

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
            "who logs in there is for `--ssh-options`",
        )
    return [found[1]] * int(found[2] or 1)


def _is_host(text: str) -> bool:
    if not text.startswith("["):
        return True
    try:
        return bool(ipaddress.IPv6Address(text.strip("[]")))
    except ValueError:
        return False
