"""What to start: the same command in so many processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from tfdist.errors import UsageError

# The variables by which a started process knows of its job, beside TF_CONFIG.
JOB = "TFDIST_JOB"  # the job's name: the same in all processes, and after a restart
RESTART = "TFDIST_RESTART"  # how often the job was started again
START_SECONDS = "TFDIST_START_SECONDS"  # how long processes wait for each other at the start


def new_name() -> str:
    """A name for a job that starts now."""
    return datetime.now(UTC).strftime("%Y%m%d-%H%M%S")


@dataclass(frozen=True)
class Job:
    """A command and the processes that run it.

    Attributes:
        command: what every process runs after `python`: `("-m", "module", ...)` or `("script.py", ...)`.
        workers: the processes that train.
        ps: the parameter servers; with any, there is a coordinating process, the chief, as well.
        hosts: where to start them, in turn, over ssh; empty is this machine.
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
        if not self.start_seconds > 0:
            raise UsageError(f"`--start-seconds` is {self.start_seconds:g}", "use a number above 0")
        if not self.command:
            raise UsageError("There is no program to start", "name a script, or a module after `-m`")

    @property
    def roles(self) -> list[tuple[str, int]]:
        """The role of each process and its number in that role, by rank."""
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
        return self.hosts[rank % len(self.hosts)] if self.hosts else None
