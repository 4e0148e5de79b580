"""Runs a job: starts its processes, shows what they say, and ends all of them when one fails.

TensorFlow's servers listen on every interface, without authentication. So a job on one machine runs in a network
namespace, which has a loopback interface and nothing else: only processes in it can connect. Source:
network_namespaces(7), user_namespaces(7).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import json
import os
import shlex
import signal
import socket
import struct
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.panel import Panel
from rich.text import Text

from tfdist.errors import EXIT_CLUSTER, EXIT_INTERRUPTED, EXIT_RESHAPED, EXIT_USAGE, ClusterError, UsageError
from tfdist.jobs import elastic, job_environment, ports
from tfdist.launcher import agent, descriptors
from tfdist.launcher.host import DESCRIPTORS_OF_A_HOST, Host
from tfdist.launcher.job import Job
from tfdist.launcher.output import Output, Screen
from tfdist.launcher.process import Process, Stream

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


def environment_of(job: Job, restart: int, elastic: bool, closed: bool) -> dict[str, str]:
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


_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1


def isolate() -> bool:
    """Moves this process, and the processes that it starts later, into a new network namespace.

    Returns:
        Whether the system allowed it. If it did not, nothing has changed.
    """
    user, group = os.geteuid(), os.getegid()
    if not _unshare(_CLONE_NEWNET):
        if not _unshare(_CLONE_NEWUSER | _CLONE_NEWNET):
            return False
        # The user and the group stay the same in the namespace.
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
    return True


def _unshare(flags: int) -> bool:
    return ctypes.CDLL(None, use_errno=True).unshare(flags) == 0


# After a signal from the user, before the processes are ended.
SECONDS_AFTER_SIGNAL = 4.0
# A process that says that another one is gone can be seen before that one.
SECONDS_FOR_THE_CAUSE = 5.0
# With parameter servers a job goes on without a worker, which comes back so often.
STARTS_OF_A_WORKER = 4
SECONDS_BETWEEN_LOOKS = 1.0
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(wanted: Job) -> int:
    """Runs a job, again after a failure if it says so, and returns its exit code.

    0 if all processes end with 0; else the exit code of the one that failed first, 128 and a signal's number if a
    signal ended it; 130 after Ctrl-C.

    Raises:
        ClusterError: a process did not start.
        UsageError: the logs cannot be written.
    """
    closed = not wanted.hosts and not wanted.expose and isolate()
    wanted.argv()  # whatever is missing is said before anything starts
    with Screen(wanted.log_dir) as screen:
        for restart in range(wanted.restarts + 1):
            code = asyncio.run(OneStart(wanted, restart, screen, closed).to_its_end())
            if code in (0, EXIT_USAGE, EXIT_INTERRUPTED, 128 + signal.SIGTERM, 128 + signal.SIGHUP):
                break
            if restart < wanted.restarts:
                screen.console.print(f"Starting the job again, {restart + 1} of {wanted.restarts}.")
    return code


class OneStart:
    """One start of a job.

    Args:
        wanted: the job.
        restart: how often it was started before.
        screen: what the processes say, and what is said about them, goes there.
        closed: it has a network of its own.
        leave: asked now and then whether the processes shall leave at their next checkpoint, in an elastic job.

    Attributes:
        culprits: the ranks that are to blame for its end.
    """

    def __init__(
        self, wanted: Job, restart: int, screen: Screen, closed: bool, leave: Callable[[], bool] | None = None
    ):
        self.job = wanted
        self.restart = restart
        self.screen = screen
        self.console = screen.console
        self.closed = closed
        self.leave = leave
        self.culprits: list[int] = []
        self.processes: list[Process] = []
        self.hosts: list[Host] = []
        self.events: asyncio.Queue[Process | int] = asyncio.Queue()  # what has ended, and signals from the user
        self._logs: list[Output] = []

    async def to_its_end(self) -> int:
        """Starts all, waits, and ends whatever is left."""
        loop = asyncio.get_running_loop()
        for number in PASSED_ON:
            loop.add_signal_handler(number, self.events.put_nowait, int(number))
        try:
            await self._start()
            return await self._wait()
        finally:
            await self._end_all()
            for number in PASSED_ON:
                loop.remove_signal_handler(number)

    async def _start(self) -> None:
        try:
            self.job.log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"The logs cannot be written to `{self.job.log_dir}`: {error.strerror}", "choose another `--log-dir`"
            ) from error
        self._describe()
        await self._meet(self.hosts)
        if not self.closed and not self.job.mpi:
            self._say_what_is_open()
        cluster = json.dumps(self.job.cluster([process.address for process in self.processes]))
        environment = environment_of(self.job, self.restart, self.leave is not None, self.closed)
        for host in self.hosts:
            host.job = of_host(self.job, host.processes, None if self.job.mpi else cluster, environment)
            host.start(host.processes)

    def _describe(self) -> None:
        """Makes the processes and the hosts, without starting anything."""
        ranks_of: dict[str | None, list[int]] = {}
        for rank in range(len(self.job.roles)):
            ranks_of.setdefault(self.job.host(rank), []).append(rank)
        count = len(self.job.roles)
        files = count + DESCRIPTORS_OF_A_HOST * len(ranks_of)  # a log for each process
        where = f"{len(ranks_of)} hosts" if self.job.hosts else "this machine"
        descriptors.require(files, f"The launcher of {count} processes on {where}")
        for rank, (role, index) in enumerate(self.job.roles):
            log = self._open_log(f"{role} {index}")
            self.processes.append(Process(rank, role, index, self.job.host(rank), log))
        for name, ranks in ranks_of.items():
            there = [self.processes[rank] for rank in ranks]
            self.hosts.append(Host(name, there, [self._streams(each) for each in there], self.events.put_nowait))

    async def _meet(self, hosts: Sequence[Host]) -> None:
        """Starts the agents of these hosts, and reads the ports of their processes."""
        for host in hosts:
            await host.open(["ssh", *self.job.ssh_arguments()])
        deadline = asyncio.get_running_loop().time() + self.job.start_seconds
        for host in hosts:
            try:
                await host.meet(self.job.start_seconds, deadline)
            except ClusterError:
                self.culprits = [process.rank for process in host.processes]
                raise

    def _say_what_is_open(self) -> None:
        refused = "" if self.job.hosts or self.job.expose else "The system gives this job no network of its own. "
        places = "; ".join(host.named_ports() for host in self.hosts)
        self.console.print(
            f"{refused}While it runs, whoever reaches these ports can run code as you: {places}.", highlight=False
        )

    def _open_log(self, name: str) -> Output:
        path = self.job.log_dir / f"{name.replace(' ', '-')}.log"

        def tell(reason: str) -> None:
            self.console.print(f"Not all output of {name} can be kept in {path}: {reason}.", highlight=False)

        try:
            self._logs.append(Output.to_file(path, "ab" if self.restart else "wb", tell))
        except OSError as error:
            raise UsageError(
                f"The output of {name} cannot be written to `{path}`: {error.strerror}", "choose another `--log-dir`"
            ) from error
        return self._logs[-1]

    def _streams(self, process: Process) -> tuple[Stream, Stream]:
        """What the process writes, and its errors, where it has a stream of its own for them."""
        out = self.screen.out if process.rank == 0 or self.job.verbose else None
        err = self.screen.err if process.rank == 0 else out
        # What several say is not to be mixed within a line; a progress bar is shown as it moves.
        by_line = self.job.verbose and not has_terminal(process)
        return Stream(process, out, by_line, self.job.verbose), Stream(process, err, by_line, self.job.verbose)

    async def _wait(self) -> int:
        """Until all processes have ended, one has failed, or the user wants an end."""
        left = set(self.processes)
        watching = asyncio.create_task(self._watch())
        try:
            while left:
                events = await self._new_events()
                for number in [event for event in events if isinstance(event, int)]:
                    self._signal(number)
                    if number in ENDING:
                        await self._until_all_have_ended(SECONDS_AFTER_SIGNAL)
                        return EXIT_INTERRUPTED if number == signal.SIGINT else 128 + number
                ended = [event for event in events if isinstance(event, Process)]
                back = [process for process in ended if self._can_come_back(process)]
                await self._start_again(back)
                left = left.difference(ended).union(back)
                failed = [process for process in ended if process.returncode]
                if failed and all(process.returncode == EXIT_RESHAPED for process in failed):
                    await self._until_all_have_ended(SECONDS_FOR_THE_CAUSE)  # they have left too, and end now
                    return EXIT_RESHAPED
                if failed:
                    return await self._failed(failed, left)
                # Servers serve until the chief, whom they serve, has ended.
                if self.job.ps and self.processes[0].returncode == 0:
                    return 0
            return 0
        finally:
            watching.cancel()

    async def _new_events(self) -> list[Process | int]:
        """The next event, and all that have come with it."""
        events = [await self.events.get()]
        while not self.events.empty():
            events.append(self.events.get_nowait())
        return events

    async def _until(self, is_so: Callable[[], bool], seconds: float) -> None:
        """Takes events until something is so, at most for some time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not is_so():
                    await self.events.get()

    async def _until_all_have_ended(self, seconds: float) -> None:
        await self._until(lambda: all(process.returncode is not None for process in self.processes), seconds)

    async def _watch(self) -> None:
        """Tells the chief of an elastic job that all shall leave; again and again, as it may be starting still."""
        while self.leave is not None:
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
            if await asyncio.to_thread(self.leave):
                self.hosts[0].tell({"signal": int(elastic.SIGNAL), "of": [0]})

    def _can_come_back(self, process: Process) -> bool:
        told = process.returncode in (0, EXIT_USAGE, EXIT_CLUSTER)  # it would say the same again
        return bool(self.job.ps) and process.role == "worker" and process.starts < STARTS_OF_A_WORKER and not told

    async def _start_again(self, processes: Collection[Process]) -> None:
        """Starts processes in the place of those that have ended, with their addresses."""
        for process in processes:
            self.console.print(f"{process.name} {process.how_it_ended()}; it is started again.")
            process.starts += 1
            process.returncode = None
        for host in self.hosts:
            there = [process for process in host.processes if process in processes]
            if there and not host.is_connected:
                await self._meet([host])
            host.start(there)

    async def _failed(self, failed: list[Process], left: Collection[Process]) -> int:
        """Shows what the process said that failed first, and returns its exit code."""
        if all(process.returncode == EXIT_CLUSTER for process in failed) and left:
            await self._until(lambda: any(process.returncode is not None for process in left), SECONDS_FOR_THE_CAUSE)
            failed += [process for process in left if process.returncode]
        first = min(failed, key=lambda process: process.returncode == EXIT_CLUSTER)
        # Where all others say that one is gone or silent, it is the one that says nothing.
        silent = [process for process in self.processes if process.returncode is None]
        told = first.returncode == EXIT_CLUSTER
        self.culprits = [process.rank for process in (silent if told and silent else self._lost_with(first))]
        self.screen.out.drain()  # what it said comes before what is said about it
        title = f"{first.name} {first.how_it_ended()}; its last lines"
        # What a program prints is text: it must not be taken for markup.
        self.console.print(Panel(Text(first.last_lines()), title=title, title_align="left"), soft_wrap=False)
        self.console.print(f"All output: {self.job.log_dir}", highlight=False)
        assert first.returncode
        return first.returncode

    def _lost_with(self, process: Process) -> Sequence[Process]:
        """The processes that are lost with this one: all of its host if the connection to that has broken."""
        host = next(host for host in self.hosts if process in host.processes)
        return [process] if host.is_connected else host.processes

    def _signal(self, number: int) -> None:
        for host in self.hosts:
            host.tell({"signal": number})

    async def _end_all(self) -> None:
        await asyncio.gather(*(host.end(agent.SECONDS_TO_END + 2.0) for host in self.hosts))
        for log in self._logs:
            log.end()
