"""A process of the job as the launcher sees it: its address, its log, what it says, and how it ended.

What a process says is shown without the lines of TensorFlow's C++ code, and its failure as a whole. TensorFlow writes
such lines whatever its log level says, the addresses and devices of a job among them. The logs of the processes keep
all of it.

Synopsis:

    >>> shown = WithoutNoise()
    >>> shown.rest_of(b"loss 0.5\\nI0000 00:00:17.2 11 port.cc:153] oneDNN is on") + shown.rest_of(b".\\nloss 0.4")
    b'loss 0.5\\nloss 0.4'
    >>> failure(["Epoch 1", "Traceback (most recent call last):", '  File "a.py", line 1', "ValueError: no"])
    'Traceback (most recent call last):\\n  File "a.py", line 1\\nValueError: no'
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from tfdist.launcher.output import Output

# How lines begin that TensorFlow writes when nothing is wrong.
_LITERAL = (
    b"WARNING: All log messages before absl::InitializeLog() is called",
    b"To enable the following instructions:",
    b"/job:",
)
_NUMBERED = re.compile(rb"I\d{4} \d\d:\d\d:[\d.]+ +\d+ \S+:\d+\] ")
_BEGUN_NUMBERED = re.compile(rb"I\d{0,4}|I\d{4} [\d:. ]*|I\d{4} [\d:.]+ +\d+ \S*")
LAST_LINES = 20
# How the message of a failure begins.
_FAILURES = ("Traceback (most recent call last)", "error: ", "Error: ", "Fatal Python error")


class WithoutNoise:
    """A stream of output in parts, less the lines that TensorFlow's C++ code writes when nothing is wrong."""

    def __init__(self) -> None:
        self._begun = b""  # of a line that may become one of these
        self._inside = False  # a line of which a part has been shown

    def rest_of(self, part: bytes) -> bytes:
        """What is to be shown now."""
        *lines, self._begun = (self._begun + part).split(b"\n")
        shown = []
        for line in lines:
            if self._inside or not _is_noise(line):
                shown.append(line + b"\n")
            self._inside = False
        if self._begun and (self._inside or not _may_be_noise(self._begun)):
            shown.append(self._begun)
            self._begun, self._inside = b"", True
        return b"".join(shown)

    def end(self) -> bytes:
        """What was kept back for a line that has never ended."""
        begun, self._begun = self._begun, b""
        return b"" if _is_noise(begun) else begun


def failure(lines: Sequence[str]) -> str:
    """The message that a process ended with: from its beginning if that is found, and at least the last lines."""
    lines = [line.rstrip() for line in lines if line.strip() and not _is_noise(line.encode())]
    begins = [number for number, line in enumerate(lines) if line.startswith(_FAILURES)]
    first = begins.pop() if begins else len(lines)
    # An exception that was raised while another one was handled, and the command's last word on one.
    while begins and (
        lines[first].startswith("error: unexpected")
        or any("above exception" in line for line in lines[begins[-1] : first])
    ):
        first = begins.pop()
    return "\n".join(lines[max(0, min(first, len(lines) - LAST_LINES)) :])


def _is_noise(line: bytes) -> bool:
    return line.startswith(_LITERAL) or _NUMBERED.match(line) is not None


def _may_be_noise(begun: bytes) -> bool:
    if _is_noise(begun) or _BEGUN_NUMBERED.fullmatch(begun):
        return True
    return any(literal.startswith(begun) for literal in _LITERAL)


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
        return failure(self.last.decode(errors="replace").splitlines()) or "(it said nothing)"

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
        self._noise = None if all_of_it else WithoutNoise()
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
