"""Writes checkpoints in a background thread, one at a time, while the training continues.

The interpreter waits for the thread at the end of the program, and so does a process that exits because another process
is missing. On SIGTERM, a process of the launcher waits until shortly before the launcher sends SIGKILL, and then aborts
the write. Earlier checkpoints remain intact, even if a process is killed.
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
        written: the file that was written last, or `None`.
    """

    def __init__(self) -> None:
        self.written: Path | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, write: Callable[[], Path]) -> None:
        """Calls `write` in a thread, after the current write has ended."""
        self.wait()
        _wait_at_the_end()
        self._thread = threading.Thread(target=self._run, args=(write,), name="tfdist-checkpoint")
        _under_way.add(self._thread)
        self._thread.start()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def error(self) -> CheckpointError | None:
        """Returns the error of the last write once, without waiting; `None` if it succeeded or is in progress."""
        error, self._error = self._error, None
        if error is None or isinstance(error, CheckpointError):
            return error
        raise error

    def _run(self, write: Callable[[], Path]) -> None:
        try:
            self.written = write()
        except BaseException as error:  # the training thread raises it
            self._error = error
        finally:
            _under_way.discard(threading.current_thread())


def wait_for_all() -> None:
    """Waits for the writes of this process."""
    for thread in list(_under_way):
        thread.join()


@contextlib.contextmanager
def finished() -> Iterator[None]:
    """The context of a training; at its end, even after an error, all writes are finished."""
    try:
        yield
    finally:
        wait_for_all()


@functools.cache
def _wait_at_the_end() -> None:
    process_exit.wait_before_ending(_finish_or_give_up)


def _finish_or_give_up(seconds: float | None) -> None:
    """Waits for the writes of an ending process for at most `seconds`, then removes unfinished files."""
    deadline = None if seconds is None else time.monotonic() + seconds
    for thread in list(_under_way):
        thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
    if _under_way:
        files.remove_unfinished()
        terminal.say(
            f"Writing the last checkpoint was aborted, since it took longer than {seconds:.1f} s; the previous "
            "checkpoint remains"
        )
