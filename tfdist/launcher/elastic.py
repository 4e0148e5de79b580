"""Runs an elastic job: when its hosts change or a worker is lost, it starts again from its last checkpoint."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tfdist.errors import EXIT_INTERRUPTED, EXIT_RESHAPED, EXIT_USAGE, ClusterError, UsageError
from tfdist.jobs.task import means_itself
from tfdist.launcher import job
from tfdist.launcher import run as launcher
from tfdist.launcher.job import Job
from tfdist.launcher.output import Screen

ENDS = (0, EXIT_USAGE, EXIT_INTERRUPTED, 128 + signal.SIGTERM, 128 + signal.SIGHUP)

Hosts = tuple[str, ...]  # one for each worker


class Members:
    """The hosts of an elastic job: those of a list that may change, without the slots of lost workers.

    The slot of a lost worker stays empty until its host's entry changes, so that a broken host is not tried repeatedly.

    Args:
        listed: reads the list.
        least: the smallest number of workers.
        most: the largest number of workers; `None` sets no limit.

    Raises:
        UsageError: `least` or `most` is out of range, or the list cannot be read when the job starts.
    """

    def __init__(self, listed: Callable[[], Hosts], least: int = 1, most: int | None = None):
        if least < 1:
            raise UsageError(f"`--min-workers` is {least}", "use 1 or more")
        if most is not None and most < least:
            raise UsageError(f"`--max-workers` is {most}, and `--min-workers` is {least}", "use that number or more")
        self._listed = listed
        self.least = least
        self._most = most
        self._seen = Counter(listed())
        self._lost: Counter[str] = Counter()
        self._order: dict[str, int] = {}

    def now(self) -> Hosts:
        """The hosts on which the job would start now; hosts that have been in the list for longer come first."""
        try:
            listed = Counter(self._listed())
        except UsageError:  # the file may be half written, or its server unavailable
            listed = self._seen
        for host in {*listed, *self._seen}:
            if listed[host] != self._seen[host]:
                del self._lost[host]
        self._seen = listed
        for host in listed:
            self._order.setdefault(host, len(self._order))
        left = {host: listed[host] - self._lost[host] for host in sorted(listed, key=self._order.__getitem__)}
        return tuple(host for host, count in left.items() for _ in range(count))[: self._most]

    def lose(self, host: str) -> None:
        """A worker on `host` has failed."""
        self._lost[host] += 1

    def wait(self, seconds: float) -> Hosts:
        """The hosts, as soon as there are enough.

        Raises:
            ClusterError: there are not enough after `seconds`.
        """
        until = time.monotonic() + seconds
        while len(hosts := self.now()) < self.least:
            if time.monotonic() > until:
                raise ClusterError(
                    f"There are slots for {len(hosts)} workers, and the job needs {self.least}: waited {seconds:g} s",
                    "add hosts to the list, or lower `--min-workers`; a lost slot stays empty until its host changes",
                )
            time.sleep(launcher.SECONDS_BETWEEN_LOOKS)
        return hosts


def in_file(path: Path) -> Callable[[], Hosts]:
    """A function that reads a host file each time it is called."""
    return lambda: job.read_hostfile(path)


def by_script(path: Path) -> Callable[[], Hosts]:
    """A function that runs a program, which prints one line `host` or `host:2` per host, as for Horovod."""

    def ask() -> Hosts:
        try:
            asked = subprocess.run([path.absolute()], capture_output=True, text=True, check=True, timeout=60)
        except (OSError, subprocess.SubprocessError) as error:
            raise UsageError(
                f"The host discovery script `{path}` failed: {error}", "check that it can be run and exits with 0"
            ) from error
        return job.parse_hosts(",".join(asked.stdout.split()))

    return ask


def run(wanted: Job, members: Members) -> int:
    """Runs a job on the hosts of `members`, again whenever they change or a worker is lost; returns its exit code.

    Raises:
        ClusterError: there are too few hosts.
        UsageError: the logs cannot be written.
    """
    # Later hosts, and the list, may be on other machines, so the job cannot be isolated in a network namespace.
    wanted = replace(wanted, expose=True)
    with Screen(wanted.log_dir) as screen:
        return _run(wanted, members, screen)


def _run(wanted: Job, members: Members, screen: Screen) -> int:
    console = screen.console
    for start in itertools.count():
        hosts = members.wait(wanted.start_seconds)
        counted = ", ".join(f"{host}:{count}" for host, count in Counter(hosts).items())
        console.print(f"Starting with {len(hosts)} workers: {counted}", highlight=False)
        here = all(_is_here(host) for host in hosts)
        shaped = replace(wanted, workers=len(hosts), hosts=() if here else hosts)

        def have_changed(hosts: Hosts = hosts) -> bool:
            found = members.now()
            return len(found) >= members.least and Counter(found) != Counter(hosts)

        part = launcher.OneStart(shaped, start, screen, closed=False, leave=have_changed)
        try:
            code = asyncio.run(part.to_its_end())
        except ClusterError as error:
            code = error.exit_code
            console.print(error.sentence)
        if code in ENDS:
            return code
        if code == EXIT_RESHAPED:
            console.print("The hosts have changed; the job continues from the checkpoint that it has just written.")
            continue
        for rank in part.culprits:
            members.lose(hosts[rank])
            console.print(f"Continuing from the last checkpoint, without worker {rank} on {hosts[rank]}.")
    raise AssertionError


def _is_here(host: str) -> bool:
    return means_itself(host) or host in (socket.gethostname(), socket.getfqdn(), os.uname().nodename)
