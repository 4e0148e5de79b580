"""Elastic jobs, which start again from their last checkpoint when their hosts change or a worker is lost.

Their options are those of `tfdist.train` and `tfdist.launch`.
"""

from __future__ import annotations

import functools
import itertools
import os
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tfdist import terminal
from tfdist.errors import EXIT_RESHAPED, ClusterError, UsageError
from tfdist.jobs.tf_config import means_itself
from tfdist.launcher import job
from tfdist.launcher.job import Job

if TYPE_CHECKING:
    from tfdist.launcher.output import Screen

SECONDS_BETWEEN_POLLS = 1.0  # of the list of hosts

Hosts = tuple[str, ...]  # the host of each worker

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
        minimum = 1 if self.min_workers is None else self.min_workers
        script = self.host_discovery_script
        if hostfile and script:
            raise UsageError("`--hostfile` and `--host-discovery-script` are both set", "use one of them")
        if hostfile:
            return Members(functools.partial(job.read_hostfile, hostfile), minimum, self.max_workers)
        if script:
            return Members(functools.partial(discovered_hosts, script), minimum, self.max_workers)
        fixed = hosts or ("localhost",) * max(workers_here if self.max_workers is None else self.max_workers, minimum)
        return Members(lambda: fixed, minimum, self.max_workers)


class Members:
    """The hosts of an elastic job: a list that may change, without the slots of lost workers.

    The slot of a lost worker stays empty until its host's entry changes, so that a broken host is not tried repeatedly.

    Args:
        read_hosts: returns the current list.
        minimum: the smallest number of workers.
        maximum: the largest number of workers; `None` sets no limit.

    Raises:
        UsageError: `minimum` or `maximum` is out of range, or the list cannot be read when the job starts.
    """

    def __init__(self, read_hosts: Callable[[], Hosts], minimum: int = 1, maximum: int | None = None):
        if minimum < 1:
            raise UsageError(f"`--min-workers` is {minimum}", "use 1 or more")
        if maximum is not None and maximum < minimum:
            raise UsageError(
                f"`--max-workers` is {maximum}, and `--min-workers` is {minimum}", "use that number or more"
            )
        self._read_hosts = read_hosts
        self.minimum = minimum
        self._maximum = maximum
        self._last_list = Counter(read_hosts())
        self._lost: Counter[str] = Counter()
        self._order: dict[str, int] = {}

    def now(self) -> Hosts:
        """Returns the hosts on which the job would start now; those that have been listed for longer come first."""
        try:
            listed = Counter(self._read_hosts())
        except UsageError:  # the file may be half written, or its server unavailable
            listed = self._last_list
        for host in {*listed, *self._last_list}:
            if listed[host] != self._last_list[host]:
                del self._lost[host]
        self._last_list = listed
        for host in listed:
            self._order.setdefault(host, len(self._order))
        slots = {host: listed[host] - self._lost[host] for host in sorted(listed, key=self._order.__getitem__)}
        return tuple(host for host, count in slots.items() for _ in range(count))[: self._maximum]

    def lose(self, host: str) -> None:
        """Records that a worker on `host` has failed."""
        self._lost[host] += 1

    def wait(self, seconds: float) -> Hosts:
        """Returns the hosts as soon as there are enough.

        Raises:
            ClusterError: there are not enough after `seconds`.
        """
        deadline = time.monotonic() + seconds
        while len(hosts := self.now()) < self.minimum:
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"There are slots for {len(hosts)} workers, and the job needs {self.minimum}: waited {seconds:g} s",
                    "add hosts to the list, or lower `--min-workers`; a lost slot stays empty until its host changes",
                )
            time.sleep(SECONDS_BETWEEN_POLLS)
        return hosts


def discovered_hosts(script: Path) -> Hosts:
    """Runs a program that prints a line `host` or `host:2` per host, as for Horovod, and returns the hosts.

    Raises:
        UsageError: the program fails, or a line is not valid.
    """
    try:
        done = subprocess.run([script.absolute()], capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise UsageError(
            f"The host discovery script `{script}` failed: {error}", "check that it can be run and exits with 0"
        ) from error
    return job.parse_hosts(",".join(done.stdout.split()))


def run(wanted: Job, members: Members) -> int:
    """Runs a job on the hosts of `members`, again whenever they change or a worker is lost; returns its exit code.

    Raises:
        ClusterError: there are too few hosts.
        UsageError: the logs cannot be written.
    """
    from tfdist.launcher import run as launcher  # here, since each process of a job imports this module
    from tfdist.launcher.output import Screen

    # Later hosts, and the list, may be on other machines, so the job cannot be isolated in a network namespace.
    wanted = replace(wanted, expose=True)
    with Screen(wanted.log_dir) as screen:
        for restart in itertools.count():
            hosts = members.wait(wanted.start_seconds)
            code = _run_on(hosts, wanted, restart, members, screen)
            if code in launcher.FINAL_CODES:
                return code
    raise AssertionError


def _run_on(hosts: Hosts, wanted: Job, restart: int, members: Members, screen: Screen) -> int:
    """Runs the job until it ends, its hosts change, or a worker fails; returns its exit code."""
    import asyncio

    from tfdist.launcher import run as launcher
    from tfdist.launcher.hosts import places

    counts = ", ".join(f"{host}:{count}" for host, count in Counter(hosts).items())
    screen.console.print(f"Starting with {len(hosts)} workers: {counts}", highlight=False)
    is_local = all(_is_this_machine(host) for host in hosts)
    job_now = replace(wanted, workers=len(hosts), hosts=() if is_local else hosts)

    def have_changed() -> bool:
        current = members.now()
        return len(current) >= members.minimum and Counter(current) != Counter(hosts)

    attempt = launcher.Attempt(job_now, places(job_now), restart, screen, isolated=False, should_stop=have_changed)
    try:
        code = asyncio.run(attempt.run())
    except ClusterError as error:
        code = error.exit_code
        screen.console.print(error.sentence)
    if code == EXIT_RESHAPED:
        screen.console.print("The hosts have changed; the job continues from the checkpoint that it has just written.")
    elif code not in launcher.FINAL_CODES:
        for rank in attempt.culprits:
            members.lose(hosts[rank])
            screen.console.print(f"Continuing from the last checkpoint, without worker {rank} on {hosts[rank]}.")
    return code


def _is_this_machine(host: str) -> bool:
    return means_itself(host) or host in (socket.gethostname(), socket.getfqdn(), os.uname().nodename)
