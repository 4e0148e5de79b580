"""The options of an elastic job, for `tfdist.train` and `tfdist.launch`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tfdist import terminal
from tfdist.errors import UsageError

if TYPE_CHECKING:
    from tfdist.launcher.elastic import Members

_option = terminal.options_of("Processes")
OPTIONS = (
    _option("--elastic", is_flag=True, help="continue with other workers when hosts leave or join"),
    _option("--min-workers", type=int, metavar="N", help="smallest number of workers of an elastic job; 1 by default"),
    _option("--max-workers", type=int, metavar="N", help="largest number of workers of an elastic job"),
    _option(
        "--host-discovery-script",
        type=click.Path(path_type=Path),
        metavar="PROGRAM",
        help="program that prints the hosts of an elastic job, one line `host:slots` each",
    ),
)


def elastic_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options to a command."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


@dataclass(frozen=True)
class ElasticOptions:
    """The values of the options.

    Raises:
        UsageError: another option is set without `--elastic`.
    """

    elastic: bool = False
    min_workers: int | None = None
    max_workers: int | None = None
    host_discovery_script: Path | None = None

    def __post_init__(self) -> None:
        for name in ("min_workers", "max_workers", "host_discovery_script"):
            if getattr(self, name) is not None and not self.elastic:
                option = "--" + name.replace("_", "-")
                raise UsageError(f"`{option}` is set, but the job is not elastic", "add `--elastic`, or leave it out")

    def members(self, hostfile: Path | None, hosts: tuple[str, ...] = (), workers_here: int = 2) -> Members:
        """Returns the hosts from the discovery script or the host file; without these, `hosts`, or this machine.

        Args:
            hostfile: see `tfdist.launcher.job.read_hostfile`.
            hosts: the host of each worker.
            workers_here: the number of workers on this machine, unless `--max-workers` is set.

        Raises:
            UsageError: both the script and a host file are set, a list cannot be read, or a number is out of range.
        """
        from tfdist.launcher import elastic, job

        minimum = 1 if self.min_workers is None else self.min_workers
        script = self.host_discovery_script
        if hostfile and script:
            raise UsageError("`--hostfile` and `--host-discovery-script` are both set", "use one of them")
        if hostfile:
            return elastic.Members(functools.partial(job.read_hostfile, hostfile), minimum, self.max_workers)
        if script:
            return elastic.Members(functools.partial(elastic.discovered_hosts, script), minimum, self.max_workers)
        fixed = hosts or ("localhost",) * max(workers_here if self.max_workers is None else self.max_workers, minimum)
        return elastic.Members(lambda: fixed, minimum, self.max_workers)
