"""The hosts of a job: on each an agent, to which the launcher connects over ssh on other machines, and processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import sys
from asyncio.subprocess import PIPE
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tfdist.errors import ClusterError, UsageError
from tfdist.launcher import agent
from tfdist.launcher.job import Job
from tfdist.launcher.process import Process, Stream

# The streams of an agent, and a descriptor of asyncio's.
FILES_PER_HOST = 4
SECONDS_FOR_LAST_OUTPUT = 1.0
CONNECTION_LOST = 255  # the exit code of ssh in this case
MAX_LINE_BYTES = 1 << 20


class Place:
    """Where an agent runs; by default on this machine.

    Attributes:
        name: the name or the address of the host; `None` for this machine.
        hint: what to check if the agent does not start.
        has_own_gpus: whether the agent sees the GPUs of its processes alone, and not all GPUs of its host.
    """

    name: str | None = None
    hint: ClassVar[str] = "check that this machine can start processes"
    has_own_gpus: ClassVar[bool] = False

    async def start_agent(self, ports: Sequence[str]) -> Any:
        """Starts the agent, and returns it in the form of `asyncio.subprocess.Process`.

        Args:
            ports: the port to reserve for each of its processes, or 0.
        """
        return await _started([sys.executable, "-m", agent.__name__, *ports])


class OverSsh(Place):
    """Another host, on which ssh starts the agent.

    Args:
        name: the name of the host.
        ssh: the command `ssh` with its options.
    """

    name: str
    hint = "check that `ssh -o BatchMode=yes` reaches the host, and that tfdist is installed there at the same path"

    def __init__(self, name: str, ssh: Sequence[str]):
        self.name = name
        self._ssh = ssh

    async def start_agent(self, ports: Sequence[str]) -> Any:
        command = shlex.join([sys.executable, "-m", agent.__name__, *ports])
        remote = f"cd {shlex.quote(os.getcwd())} && exec {command}"
        return await _started([*self._ssh, "--", self.name.strip("[]"), remote])


def places(job: Job) -> list[Place]:
    """The place of each rank: this machine, or one of the hosts of the job."""
    ssh = ["ssh", *job.ssh_arguments()]
    names = [job.host(rank) for rank in range(len(job.roles))]
    by_name = {name: Place() if name is None else OverSsh(name, ssh) for name in names}
    return [by_name[name] for name in names]


async def _started(command: Sequence[str]) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        limit=MAX_LINE_BYTES,
        start_new_session=True,  # Ctrl-C goes to the launcher, which forwards it
    )


@dataclass(eq=False)
class Host:
    """A host of a job: the agent on it, the connection to the agent, and its processes with their streams.

    Attributes:
        place: where the agent runs.
        processes: the host's processes, by their number on the host.
        streams: the output and the error stream of each process.
        ended: called with each process that has ended.
        job: the job as sent to the agent.
        is_connected: whether the agent is running and reachable.
    """

    place: Place
    processes: list[Process]
    streams: list[tuple[Stream, Stream]]
    ended: Callable[[Process], None]
    job: dict[str, Any] = field(default_factory=dict, init=False)
    is_connected: bool = field(default=False, init=False)
    _agent: Any = field(default=None, init=False)
    _listening: asyncio.Task[None] | None = field(default=None, init=False)

    async def open(self) -> None:
        """Starts the agent."""
        self._agent = await self.place.start_agent([str(process.port) for process in self.processes])

    async def connect(self, seconds: float, deadline: float) -> None:
        """Waits for the agent's first message, which has the ports of the processes.

        Args:
            seconds: the time limit, for the error message.
            deadline: when the limit ends, in the time of the event loop.

        Raises:
            ClusterError: the agent did not start.
            UsageError: the host cannot run as many processes.
        """
        assert self._agent is not None and self._agent.stdout is not None and self._agent.stderr is not None
        output, message, in_time = b"", None, False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                # Over ssh, the host may print a login message first.
                while message is None and (line := await self._agent.stdout.readline()):
                    message = agent.first_message(line)
                    output += b"" if message else line
                in_time = True
        await self.processes[0].keep(output)
        if message is None:
            output += await _remaining(self._agent.stderr)
            raise self._did_not_start(output, "" if in_time else f" in {seconds:g} s")
        if "refused" in message:
            raise UsageError(*message["refused"])
        for process, port in zip(self.processes, message["ports"], strict=True):
            process.port = port
        self.is_connected = True
        self._listening = asyncio.create_task(self._listen())

    def _did_not_start(self, output: bytes, within: str) -> ClusterError:
        names = self.processes[0].name
        if len(self.processes) > 1:
            names += f" and {len(self.processes) - 1} more"
        location = f" on the host `{self.place.name}`" if self.place.name else ""
        lines = output.decode(errors="replace").strip().splitlines() or ["there was no output"]
        return ClusterError(f"{names}{location} did not start{within}: {lines[-1].strip()}", self.place.hint)

    def start(self, processes: Sequence[Process]) -> None:
        """Orders the agent to start these processes."""
        if processes:
            self.send({"job": self.job, "start": [self.processes.index(process) for process in processes]})

    def send(self, order: Mapping[str, Any]) -> None:
        """Sends an order to the agent, if it is still connected."""
        assert self._agent is not None and self._agent.stdin is not None
        with contextlib.suppress(ConnectionError, RuntimeError):
            self._agent.stdin.write(json.dumps(order).encode() + b"\n")

    async def end(self, seconds: float) -> None:
        """Lets the agent end all its processes, and kills it after `seconds`."""
        if self._agent is None:
            return
        assert self._agent.stdin is not None
        with contextlib.suppress(ConnectionError, RuntimeError):
            self._agent.stdin.close()
        last_output = asyncio.ensure_future(self._listening or self._agent.wait())
        await asyncio.wait([last_output], timeout=seconds)
        with contextlib.suppress(ProcessLookupError):
            if self._agent.returncode is None:
                self._agent.kill()  # which also ends its processes
        await asyncio.wait([last_output], timeout=SECONDS_FOR_LAST_OUTPUT)

    async def _listen(self) -> None:
        """Receives output and exit codes of the processes until the agent ends."""
        assert self._agent is not None and self._agent.stdout is not None and self._agent.stderr is not None
        errors = asyncio.create_task(self._keep_errors(self._agent.stderr))
        while frame := await agent.read_frame(self._agent.stdout):
            kind, number, content = frame
            if kind == agent.EXIT:
                await self._end(number, int(content))
            else:
                await self.streams[number][kind].write(content)
        self.is_connected = False
        # A connection that ssh shares with other programs outlives this command, and keeps its error stream open.
        await asyncio.wait([errors, asyncio.create_task(self._agent.wait())], timeout=SECONDS_FOR_LAST_OUTPUT)
        code = CONNECTION_LOST if self._agent.returncode is None else self._agent.returncode
        for number, process in enumerate(self.processes):
            if process.returncode is None:
                await self._end(number, code if code > 0 else 128 - code)

    async def _keep_errors(self, reader: asyncio.StreamReader) -> None:
        """Keeps the errors of the agent or of ssh with the output of the host's first process."""
        _, errors = self.streams[0]
        while chunk := await reader.read(agent.CHUNK_BYTES):
            await errors.write(chunk)

    async def _end(self, number: int, code: int) -> None:
        for stream in self.streams[number]:
            await stream.end()
        self.processes[number].returncode = code
        self.ended(self.processes[number])


async def _remaining(errors: asyncio.StreamReader) -> bytes:
    output = b""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.5):
            while chunk := await errors.read(agent.CHUNK_BYTES):
                output += chunk
    return output
