"""A process of the job as the launcher sees it: its supervisor, its log, and what it says."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from dataclasses import dataclass

from tfdist.launcher import messages
from tfdist.launcher.output import Output

LAST_BYTES = 1 << 16


@dataclass
class Process:
    """One process of the job, and the supervisor that has it."""

    role: str
    index: int
    host: str | None
    log: Output
    supervisor: asyncio.subprocess.Process
    terminal: int | None  # what the supervisor has as its terminal, seen from here
    port: int = 0
    starts: int = 1
    last: bytes = b""  # of what it has said

    @property
    def name(self) -> str:
        """Such as `worker 1`."""
        return f"{self.role} {self.index}"

    @property
    def address(self) -> str:
        """Where the others of the job reach it."""
        return f"{self.host or 'localhost'}:{self.port}"

    def tell(self, line: str) -> None:
        """Says something to the supervisor, if it is still there."""
        assert self.supervisor.stdin is not None
        with contextlib.suppress(ConnectionError, RuntimeError):
            self.supervisor.stdin.write(f"{line}\n".encode())

    def end(self) -> None:
        """Has the supervisor end its process."""
        assert self.supervisor.stdin is not None
        with contextlib.suppress(ConnectionError, RuntimeError):
            self.supervisor.stdin.close()

    async def keep(self, said: bytes) -> None:
        """Keeps what the process says, in its log too."""
        self.last = (self.last + said)[-LAST_BYTES:]
        await self.log.write(said)

    def last_lines(self) -> str:
        """The end of what the process has said."""
        return messages.failure(self.last.decode(errors="replace").splitlines()) or "(it said nothing)"

    def how_it_ended(self) -> str:
        """How the process ended, as the end of a sentence."""
        code = self.supervisor.returncode or 0
        if code > 128 and code - 128 in set(signal.Signals):
            return f"was ended by {signal.Signals(code - 128).name}"
        return f"ended with exit code {code}"


def port_in(line: bytes) -> int:
    """The port that a supervisor says it holds; 0 if the line is none of its own."""
    try:
        return int(json.loads(line)["port"])
    except (ValueError, KeyError, TypeError):
        return 0


async def rest_of(errors: asyncio.StreamReader | None) -> bytes:
    """What is still to read of a process' errors, where they have a stream of their own."""
    said = b""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.5):
            while errors is not None and (part := await errors.read(1 << 16)):
                said += part
    return said


async def copy(
    reader: asyncio.StreamReader, process: Process, out: Output | None, prefix: bytes, by_line: bool, all_of_it: bool
) -> None:
    """Keeps what is read, and shows it on `out`, if there is one: as it comes, or by prefixed lines."""
    begun = b""
    noise = None if all_of_it else messages.WithoutNoise()
    while part := await _read_some(reader):
        await process.keep(part)
        if noise is not None:
            part = noise.rest_of(part)
        if by_line:
            *lines, begun = (begun + part).split(b"\n")
            part = b"".join(prefix + line + b"\n" for line in lines)
        if out is not None:
            await out.write(part)
    rest = begun + (noise.end() if noise is not None else b"")
    if rest and out is not None:
        await out.write(prefix + rest + b"\n" if by_line else rest)


async def _read_some(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read(1 << 16)
    except OSError:  # a terminal whose last user has gone
        return b""
