"""Messages between the launcher and the agent of a host, over the agent's standard input and output.

    agent     →  {"ports": [34567, ...]}            the port that it has reserved for each process of its host
    launcher  →  {"job": {...}, "start": [0, 1]}    the job, once all addresses are known, and which processes to start
    agent     →  frames                             output and exit codes, each with the number of a process of the host
    launcher  →  {"signal": 15}                     a signal for all processes, or for those listed in `processes`
    launcher  →  end of input                       end all processes: SIGTERM, then SIGKILL

The launcher's messages and the agent's first message are lines of JSON. Instead of ports, the agent's first message may
be {"refused": [sentence, hint]}. The input also ends when the launcher dies or the connection breaks, so no process is
left behind.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Mapping
from typing import Any

# The kinds of frames. EXIT carries the exit code as text, and is the last frame about a process.
OUT, ERR, EXIT = range(3)
_HEADER = struct.Struct("!BII")  # kind, number of the process, bytes of content


def order(content: Mapping[str, Any]) -> bytes:
    """Encodes a message from the launcher."""
    return json.dumps(content).encode() + b"\n"


def frame(kind: int, number: int, content: bytes) -> bytes:
    """Encodes a message from the agent about process `number` of its host."""
    return _HEADER.pack(kind, number, len(content)) + content


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, int, bytes] | None:
    """Returns kind, process number and content of the next frame; `None` at the end of the connection."""
    try:
        kind, number, size = _HEADER.unpack(await reader.readexactly(_HEADER.size))
        return kind, number, await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def first_message(line: bytes) -> dict[str, Any] | None:
    """Decodes the agent's first message; `None` for any other line, such as the host's login message."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) and {"ports", "refused"} & message.keys() else None
