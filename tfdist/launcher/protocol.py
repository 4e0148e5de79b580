"""What the launcher and the agent of a host say to each other, over the standard input and output of the agent.

    agent     →  {"ports": [34567, ...]}            a port that it reserves for each process of its host
    launcher  →  {"job": {...}, "start": [0, 1]}    what to start, once all addresses are known, and which of it
    agent     →  frames                             output and exit codes, each with the number of a process there
    launcher  →  {"signal": 15}                     a signal for all of them, or with `of` for some
    launcher  →  end of input                       end all: SIGTERM, then SIGKILL

The launcher's messages, and the first of the agent, are lines of JSON. The input also ends when the launcher dies or
the connection to it breaks, so that no process is left behind.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Mapping
from typing import Any

OUT, ERR, EXIT = range(3)  # the kinds of frames; EXIT carries the exit code as text, and is the last of a process
_HEADER = struct.Struct("!BII")  # kind, number of the process, bytes of content


def order(content: Mapping[str, Any]) -> bytes:
    """A message of the launcher."""
    return json.dumps(content).encode() + b"\n"


def frame(kind: int, number: int, content: bytes) -> bytes:
    """A message of the agent about process `number` of its host."""
    return _HEADER.pack(kind, number, len(content)) + content


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, int, bytes] | None:
    """Kind, number and content of the next frame; `None` at the end of the connection."""
    try:
        kind, number, size = _HEADER.unpack(await reader.readexactly(_HEADER.size))
        return kind, number, await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def first_message(line: bytes) -> dict[str, Any] | None:
    """The first message of an agent; `None` if the line is none, but what the login to its host has printed."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and {"ports", "refused"} & found.keys() else None
