"""The outputs of the launcher: a full disk, a closed pipe or a stopped terminal never blocks the processes of a job.

One thread writes to each output. The output of the processes is always read. While an output is slow, its writers wait
for space in its buffer. When nothing could be written for some seconds, text without space is dropped, which is
reported once.

Synopsis:

    with Output.to_file(path, "wb", lost=lambda reason: shown.put(f"{path} is incomplete: {reason}")) as log:
        await log.write(b"a line\\n")
"""

from __future__ import annotations

import asyncio
import io
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TextIO, cast

from rich.console import Console

MOST_WAITING_BYTES = 1 << 24
SECONDS_TO_MOVE = 5.0
SECONDS_BETWEEN_LOOKS = 0.02


class Output:
    """A file descriptor with a thread that writes to it.

    Args:
        descriptor: where to write; `None` discards everything.
        lost: called once, in any thread, with the reason why text was dropped.
        close: close the descriptor at the end.
    """

    def __init__(self, descriptor: int | None, lost: Callable[[str], None], close: bool = False):
        self._descriptor = descriptor
        self._lost: Callable[[str], None] | None = lost
        self._close = close
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._moved = time.monotonic()
        self._changed = threading.Condition()
        self._ended = False
        # A thread whose write never returns must not prevent the launcher from ending.
        threading.Thread(target=self._write_all, name="tfdist-output", daemon=True).start()

    @classmethod
    def to_file(cls, path: Path, mode: str, lost: Callable[[str], None]) -> Output:
        """An output to a file, which is replaced (`wb`) or appended to (`ab`).

        Raises:
            OSError: the file cannot be opened.
        """
        flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if "a" in mode else os.O_TRUNC)
        return cls(os.open(path, flags, 0o666), lost, close=True)

    @classmethod
    def to_stream(cls, stream: TextIO | None, lost: Callable[[str], None]) -> Output:
        """An output to one of Python's own streams, which is `None` if it was closed when the process began."""
        if stream is not None:
            stream.flush()
        return cls(None if stream is None else stream.fileno(), lost)

    def put(self, part: bytes) -> None:
        """Appends `part` to the buffer, without waiting."""
        with self._changed:
            if not self._waiting:
                self._moved = time.monotonic()
            self._waiting.append(part)
            self._waiting_bytes += len(part)
            self._changed.notify_all()

    async def write(self, part: bytes) -> None:
        """Appends `part` as soon as there is space; drops it if nothing could be written for too long."""
        while self._is_full() and not self._is_stuck():
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
        if self._is_full():
            self._lose(f"nothing could be written for {SECONDS_TO_MOVE:g} s")
        else:
            self.put(part)

    def drain(self) -> None:
        """Waits until the buffer is written, or nothing can be written any more."""
        with self._changed:
            while self._waiting and not self._is_stuck():
                self._changed.wait(SECONDS_BETWEEN_LOOKS)

    def end(self) -> None:
        """Waits as `drain` does, and ends the thread."""
        self.drain()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _is_full(self) -> bool:
        return self._waiting_bytes >= MOST_WAITING_BYTES

    def _is_stuck(self) -> bool:
        return time.monotonic() - self._moved > SECONDS_TO_MOVE

    def _lose(self, reason: str) -> None:
        lost, self._lost = self._lost, None
        if lost is not None:
            lost(reason)

    def _write_all(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._ended:
                    self._changed.wait()
                if not self._waiting:
                    break
                part = self._waiting[0]
            self._write(part)
            with self._changed:
                self._waiting.popleft()
                self._waiting_bytes -= len(part)
                self._moved = time.monotonic()
                self._changed.notify_all()
        if self._close and self._descriptor is not None:
            os.close(self._descriptor)

    def _write(self, part: bytes) -> None:
        if self._descriptor is None:
            self._lose("it is closed")
            return
        try:
            while part:
                try:
                    part = part[os.write(self._descriptor, part) :]
                except BlockingIOError:  # another program with the same terminal has made it non-blocking
                    select.select([], [self._descriptor], [])
        except OSError as error:  # the disk may have space again later
            self._lose(error.strerror or str(error))


class Screen:
    """The output of the launcher: that of the processes, and its own messages about them.

    Args:
        kept_in: the folder where all output is kept as well.

    Attributes:
        out: the standard output of the processes.
        err: the standard error of the processes, and the launcher's messages about them.
        console: prints to `err`.
    """

    def __init__(self, kept_in: Path):
        self.err = Output.to_stream(sys.stderr, lost=lambda reason: None)  # there is no other place to report it
        self.console = Console(file=cast(TextIO, _Text(self.err, sys.stderr)), soft_wrap=True)
        self.out = Output.to_stream(
            sys.stdout,
            lost=lambda reason: self.console.print(
                f"Not all output of the processes can be shown ({reason}); it is kept in {kept_in}.", highlight=False
            ),
        )

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *error: object) -> None:
        self.out.end()
        self.err.end()


class _Text(io.TextIOBase):
    """An output as a text file that `rich` can print to, in place of `stream`."""

    encoding = "utf-8"

    def __init__(self, output: Output, stream: TextIO | None):
        self._output = output
        self._stream = stream

    def write(self, text: str) -> int:
        self._output.put(text.encode(errors="replace"))
        return len(text)

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()
