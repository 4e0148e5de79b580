"""Runs an elastic job, which starts again from its last checkpoint when its hosts change or a worker is lost."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tfdist.errors import EXIT_RESHAPED, ClusterError, UsageError
from tfdist.jobs.tf_config import means_itself
from tfdist.launcher import job
from tfdist.launcher import run as launcher
from tfdist.launcher.job import Job
from tfdist.launcher.output import Screen

Hosts = tuple[str, ...]  # the host of each worker


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
            time.sleep(launcher.SECONDS_BETWEEN_POLLS)
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
    counts = ", ".join(f"{host}:{count}" for host, count in Counter(hosts).items())
    screen.console.print(f"Starting with {len(hosts)} workers: {counts}", highlight=False)
    is_local = all(_is_this_machine(host) for host in hosts)
    job_now = replace(wanted, workers=len(hosts), hosts=() if is_local else hosts)

    def have_changed() -> bool:
        current = members.now()
        return len(current) >= members.minimum and Counter(current) != Counter(hosts)

    attempt = launcher.Attempt(job_now, restart, screen, isolated=False, should_stop=have_changed)
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
