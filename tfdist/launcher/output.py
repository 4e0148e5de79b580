"""The outputs of the launcher: a full disk, a closed pipe or a stopped terminal never blocks the processes of a job.

One thread writes to each output, from a buffer. While an output is slow, its writers wait for space in the buffer. If
nothing could be written for some seconds, text that does not fit is dropped, which is reported once.

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

MAX_BUFFERED_BYTES = 1 << 24
STUCK_SECONDS = 5.0
SECONDS_BETWEEN_POLLS = 0.02


class Output:
    """A file descriptor with a thread that writes to it.

    Args:
        descriptor: the file descriptor to write to; `None` discards everything.
        lost: called once, in any thread, with the reason why text was dropped.
        close: whether `end` closes the descriptor.
    """

    def __init__(self, descriptor: int | None, lost: Callable[[str], None], close: bool = False):
        self._descriptor = descriptor
        self._lost: Callable[[str], None] | None = lost
        self._close = close
        self._buffer: deque[bytes] = deque()
        self._buffered_bytes = 0
        self._last_progress = time.monotonic()
        self._changed = threading.Condition()
        self._ended = False
        # A daemon, because a write that never returns must not keep the launcher from exiting.
        threading.Thread(target=self._write_all, name="tfdist-output", daemon=True).start()

    @classmethod
    def to_file(cls, path: Path, mode: str, lost: Callable[[str], None]) -> Output:
        """Returns an output to a file, which is replaced (`wb`) or appended to (`ab`).

        Raises:
            OSError: the file cannot be opened.
        """
        flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if "a" in mode else os.O_TRUNC)
        return cls(os.open(path, flags, 0o666), lost, close=True)

    @classmethod
    def to_stream(cls, stream: TextIO | None, lost: Callable[[str], None]) -> Output:
        """Returns an output to a standard stream of Python, which is `None` if it was closed at the process's start."""
        if stream is not None:
            stream.flush()
        return cls(None if stream is None else stream.fileno(), lost)

    def put(self, chunk: bytes) -> None:
        """Appends a chunk to the buffer, without waiting."""
        with self._changed:
            if not self._buffer:
                self._last_progress = time.monotonic()
            self._buffer.append(chunk)
            self._buffered_bytes += len(chunk)
            self._changed.notify_all()

    async def write(self, chunk: bytes) -> None:
        """Appends a chunk as soon as there is space; drops it if nothing could be written for too long."""
        while self._is_full() and not self._is_stuck():
            await asyncio.sleep(SECONDS_BETWEEN_POLLS)
        if self._is_full():
            self._lose(f"nothing could be written for {STUCK_SECONDS:g} s")
        else:
            self.put(chunk)

    def drain(self) -> None:
        """Waits until the buffer is written, or the output is stuck."""
        with self._changed:
            while self._buffer and not self._is_stuck():
                self._changed.wait(SECONDS_BETWEEN_POLLS)

    def end(self) -> None:
        """Drains the buffer and ends the thread."""
        self.drain()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _is_full(self) -> bool:
        return self._buffered_bytes >= MAX_BUFFERED_BYTES

    def _is_stuck(self) -> bool:
        return time.monotonic() - self._last_progress > STUCK_SECONDS

    def _lose(self, reason: str) -> None:
        lost, self._lost = self._lost, None
        if lost is not None:
            lost(reason)

    def _write_all(self) -> None:
        while True:
            with self._changed:
                while not self._buffer and not self._ended:
                    self._changed.wait()
                if not self._buffer:
                    break
                chunk = self._buffer[0]
            self._write(chunk)
            with self._changed:
                self._buffer.popleft()
                self._buffered_bytes -= len(chunk)
                self._last_progress = time.monotonic()
                self._changed.notify_all()
        if self._close and self._descriptor is not None:
            os.close(self._descriptor)

    def _write(self, chunk: bytes) -> None:
        if self._descriptor is None:
            self._lose("it is closed")
            return
        try:
            while chunk:
                try:
                    chunk = chunk[os.write(self._descriptor, chunk) :]
                except BlockingIOError:  # another program on the same terminal has made it non-blocking
                    select.select([], [self._descriptor], [])
        except OSError as error:  # the disk may have space again later
            self._lose(error.strerror or str(error))


class Screen:
    """The launcher's standard streams, for the output of the processes and for its messages about them.

    Args:
        log_dir: the folder with the logs, for the message about dropped output.

    Attributes:
        out: the standard output of the processes.
        err: the standard error of the processes, and the launcher's messages about them.
        console: prints to `err`.
    """

    def __init__(self, log_dir: Path):
        self.err = Output.to_stream(sys.stderr, lost=lambda reason: None)  # there is nowhere else to report it
        self.console = Console(file=cast(TextIO, _Text(self.err, sys.stderr)), soft_wrap=True)
        self.out = Output.to_stream(
            sys.stdout,
            lost=lambda reason: self.console.print(
                f"Not all output of the processes can be shown ({reason}); it is kept in {log_dir}.", highlight=False
            ),
        )

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *error: object) -> None:
        self.out.end()
        self.err.end()


class _Text(io.TextIOBase):
    """A text file for `rich` that writes to `output`, and is a terminal if `stream` is."""

    encoding = "utf-8"

    def __init__(self, output: Output, stream: TextIO | None):
        self._output = output
        self._stream = stream

    def write(self, text: str) -> int:
        self._output.put(text.encode(errors="replace"))
        return len(text)

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()
