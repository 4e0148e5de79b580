"""A process of the job as the launcher sees it: its address, its log, what it says, and how it ended."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from tfdist.launcher import messages
from tfdist.launcher.output import Output

LAST_BYTES = 1 << 16


@dataclass(eq=False)
class Process:
    """One process of the job."""

    rank: int
    role: str
    index: int
    host: str | None
    log: Output
    port: int = 0
    starts: int = 1
    returncode: int | None = None  # 128 and its number for a signal
    last: bytes = b""  # of what it has said

    @property
    def name(self) -> str:
        """Such as `worker 1`."""
        return f"{self.role} {self.index}"

    @property
    def address(self) -> str:
        """Where the others of the job reach it."""
        return f"{self.host or 'localhost'}:{self.port}"

    async def keep(self, said: bytes) -> None:
        """Keeps what the process says, in its log too."""
        self.last = (self.last + said)[-LAST_BYTES:]
        await self.log.write(said)

    def last_lines(self) -> str:
        """The end of what the process has said."""
        return messages.failure(self.last.decode(errors="replace").splitlines()) or "(it said nothing)"

    def how_it_ended(self) -> str:
        """How the process ended, as the end of a sentence."""
        code = self.returncode or 0
        if code > 128 and code - 128 in set(signal.Signals):
            return f"was ended by {signal.Signals(code - 128).name}"
        return f"ended with exit code {code}"


class Stream:
    """One of the two streams of a process: it is kept, and shown as it comes, or by prefixed lines.

    Args:
        process: the process.
        out: where it is shown; `None` is nowhere.
        by_line: show whole lines, with the name of the process before each.
        all_of_it: show what TensorFlow's C++ code writes when nothing is wrong too.
    """

    def __init__(self, process: Process, out: Output | None, by_line: bool, all_of_it: bool):
        self._process = process
        self._out = out
        self._by_line = by_line
        self._noise = None if all_of_it else messages.WithoutNoise()
        self._prefix = f"[{process.name}] ".encode() if by_line and process.rank else b""
        self._begun = b""  # of a line

    async def take(self, part: bytes) -> None:
        """Keeps and shows what has come."""
        await self._process.keep(part)
        if self._noise is not None:
            part = self._noise.rest_of(part)
        if self._by_line:
            *lines, self._begun = (self._begun + part).split(b"\n")
            part = b"".join(self._prefix + line + b"\n" for line in lines)
        if self._out is not None:
            await self._out.write(part)

    async def end(self) -> None:
        """Shows what was kept back of a line that has never ended."""
        rest = self._begun + (self._noise.end() if self._noise is not None else b"")
        self._begun = b""
        if rest and self._out is not None:
            await self._out.write(self._prefix + rest + b"\n" if self._by_line else rest)
