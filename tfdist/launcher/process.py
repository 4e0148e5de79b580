"""A process of the job as the launcher sees it: its address, log, output, and exit code.

TensorFlow's C++ code writes log lines, with addresses and devices of the job among them, whatever its log level is. The
launcher hides such lines unless something is wrong, and shows the message of a failure completely. The log of the
process has everything.

Synopsis:

    >>> noise = NoiseFilter()
    >>> noise.filter(b"loss 0.5\\nI0000 00:00:17.2 11 port.cc:153] oneDNN is on") + noise.filter(b".\\nloss 0.4")
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

# The beginnings of lines that TensorFlow writes when nothing is wrong.
_NOISE_PREFIXES = (
    b"WARNING: All log messages before absl::InitializeLog() is called",
    b"To enable the following instructions:",
    b"/job:",
)
_NOISE_LINE = re.compile(rb"I\d{4} \d\d:\d\d:[\d.]+ +\d+ \S+:\d+\] ")
_START_OF_NOISE_LINE = re.compile(rb"I\d{0,4}|I\d{4} [\d:. ]*|I\d{4} [\d:.]+ +\d+ \S*")
LAST_LINES = 20
LAST_BYTES = 1 << 16
# The beginnings of failure messages.
_FAILURES = ("Traceback (most recent call last)", "error: ", "Error: ", "Fatal Python error")


class NoiseFilter:
    """Removes from a stream of output the lines that TensorFlow's C++ code writes when nothing is wrong."""

    def __init__(self) -> None:
        self._pending = b""  # the beginning of a line that may turn out to be noise
        self._inside_line = False  # the beginning of the current line has been returned

    def filter(self, chunk: bytes) -> bytes:
        """Takes the next chunk, and returns the output that can be shown now."""
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        shown = []
        for line in lines:
            if self._inside_line or not _is_noise(line):
                shown.append(line + b"\n")
            self._inside_line = False
        if self._pending and (self._inside_line or not _may_be_noise(self._pending)):
            shown.append(self._pending)
            self._pending, self._inside_line = b"", True
        return b"".join(shown)

    def end(self) -> bytes:
        """Returns the beginning of an unfinished line that was held back."""
        pending, self._pending = self._pending, b""
        return b"" if _is_noise(pending) else pending


def failure(lines: Sequence[str]) -> str:
    """Returns the message that a process ended with, from its beginning if recognized, and at least the last lines."""
    lines = [line.rstrip() for line in lines if line.strip() and not _is_noise(line.encode())]
    starts = [number for number, line in enumerate(lines) if line.startswith(_FAILURES)]
    first = starts.pop() if starts else len(lines)
    # Goes back to the first exception of a chain, also from the command's final line about an unexpected exception.
    while starts and (
        lines[first].startswith("error: unexpected")
        or any("above exception" in line for line in lines[starts[-1] : first])
    ):
        first = starts.pop()
    return "\n".join(lines[max(0, min(first, len(lines) - LAST_LINES)) :])


def _is_noise(line: bytes) -> bool:
    return line.startswith(_NOISE_PREFIXES) or _NOISE_LINE.match(line) is not None


def _may_be_noise(start: bytes) -> bool:
    if _is_noise(start) or _START_OF_NOISE_LINE.fullmatch(start):
        return True
    return any(prefix.startswith(start) for prefix in _NOISE_PREFIXES)


@dataclass(eq=False)
class Process:
    """A process of the job."""

    rank: int
    role: str
    index: int
    host: str | None
    log: Output
    port: int = 0
    starts: int = 1
    returncode: int | None = None  # for a signal, 128 plus its number
    last_output: bytes = b""

    @property
    def name(self) -> str:
        """The role and the index, such as `worker 1`."""
        return f"{self.role} {self.index}"

    @property
    def address(self) -> str:
        """The address at which the other processes reach it."""
        return f"{self.host or 'localhost'}:{self.port}"

    async def keep(self, output: bytes) -> None:
        """Writes output of the process to its log, and keeps the end of it in memory."""
        self.last_output = (self.last_output + output)[-LAST_BYTES:]
        await self.log.write(output)

    def last_lines(self) -> str:
        """The end of the output of the process."""
        return failure(self.last_output.decode(errors="replace").splitlines()) or "(no output)"

    def how_it_ended(self) -> str:
        """How the process ended, as the end of a sentence."""
        code = self.returncode or 0
        if code > 128 and code - 128 in set(signal.Signals):
            return f"was ended by {signal.Signals(code - 128).name}"
        return f"ended with exit code {code}"


class Stream:
    """The output or the errors of a process: logged, and shown as written or as lines with a prefix.

    Args:
        process: the process.
        out: the output to show the stream on; `None` hides it.
        by_line: show whole lines, each with the name of the process before it, except for rank 0.
    """

    def __init__(self, process: Process, out: Output | None, by_line: bool):
        self._process = process
        self._out = out
        self._by_line = by_line
        self._filter = NoiseFilter()
        self._prefix = f"[{process.name}] ".encode() if by_line and process.rank else b""
        self._pending = b""  # the beginning of a line

    async def write(self, chunk: bytes) -> None:
        """Logs and shows a chunk of output."""
        await self._process.keep(chunk)
        chunk = self._filter.filter(chunk)
        if self._by_line:
            *lines, self._pending = (self._pending + chunk).split(b"\n")
            chunk = b"".join(self._prefix + line + b"\n" for line in lines)
        if self._out is not None:
            await self._out.write(chunk)

    async def end(self) -> None:
        """Shows the beginning of an unfinished line that was held back."""
        pending = self._pending + self._filter.end()
        self._pending = b""
        if pending and self._out is not None:
            await self._out.write(self._prefix + pending + b"\n" if self._by_line else pending)
