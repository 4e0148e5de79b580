"""What must happen when this process ends with an error, so that other processes of its job do not wait forever.

A command that ends with an error calls `fail`; for an uncaught exception, `fail` is called automatically.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

from tfdist import terminal
from tfdist.errors import TfdistError
from tfdist.jobs import job_environment

_hooks: list[Callable[[int], None]] = []
# Closes the run, with its status and the reason, if this process ends itself.
_closers: list[Callable[[str, str], None]] = []
# What must end before this process ends itself: the write of a checkpoint, for example.
_waits: list[Callable[[float | None], None]] = []
SECONDS_TO_CLOSE = 3.0
# Of the time between SIGTERM and SIGKILL; the rest is for what is to be done after the wait.
FRACTION_TO_WAIT = 0.75
ENDING = (signal.SIGTERM, signal.SIGHUP)


def at_failure(hook: Callable[[int], None]) -> None:
    """Registers `hook(exit_code)` to be called when this process ends with an error."""
    if not _hooks:
        before = sys.excepthook

        def on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            before(kind, error, trace)
            fail(getattr(error, "exit_code", 1))

        sys.excepthook = on_exception
    _hooks.append(hook)


def wait_before_ending(wait: Callable[[float | None], None]) -> None:
    """Has `wait(seconds)` called before this process ends by `end_process`, SIGTERM or SIGHUP.

    `seconds` is how long it may wait; `None` is without limit.
    """
    _waits.append(wait)


def fail(exit_code: int) -> None:
    """Calls the hooks, the last one first; a hook may end the process."""
    sys.stderr.flush()
    while _hooks:
        _hooks.pop()(exit_code)


@contextlib.contextmanager
def closed_by(close: Callable[[str, str], None]) -> Iterator[None]:
    """Calls `close(status, reason)` before the process ends by `end_process`, SIGTERM or SIGHUP.

    Python's own signal handlers run only when native code returns. That may be too late, since SIGTERM is usually
    followed by SIGKILL after a few seconds. A thread therefore receives the signals.
    """
    _closers.append(close)
    # Leave out signals that are ignored, such as SIGHUP under nohup.
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
            _close("interrupted", signal.Signals(received[0]).name, _seconds_until_killed())
            os._exit(128 + received[0])
    os.close(reader)


def end_process(error: TfdistError, before: Callable[[int], None]) -> None:
    """Prints `error` and ends this process at once, from any thread, even if native code does not return.

    The run is closed if that takes at most a few seconds, and the write of a checkpoint is waited for. No exit handlers
    run. At the end, `before` is called with the exit code.
    """
    terminal.say(f"error: {error}")
    _close("failed", error.sentence, None)
    before(error.exit_code)
    os._exit(error.exit_code)


def _seconds_until_killed() -> float | None:
    """How long this process may wait after SIGTERM; `None` if the launcher has not started it."""
    told = os.environ.get(job_environment.END_SECONDS)
    return None if told is None else float(told) * FRACTION_TO_WAIT


def _close(status: str, reason: str, seconds: float | None) -> None:
    until = None if seconds is None else time.monotonic() + seconds
    closing = threading.Thread(target=lambda: [close(status, reason) for close in _closers], daemon=True)
    closing.start()
    closing.join(SECONDS_TO_CLOSE)
    for wait in _waits:
        wait(None if until is None else max(0.0, until - time.monotonic()))
