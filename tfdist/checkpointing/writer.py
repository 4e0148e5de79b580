"""Writes checkpoints in a thread, one at a time, while the training goes on.

The interpreter waits for the thread when the program ends, and so does a process that ends itself on SIGTERM or because
another process is gone. A process that is killed meanwhile leaves the checkpoints before.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from tfdist.cluster import process_exit
from tfdist.errors import CheckpointError

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
    process_exit.wait_before_ending(wait_for_all)
