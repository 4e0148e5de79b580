"""What must happen when this process ends with an error, so that others of its job do not wait for it for ever.

A command that ends with an error calls `fail`; an exception that nobody catches does so by itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

from tfdist import terminal
from tfdist.errors import TfdistError

_hooks: list[Callable[[int], None]] = []
# What closes the run, with how and why it ended, were this process to end from within.
_closers: list[Callable[[str, str], None]] = []
SECONDS_TO_CLOSE = 3.0
ENDING = (signal.SIGTERM, signal.SIGHUP)


def at_failure(hook: Callable[[int], None]) -> None:
    """Has `hook(exit_code)` called when this process ends with an error."""
    if not _hooks:
        before = sys.excepthook

        def on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            before(kind, error, trace)
            fail(getattr(error, "exit_code", 1))

        sys.excepthook = on_exception
    _hooks.append(hook)


def fail(exit_code: int) -> None:
    """Calls the hooks, the last one first; a hook may end the process."""
    sys.stderr.flush()
    while _hooks:
        _hooks.pop()(exit_code)


@contextlib.contextmanager
def closed_by(close: Callable[[str, str], None]) -> Iterator[None]:
    """Has `close(status, reason)` called before the process ends by `end_process`, or by SIGTERM or SIGHUP.

    Python's own handlers run when native code returns, which may be too late: whoever sends SIGTERM sends SIGKILL
    after a few seconds. So the signals are read by a thread.
    """
    _closers.append(close)
    # Not one that is ignored, as SIGHUP under nohup.
    numbers = [number for number in ENDING if signal.getsignal(number) is signal.SIG_DFL]
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    threading.Thread(target=_read_signals, args=(reader, numbers), daemon=True).start()
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, lambda *_: None)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(before)
        os.close(writer)
        _closers.remove(close)


def _read_signals(reader: int, numbers: Sequence[int]) -> None:
    while received := os.read(reader, 1):
        if received[0] in numbers:
            _close("interrupted", signal.Signals(received[0]).name)
            os._exit(128 + received[0])
    os.close(reader)


def end_process(error: TfdistError, before: Callable[[int], None]) -> None:
    """Shows `error` and ends this process at once, from any thread, where native code cannot be made to return.

    The run is closed, if that takes no longer than a few seconds, and no handler runs. `before` is called with the exit
    code at the end.
    """
    terminal.say(f"error: {error}")
    _close("failed", error.sentence)
    before(error.exit_code)
    os._exit(error.exit_code)


def _close(status: str, reason: str) -> None:
    closing = threading.Thread(target=lambda: [close(status, reason) for close in _closers], daemon=True)
    closing.start()
    closing.join(SECONDS_TO_CLOSE)
