"""Runs a job: starts its processes, shows their output, and ends all of them when one fails.

TensorFlow's servers listen on every interface, without authentication. Therefore a job on one machine runs in a network
namespace with nothing but a loopback interface, to which only the job's own processes can connect. Sources:
network_namespaces(7), user_namespaces(7).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import json
import os
import secrets
import shlex
import signal
import socket
import struct
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.panel import Panel
from rich.text import Text

from tfdist.errors import EXIT_CLUSTER, EXIT_INTERRUPTED, EXIT_RESHAPED, EXIT_USAGE, ClusterError, UsageError
from tfdist.jobs import elastic, job_environment, ports
from tfdist.launcher import agent, hosts, resources
from tfdist.launcher.hosts import FILES_PER_HOST, Host, Place
from tfdist.launcher.job import Job
from tfdist.launcher.output import Output, Screen
from tfdist.launcher.process import Process, Stream

# Open MPI's default of `odls_base_sigkill_timeout`.
SECONDS_TO_END_OF_MPIRUN = 1.0
# How long processes have to end after a signal from the user.
SECONDS_AFTER_SIGNAL = 4.0
# A process that reports a lost peer may be seen before the peer's own end.
SECONDS_FOR_CAUSE = 5.0
# After a process has ended for a mistake of the user, the others usually do so within this time.
SECONDS_FOR_SAME_ERROR = 1.0
# With parameter servers, a job continues without a failed worker, which is started again up to this many starts.
MAX_WORKER_STARTS = 4
SECONDS_BETWEEN_POLLS = 1.0
MAX_LISTED_PORTS = 8
FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# The exit codes after which a job is not started again.
FINAL_CODES = (0, EXIT_USAGE, EXIT_INTERRUPTED, 128 + signal.SIGTERM, 128 + signal.SIGHUP)
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1


def run(wanted: Job) -> int:
    """Runs a job, starts it again after a failure as often as it allows, and returns its exit code.

    The exit code is 0 if all processes end with 0. Otherwise it is that of the process that failed first, where a
    signal counts as 128 plus its number. After Ctrl-C it is 130.

    Raises:
        ClusterError: a process did not start.
        UsageError: the logs cannot be written.
    """
    isolated = not wanted.hosts and not wanted.on and not wanted.expose and isolate()
    wanted.argv()  # reports a missing program before anything starts
    with _cluster(wanted) as places, Screen(wanted.log_dir) as screen:
        for restart in range(wanted.restarts + 1):
            code = asyncio.run(Attempt(wanted, places(), restart, screen, isolated).run())
            if code in FINAL_CODES:
                break
            if restart < wanted.restarts:
                screen.console.print(f"Starting the job again, {restart + 1} of {wanted.restarts}.")
    return code


@contextlib.contextmanager
def _cluster(wanted: Job) -> Iterator[Callable[[], Sequence[Place]]]:
    """What tells the place of each rank before a start."""
    if wanted.on:
        from tfdist.launcher import on_ray

        with on_ray.cluster(wanted) as cluster:
            yield cluster.places
    else:
        yield lambda: hosts.places(wanted)


class Attempt:
    """One start of a job.

    Args:
        wanted: the job.
        places: where the agent of each rank runs.
        restart: how often the job was started before.
        screen: shows the output of the processes and messages about them.
        isolated: whether the job runs in a network namespace.
        should_stop: for an elastic job; polled to find out whether all processes should stop at their next checkpoint.

    Attributes:
        culprits: the ranks that caused a failure.
    """

    def __init__(
        self,
        wanted: Job,
        places: Sequence[Place],
        restart: int,
        screen: Screen,
        isolated: bool,
        should_stop: Callable[[], bool] | None = None,
    ):
        self.job = wanted
        self.places = places
        self.restart = restart
        self.screen = screen
        self.console = screen.console
        self.isolated = isolated
        self.should_stop = should_stop
        self.culprits: list[int] = []
        self.processes: list[Process] = []
        self.hosts: list[Host] = []
        self.events: asyncio.Queue[Process | int] = asyncio.Queue()  # ended processes, and signals from the user
        self._logs: list[Output] = []

    async def run(self) -> int:
        """Starts all processes, waits for their end or a failure, ends those that remain; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in FORWARDED_SIGNALS:
            loop.add_signal_handler(number, self.events.put_nowait, int(number))
        try:
            await self._start()
            return await self._wait()
        finally:
            await asyncio.gather(*(host.end(agent.SECONDS_TO_END + 2.0) for host in self.hosts))
            for log in self._logs:
                log.end()
            for number in FORWARDED_SIGNALS:
                loop.remove_signal_handler(number)

    async def _start(self) -> None:
        try:
            self.job.log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"The logs cannot be written to `{self.job.log_dir}`: {error.strerror}", "choose another `--log-dir`"
            ) from error
        self._create_processes()
        if (
            not self.job.hosts
            and not self.restart
            and (crowding := job_environment.crowding(self.job.workers, "workers"))
        ):
            self.console.print(f"warning: {crowding}.", highlight=False)
        await self._connect(self.hosts)
        if not self.isolated and not self.job.mpi:
            self._print_open_ports()
        cluster = json.dumps(self.job.cluster([process.address for process in self.processes]))
        environment = environment_of(self.job, self.restart, self.should_stop is not None, self.isolated)
        for host in self.hosts:
            host.job = job_of_host(self.job, host, self.processes, None if self.job.mpi else cluster, environment)
            host.start(host.processes)

    def _create_processes(self) -> None:
        """Creates the objects of the processes and hosts, and the logs, without starting anything."""
        ranks_of: dict[Place, list[int]] = {}
        for rank, place in enumerate(self.places):
            ranks_of.setdefault(place, []).append(rank)
        count = len(self.job.roles)
        files = count + FILES_PER_HOST * len(ranks_of)  # each process has a log
        location = f"{len(ranks_of)} agents" if self.places[0].name else "this machine"
        resources.require_files(files, f"The launcher of {count} processes on {location}")
        for rank, (role, index) in enumerate(self.job.roles):
            log = self._open_log(f"{role} {index}")
            self.processes.append(Process(rank, role, index, self.places[rank].name, log))
        for place, ranks in ranks_of.items():
            processes = [self.processes[rank] for rank in ranks]
            streams = [self._streams(process) for process in processes]
            self.hosts.append(Host(place, processes, streams, self.events.put_nowait))

    async def _connect(self, hosts: Sequence[Host]) -> None:
        """Starts the agents of these hosts, and waits for the ports of their processes."""
        for host in hosts:
            await host.open()
        deadline = asyncio.get_running_loop().time() + self.job.start_seconds
        for host in hosts:
            try:
                await host.connect(self.job.start_seconds, deadline)
            except ClusterError:
                self.culprits = [process.rank for process in host.processes]
                raise

    def _print_open_ports(self) -> None:
        reason = "" if self.places[0].name or self.job.expose else "The system does not allow a network namespace. "
        ports_of: dict[str, list[str]] = {}
        for process in self.processes:
            ports_of.setdefault(process.host or "this machine", []).append(str(process.port))
        places = "; ".join(f"{_first_of(ports)} of {name}" for name, ports in ports_of.items())
        self.console.print(
            f"{reason}While TensorFlow's servers run, as with `multiworker` and `parameter_server`, anyone who can "
            f"reach these ports can run code as you: {places}.",
            highlight=False,
        )

    def _open_log(self, name: str) -> Output:
        path = self.job.log_dir / f"{name.replace(' ', '-')}.log"

        def report_loss(reason: str) -> None:
            self.console.print(f"Not all output of {name} can be kept in {path}: {reason}.", highlight=False)

        try:
            self._logs.append(Output.to_file(path, "ab" if self.restart else "wb", report_loss))
        except OSError as error:
            raise UsageError(
                f"The output of {name} cannot be written to `{path}`: {error.strerror}", "choose another `--log-dir`"
            ) from error
        return self._logs[-1]

    def _streams(self, process: Process) -> tuple[Stream, Stream]:
        """The output and the error stream of a process; the latter stays unused if its output is merged."""
        out = self.screen.out if process.rank == 0 or self.job.verbose else None
        err = self.screen.err if process.rank == 0 else out
        # Output of several processes must not be mixed within a line, but a progress bar is shown as it moves.
        by_line = self.job.verbose and not has_terminal(process)
        return Stream(process, out, by_line), Stream(process, err, by_line)

    async def _wait(self) -> int:
        """Waits until all processes have ended, one has failed, or the user has sent an ending signal."""
        running = set(self.processes)
        polling = asyncio.create_task(self._poll_should_stop())
        try:
            while running:
                events = await self._next_events()
                for number in [event for event in events if isinstance(event, int)]:
                    for host in self.hosts:
                        host.send({"signal": number})
                    if number in ENDING_SIGNALS:
                        await self._wait_for_all(SECONDS_AFTER_SIGNAL)
                        return EXIT_INTERRUPTED if number == signal.SIGINT else 128 + number
                ended = [event for event in events if isinstance(event, Process)]
                restarted = [process for process in ended if self._may_restart(process)]
                await self._restart(restarted)
                running = running.difference(ended).union(restarted)
                failed = [process for process in ended if process.returncode]
                if failed and all(process.returncode == EXIT_RESHAPED for process in failed):
                    await self._wait_for_all(SECONDS_FOR_CAUSE)  # the others have stopped too, and are about to end
                    return EXIT_RESHAPED
                if failed:
                    return await self._report_failure(failed, running)
                # Parameter servers do not end by themselves: the job ends with its chief.
                if self.job.ps and self.processes[0].returncode == 0:
                    return 0
            return 0
        finally:
            polling.cancel()

    async def _next_events(self) -> list[Process | int]:
        """Waits for an event, and returns it with all further events that have arrived."""
        events = [await self.events.get()]
        while not self.events.empty():
            events.append(self.events.get_nowait())
        return events

    async def _wait_until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Consumes events until the condition holds, for at most `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not condition():
                    await self.events.get()

    async def _wait_for_all(self, seconds: float) -> None:
        await self._wait_until(lambda: all(process.returncode is not None for process in self.processes), seconds)

    async def _poll_should_stop(self) -> None:
        """Signals the chief of an elastic job that all shall stop; repeatedly, since it may still be starting."""
        while self.should_stop is not None:
            await asyncio.sleep(SECONDS_BETWEEN_POLLS)
            if await asyncio.to_thread(self.should_stop):
                self.hosts[0].send({"signal": int(elastic.SIGNAL), "processes": [0]})

    def _may_restart(self, process: Process) -> bool:
        if not self.job.ps or process.role != "worker" or process.starts >= MAX_WORKER_STARTS:
            return False
        # A usage or cluster error would occur again.
        return process.returncode not in (0, EXIT_USAGE, EXIT_CLUSTER)

    async def _restart(self, processes: Collection[Process]) -> None:
        """Starts ended processes again, at the same addresses."""
        for process in processes:
            self.console.print(f"{process.name} {process.how_it_ended()}; it is started again.")
            process.starts += 1
            process.returncode = None
        for host in self.hosts:
            on_host = [process for process in host.processes if process in processes]
            if on_host and not host.is_connected:
                await self._connect([host])
            host.start(on_host)

    async def _report_failure(self, failed: list[Process], running: Collection[Process]) -> int:
        """Shows the last output of the process that failed first, and returns its exit code."""
        if all(process.returncode == EXIT_CLUSTER for process in failed) and running:
            await self._wait_until(
                lambda: any(process.returncode is not None for process in running), SECONDS_FOR_CAUSE
            )
            failed += [process for process in running if process.returncode]
        elif any(process.returncode == EXIT_USAGE for process in failed):
            # All processes find a mistake of the user; the chief's message is the one that is shown as it is.
            await self._wait_for_all(SECONDS_FOR_SAME_ERROR)
        first = min(failed, key=lambda process: process.returncode == EXIT_CLUSTER)
        # If all others report a lost or silent peer, the culprit is the process that does not report anything.
        silent = [process for process in self.processes if process.returncode is None]
        if first.returncode == EXIT_CLUSTER and silent:
            culprits: Sequence[Process] = silent
        else:
            host = next(host for host in self.hosts if first in host.processes)
            culprits = [first] if host.is_connected else host.processes  # all of them if the connection has broken
        self.culprits = [process.rank for process in culprits]
        self.screen.out.drain()  # the output of the process comes before the message about it
        title = f"{first.name} {first.how_it_ended()}; its last lines"
        # `Text`, because the output of a program must not be interpreted as markup.
        self.console.print(Panel(Text(first.last_lines()), title=title, title_align="left"), soft_wrap=False)
        self.console.print(f"All output: {self.job.log_dir}", highlight=False)
        assert first.returncode
        return first.returncode


def _first_of(ports: Sequence[str]) -> str:
    """The first ports, and how many more there are, as part of a sentence."""
    more = len(ports) - MAX_LISTED_PORTS
    return ", ".join(ports[:MAX_LISTED_PORTS]) + (f" and {more} more" if more > 0 else "")


def job_of_host(
    job: Job, host: Host, processes: Sequence[Process], cluster: str | None, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Returns the part of a job that one agent runs, as it expects it.

    Args:
        job: the job.
        host: the agent's host.
        processes: all processes of the job.
        cluster: the addresses of all processes by role, as JSON; `None` if the processes need no addresses.
        environment: the variables of all processes.
    """
    # Several agents may run on one machine.
    training = [process for process in processes if process.role == "worker" and process.host == host.place.name]
    shares = {process: [number, len(training)] for number, process in enumerate(training)}
    all_gpus = [0, 1] if host.place.has_own_gpus else None
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
                "cores": shares.get(process),
                "gpus": shares.get(process) and (all_gpus or shares[process]),
                "output": agent.TERMINAL if has_terminal(process) else agent.MERGED if process.rank else agent.SEPARATE,
            }
            for process in host.processes
        ],
    }


def environment_of(job: Job, restart: int, is_elastic: bool, isolated: bool) -> dict[str, str]:
    """Returns the environment variables that all processes of a job get.

    Args:
        job: the job.
        restart: how often the job was started before.
        is_elastic: whether its hosts may change.
        isolated: whether it runs in a network namespace.
    """
    variables = {
        ports.SHARE: "1",
        "PYTHONUNBUFFERED": "1",
        job_environment.JOB: job.name,
        job_environment.TYPED: shlex.join(sys.orig_argv),
        # The secret of one start: a process that an earlier start has left behind cannot join.
        job_environment.SECRET: os.environ.get(job_environment.SECRET) or secrets.token_hex(32),
        job_environment.RESTART: str(restart),
        job_environment.START_SECONDS: f"{job.start_seconds:g}",
        job_environment.END_SECONDS: f"{SECONDS_TO_END_OF_MPIRUN if job.mpi else agent.SECONDS_TO_END:g}",
    }
    if job.mpi:  # the launcher starts only `mpirun`, so each process has to take its share of the cores itself
        variables[job_environment.SHARE_CORES] = "1"
    if is_elastic:
        variables[job_environment.ELASTIC] = "1"
    if isolated:
        variables[job_environment.OWN_NETWORK] = "1"
    return variables


def has_terminal(process: Process) -> bool:
    """Whether the process writes to a terminal, which it needs to show a moving progress bar."""
    return process.rank == 0 and sys.stdout is not None and sys.stdout.isatty()


def isolate() -> bool:
    """Moves this process, and the processes that it starts later, into a new network namespace.

    Returns:
        Whether the system allowed it. If not, nothing has changed.
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
