"""Writes checkpoints in a thread, one at a time, while the training goes on.

The interpreter waits for the thread when the program ends, and so does a process that ends itself because another
process is gone. On SIGTERM a process of the launcher waits as long as the launcher does before it sends SIGKILL, then
gives the write up. The checkpoints before remain, also where a process is killed.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tfdist import files, terminal
from tfdist.errors import CheckpointError
from tfdist.jobs import process_exit

_under_way: set[threading.Thread] = set()


class Writer:
    """The writes of one training.

    Attributes:
        written: the file that was written last, or None.
    """

    def __init__(self) -> None:
        self.written: Path | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, write: Callable[[], Path]) -> None:
        """Calls `write` in a thread, after the one under way."""
        self.wait()
        _wait_at_the_end()
        self._thread = threading.Thread(target=self._run, args=(write,), name="tfdist-checkpoint")
        _under_way.add(self._thread)
        self._thread.start()

    def wait(self) -> None:
        """Waits for the write under way."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def error(self) -> CheckpointError | None:
        """Why the last write has failed, told once; `None` if it has not, or is under way. Does not wait."""
        error, self._error = self._error, None
        if error is None or isinstance(error, CheckpointError):
            return error
        raise error

    def _run(self, write: Callable[[], Path]) -> None:
        try:
            self.written = write()
        except BaseException as error:  # raised in the thread that trains
            self._error = error
        finally:
            _under_way.discard(threading.current_thread())


def wait_for_all() -> None:
    """Waits for the writes of this process."""
    for thread in list(_under_way):
        thread.join()


@contextlib.contextmanager
def finished() -> Iterator[None]:
    """The context of a training, which ends when its writes have ended, with an error too."""
    try:
        yield
    finally:
        wait_for_all()


@functools.cache
def _wait_at_the_end() -> None:
    process_exit.wait_before_ending(_finish_or_give_up)


def _finish_or_give_up(seconds: float | None) -> None:
    """Waits for the writes of this process, which then ends; removes what is not written after some seconds."""
    until = None if seconds is None else time.monotonic() + seconds
    for thread in list(_under_way):
        thread.join(None if until is None else max(0.0, until - time.monotonic()))
    if _under_way:
        files.remove_unfinished()
        terminal.say(
            f"The checkpoint that was being written is given up, since it would take more than {seconds:.1f} s; "
            "the one before remains"
        )
