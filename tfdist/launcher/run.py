"""Runs a job: starts its processes, shows what they say, and ends all of them when one fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import shlex
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Callable
from typing import Any

from rich.panel import Panel
from rich.text import Text

from tfdist.cluster import elastic, job_environment, ports
from tfdist.errors import EXIT_CLUSTER, EXIT_INTERRUPTED, EXIT_RESHAPED, EXIT_USAGE, ClusterError, UsageError
from tfdist.launcher import network_namespace, supervisor
from tfdist.launcher.job import Job
from tfdist.launcher.output import Output, Screen
from tfdist.launcher.process import Process, copy, port_in, rest_of

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
    closed = not wanted.hosts and not wanted.expose and network_namespace.close()
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
        self.signals: asyncio.Queue[int] = asyncio.Queue()
        self._pumps: list[asyncio.Task[None]] = []
        self._logs: list[Output] = []

    async def to_its_end(self) -> int:
        """Starts all, waits, and ends whatever is left."""
        loop = asyncio.get_running_loop()
        for number in PASSED_ON:
            loop.add_signal_handler(number, self.signals.put_nowait, number)
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
        for rank in range(len(self.job.roles)):
            self.processes.append(await self._start_supervisor(rank))
        deadline = asyncio.get_running_loop().time() + self.job.start_seconds
        for process in self.processes:
            await self._read_port(process, deadline)
        if not self.closed and not self.job.mpi:
            self._say_what_is_open()
        for process in self.processes:
            process.tell(json.dumps(self._order(process)))

    def _say_what_is_open(self) -> None:
        refused = "" if self.job.hosts or self.job.expose else "The system gives this job no network of its own. "
        ports_of: dict[str, list[str]] = {}
        for process in self.processes:
            ports_of.setdefault(process.host or "this machine", []).append(str(process.port))
        places = "; ".join(f"{', '.join(numbers)} of {host}" for host, numbers in ports_of.items())
        self.console.print(
            f"{refused}While it runs, whoever reaches these ports can run code as you: {places}.", highlight=False
        )

    async def _start_again(self, process: Process) -> Process:
        """Starts a process in the place of one that has ended, with its address."""
        rank = self.processes.index(process)
        again = await self._start_supervisor(rank, process.port)
        again.starts = process.starts + 1
        await self._read_port(again, asyncio.get_running_loop().time() + self.job.start_seconds)
        self.processes[rank] = again
        again.tell(json.dumps(self._order(again)))
        return again

    async def _start_supervisor(self, rank: int, port: int = 0) -> Process:
        role, index = self.job.roles[rank]
        host = self.job.host(rank)
        command = [sys.executable, "-m", supervisor.__name__, str(port)]
        if host is not None:
            remote = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(command)}"
            command = ["ssh", *self.job.ssh_arguments(), "--", host.strip("[]"), remote]
        log = self._open_log(f"{role} {index}", again=bool(self.restart or port))
        terminal, theirs = None, PIPE
        if rank == 0 and sys.stdout is not None and sys.stdout.isatty():
            terminal, theirs = pty.openpty()  # a progress bar moves on a terminal alone
        started = await asyncio.create_subprocess_exec(
            *command,
            stdin=PIPE,
            stdout=theirs,
            stderr=PIPE if rank == 0 and terminal is None else STDOUT,
            start_new_session=True,  # Ctrl-C comes to the launcher, which passes it on
        )
        if terminal is not None:
            os.close(theirs)
        return Process(role, index, host, log, started, terminal)

    def _open_log(self, name: str, again: bool) -> Output:
        path = self.job.log_dir / f"{name.replace(' ', '-')}.log"

        def tell(reason: str) -> None:
            self.console.print(f"Not all output of {name} can be kept in {path}: {reason}.", highlight=False)

        try:
            self._logs.append(Output.to_file(path, "ab" if again else "wb", tell))
        except OSError as error:
            raise UsageError(
                f"The output of {name} cannot be written to `{path}`: {error.strerror}", "choose another `--log-dir`"
            ) from error
        return self._logs[-1]

    async def _read_port(self, process: Process, deadline: float) -> None:
        loop = asyncio.get_running_loop()
        if process.terminal is not None:
            reader = asyncio.StreamReader()
            pipe = os.fdopen(process.terminal, "rb", buffering=0)
            await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        else:
            assert process.supervisor.stdout is not None
            reader = process.supervisor.stdout
        said, in_time = b"", False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                # Over ssh the host may say something of its own first.
                while not process.port and (line := await reader.readline()):
                    process.port = port_in(line)
                    said += b"" if process.port else line
                in_time = True
        await process.keep(said)
        if not process.port:
            self.culprits = [self.processes.index(process)]
            raise self._did_not_start(process, said + await rest_of(process.supervisor.stderr), in_time)
        is_first = process is self.processes[0]
        self._pump(reader, self.screen.out if is_first else None, process)
        if process.supervisor.stderr is not None:
            self._pump(process.supervisor.stderr, self.screen.err, process)

    def _did_not_start(self, process: Process, said: bytes, in_time: bool) -> ClusterError:
        where = f" on the host `{process.host}`" if process.host else ""
        within = "" if in_time else f" within {self.job.start_seconds:g} s"
        lines = said.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        return ClusterError(
            f"{process.name}{where} did not start{within}: {lines[-1].strip()}",
            "see that `ssh -o BatchMode=yes` reaches the host, and that tfdist lies there at the same place"
            if process.host
            else "see that this machine can start processes",
        )

    def _pump(self, reader: asyncio.StreamReader, shown: Output | None, process: Process) -> None:
        prefix = b"" if shown else f"[{process.name}] ".encode()
        out = shown or (self.screen.out if self.job.verbose else None)
        # What several say is not to be mixed within a line; a progress bar is shown as it moves.
        by_line = self.job.verbose and process.terminal is None
        self._pumps.append(asyncio.create_task(copy(reader, process, out, prefix, by_line, self.job.verbose)))

    def _order(self, process: Process) -> dict[str, Any]:
        cluster = self.job.cluster([other.address for other in self.processes])
        task = {"type": process.role, "index": process.index}
        trains = [other for other in self.processes if other.host == process.host and other.role == "worker"]
        # MPI has its own way to tell its processes who they are.
        known = (
            {job_environment.SHARE_CORES: "1"}
            if self.job.mpi
            else {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}
        )
        return {
            "argv": self.job.argv(),
            "cwd": os.getcwd(),
            "environment": known
            | {
                ports.SHARE: "1",
                "PYTHONUNBUFFERED": "1",
                job_environment.JOB: self.job.name,
                job_environment.TYPED: shlex.join(sys.orig_argv),
                job_environment.RESTART: str(self.restart),
                job_environment.START_SECONDS: f"{self.job.start_seconds:g}",
            }
            | ({job_environment.ELASTIC: "1"} if self.leave else {}),
            "share": [trains.index(process), len(trains)] if process in trains else None,
        }

    async def _wait(self) -> int:
        """Until all processes have ended, one has failed, or the user wants an end."""
        ends = {asyncio.create_task(process.supervisor.wait()): process for process in self.processes}
        signalled = asyncio.create_task(self.signals.get())
        watching = asyncio.create_task(self._watch())
        running = set(ends)
        try:
            while running:
                done, _ = await asyncio.wait({*running, signalled}, return_when=asyncio.FIRST_COMPLETED)
                if signalled in done:
                    number = signalled.result()
                    self._signal(number)
                    if number in ENDING:
                        await asyncio.wait(running, timeout=SECONDS_AFTER_SIGNAL)
                        return EXIT_INTERRUPTED if number == signal.SIGINT else 128 + number
                    signalled = asyncio.create_task(self.signals.get())
                running -= done
                failed = [ends[end] for end in done if end in ends and ends[end].supervisor.returncode]
                for process in [process for process in failed if self._can_come_back(process)]:
                    self.console.print(f"{process.name} {process.how_it_ended()}; it is started again.")
                    failed.remove(process)
                    again = await self._start_again(process)
                    end = asyncio.create_task(again.supervisor.wait())
                    ends[end] = again
                    running.add(end)
                if failed and all(process.supervisor.returncode == EXIT_RESHAPED for process in failed):
                    if running:  # they have left too, and end now
                        await asyncio.wait(running, timeout=SECONDS_FOR_THE_CAUSE)
                    return EXIT_RESHAPED
                if failed:
                    return await self._failed(failed, running, ends)
                # Servers serve until the chief, whom they serve, has ended.
                if self.job.ps and self.processes[0].supervisor.returncode == 0:
                    return 0
            return 0
        finally:
            signalled.cancel()
            watching.cancel()

    async def _watch(self) -> None:
        """Tells the chief of an elastic job that all shall leave; again and again, as it may be starting still."""
        while self.leave is not None:
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
            if await asyncio.to_thread(self.leave):
                self.processes[0].tell(str(int(elastic.SIGNAL)))

    def _can_come_back(self, process: Process) -> bool:
        told = process.supervisor.returncode in (EXIT_USAGE, EXIT_CLUSTER)  # it would say the same again
        return bool(self.job.ps) and process.role == "worker" and process.starts < STARTS_OF_A_WORKER and not told

    async def _failed(self, failed: list[Process], running: set[Any], ends: dict[Any, Process]) -> int:
        """Shows what the process said that failed first, and returns its exit code."""
        if all(process.supervisor.returncode == EXIT_CLUSTER for process in failed) and running:
            done, _ = await asyncio.wait(running, timeout=SECONDS_FOR_THE_CAUSE, return_when=asyncio.FIRST_COMPLETED)
            failed += [ends[end] for end in done if ends[end].supervisor.returncode]
        first = min(failed, key=lambda process: process.supervisor.returncode == EXIT_CLUSTER)
        # Where all others say that one is gone or silent, it is the one that says nothing.
        silent = [process for process in self.processes if process.supervisor.returncode is None]
        told = first.supervisor.returncode == EXIT_CLUSTER
        self.culprits = [self.processes.index(process) for process in (silent if told and silent else [first])]
        await asyncio.wait(self._pumps, timeout=0.5)
        self.screen.out.drain()  # what it said comes before what is said about it
        title = f"{first.name} {first.how_it_ended()}; its last lines"
        # What a program prints is text: it must not be taken for markup.
        self.console.print(Panel(Text(first.last_lines()), title=title, title_align="left"), soft_wrap=False)
        self.console.print(f"All output: {self.job.log_dir}", highlight=False)
        code = first.supervisor.returncode
        assert code
        return code if code > 0 else 128 - code

    def _signal(self, number: int) -> None:
        for process in self.processes:
            process.tell(str(int(number)))

    async def _end_all(self) -> None:
        for process in self.processes:
            process.end()
        if self.processes:
            waits = [asyncio.create_task(process.supervisor.wait()) for process in self.processes]
            await asyncio.wait(waits, timeout=supervisor.SECONDS_TO_END + 2.0)
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                if process.supervisor.returncode is None:
                    process.supervisor.kill()  # which also kills what it keeps
        if self._pumps:
            await asyncio.wait(self._pumps, timeout=1.0)
        for log in self._logs:
            log.end()
