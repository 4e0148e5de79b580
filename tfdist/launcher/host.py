"""A host of the job as the launcher sees it: the agent there, and the one connection to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import sys
from asyncio.subprocess import PIPE
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tfdist.errors import ClusterError, TfdistError, UsageError
from tfdist.launcher import agent, protocol
from tfdist.launcher.process import Process, Stream

# The agent's three streams, and one of asyncio's.
DESCRIPTORS_OF_A_HOST = 4
SECONDS_FOR_LAST_WORDS = 1.0
CONNECTION_LOST = 255  # as ssh has it
MOST_PORTS = 8
LONGEST_LINE_BYTES = 1 << 20
PART_BYTES = 1 << 16


@dataclass(eq=False)
class Host:
    """A host, its processes, and their streams.

    Attributes:
        name: of the host; `None` is this machine.
        processes: by their number on the host.
        streams: of each process: output and errors.
        ended: called for each process that has ended.
        job: what the agent is told to start.
        is_connected: the agent is there.
    """

    name: str | None
    processes: list[Process]
    streams: list[tuple[Stream, Stream]]
    ended: Callable[[Process], None]
    job: dict[str, Any] = field(default_factory=dict, init=False)
    is_connected: bool = field(default=False, init=False)
    _agent: asyncio.subprocess.Process | None = field(default=None, init=False)
    _listening: asyncio.Task[None] | None = field(default=None, init=False)

    async def open(self, ssh: Sequence[str]) -> None:
        """Starts the agent, with the `ssh` command where the host has a name."""
        wanted = [str(process.port) for process in self.processes]
        command = [sys.executable, "-m", agent.__name__, *wanted]
        if self.name is not None:
            remote = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(command)}"
            command = [*ssh, "--", self.name.strip("[]"), remote]
        self._agent = await asyncio.create_subprocess_exec(
            *command,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            limit=LONGEST_LINE_BYTES,
            start_new_session=True,  # Ctrl-C comes to the launcher, which passes it on
        )

    async def meet(self, seconds: float, deadline: float) -> None:
        """Reads the ports of the processes, `deadline` at the latest, which is `seconds` after the start.

        Raises:
            ClusterError: the agent did not start.
            UsageError: its host cannot run so many processes.
        """
        assert self._agent is not None and self._agent.stdout is not None and self._agent.stderr is not None
        said, found, in_time = b"", None, False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                # Over ssh the host may say something of its own first.
                while found is None and (line := await self._agent.stdout.readline()):
                    found = protocol.first_message(line)
                    said += b"" if found else line
                in_time = True
        await self.processes[0].keep(said)
        if found is None:
            raise self._did_not_start(
                said + await _rest_of(self._agent.stderr), "" if in_time else f" in {seconds:g} s"
            )
        if "refused" in found:
            raise UsageError(*found["refused"])
        for process, port in zip(self.processes, found["ports"], strict=True):
            process.port = port
        self.is_connected = True
        self._listening = asyncio.create_task(self._listen())

    def _did_not_start(self, said: bytes, within: str) -> TfdistError:
        names = self.processes[0].name
        if len(self.processes) > 1:
            names += f" and {len(self.processes) - 1} more"
        where = f" on the host `{self.name}`" if self.name else ""
        lines = said.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        return ClusterError(
            f"{names}{where} did not start{within}: {lines[-1].strip()}",
            "see that `ssh -o BatchMode=yes` reaches the host, and that tfdist lies there at the same place"
            if self.name
            else "see that this machine can start processes",
        )

    def start(self, processes: Sequence[Process]) -> None:
        """Has the agent start these processes."""
        if processes:
            self.tell({"job": self.job, "start": [self.processes.index(process) for process in processes]})

    def named_ports(self) -> str:
        """The ports of the processes for a sentence: the first few of them, and how many more there are."""
        shown = [str(process.port) for process in self.processes[:MOST_PORTS]]
        more = len(self.processes) - len(shown)
        return f"{', '.join(shown)}{f' and {more} more' if more else ''} of {self.name or 'this machine'}"

    def tell(self, order: Mapping[str, Any]) -> None:
        """Says something to the agent, if it is still there."""
        assert self._agent is not None and self._agent.stdin is not None
        with contextlib.suppress(ConnectionError, RuntimeError):
            self._agent.stdin.write(protocol.order(order))

    async def end(self, seconds: float) -> None:
        """Has the agent end all its processes, and waits for its last words; ends it after `seconds`."""
        if self._agent is None:
            return
        assert self._agent.stdin is not None
        with contextlib.suppress(ConnectionError, RuntimeError):
            self._agent.stdin.close()
        last_words = asyncio.ensure_future(self._listening or self._agent.wait())
        await asyncio.wait([last_words], timeout=seconds)
        with contextlib.suppress(ProcessLookupError):
            if self._agent.returncode is None:
                self._agent.kill()  # which also ends its processes
        await asyncio.wait([last_words], timeout=SECONDS_FOR_LAST_WORDS)

    async def _listen(self) -> None:
        """Takes what the processes write, and how they end, until the agent does."""
        assert self._agent is not None and self._agent.stdout is not None and self._agent.stderr is not None
        own_words = asyncio.create_task(self._take_errors(self._agent.stderr))
        while found := await protocol.read_frame(self._agent.stdout):
            kind, number, content = found
            if kind == protocol.EXIT:
                await self._end(number, int(content))
            else:
                await self.streams[number][kind].take(content)
        self.is_connected = False
        # A connection that ssh shares with other programs goes on without this one, and keeps its errors open.
        await asyncio.wait([own_words, asyncio.create_task(self._agent.wait())], timeout=SECONDS_FOR_LAST_WORDS)
        code = CONNECTION_LOST if self._agent.returncode is None else self._agent.returncode
        for number, process in enumerate(self.processes):
            if process.returncode is None:
                await self._end(number, code if code > 0 else 128 - code)

    async def _take_errors(self, reader: asyncio.StreamReader) -> None:
        """What the agent or ssh itself says is kept with the output of the host's first process."""
        _, errors = self.streams[0]
        while part := await reader.read(PART_BYTES):
            await errors.take(part)

    async def _end(self, number: int, code: int) -> None:
        for stream in self.streams[number]:
            await stream.end()
        self.processes[number].returncode = code
        self.ended(self.processes[number])


async def _rest_of(errors: asyncio.StreamReader) -> bytes:
    """What is still to read."""
    said = b""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.5):
            while part := await errors.read(PART_BYTES):
                said += part
    return said
