"""What is shown of the messages of processes: not what TensorFlow's C++ code tells of itself, and failures whole.

TensorFlow writes such lines whatever its log level says, the addresses and devices of a job among them. The logs of the
processes keep all of it.

Synopsis:

    >>> shown = WithoutNoise()
    >>> shown.rest_of(b"loss 0.5\\nI0000 00:00:17.2 11 port.cc:153] oneDNN is on") + shown.rest_of(b".\\nloss 0.4")
    b'loss 0.5\\nloss 0.4'
    >>> failure(["Epoch 1", "Traceback (most recent call last):", '  File "a.py", line 1', "ValueError: no"])
    'Traceback (most recent call last):\\n  File "a.py", line 1\\nValueError: no'
"""

from __future__ import annotations

import re
from collections.abc import Sequence

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
