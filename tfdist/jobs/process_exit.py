"""Ends this process after an error so that the other processes of its job do not wait for it forever.

A command that ends with an error calls `fail`; an uncaught exception calls it automatically.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import NoReturn

from tfdist import terminal
from tfdist.errors import EXIT_INTERRUPTED, ClusterError, TfdistError
from tfdist.jobs import job_environment

_hooks: list[Callable[[int], None]] = []
# Functions that close the run, with its status and the reason, if this process ends itself.
_closers: list[Callable[[str, str], None]] = []
# Functions that tell the user how to go on after a signal, which they get by name.
_advisers: list[Callable[[str], None]] = []
# Functions that wait for work that must be complete before this process ends itself, such as writing a checkpoint.
_waits: list[Callable[[float | None], None]] = []
# Held by the thread that ends this process.
_ending = threading.Lock()
SECONDS_TO_CLOSE = 3.0
# Fraction of the time between SIGTERM and SIGKILL; the remaining time is for the work after the wait.
FRACTION_TO_WAIT = 0.75
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
CTRL_C = "Ctrl-C"
# A signal to all processes of a job reaches them within this time. No process leaves earlier, so that each knows from
# its own signal why the others leave.
SECONDS_FOR_PEERS = 0.3
_received: list[int] = []  # the signals by which this process should end


def at_failure(hook: Callable[[int], None]) -> None:
    """Registers `hook(exit_code)` to be called when this process ends with an error."""
    end_with_exit_codes()
    _hooks.append(hook)


@functools.cache
def end_with_exit_codes() -> None:
    """From now on, an error that is not caught ends this process with the error's exit code, also in a script.

    An interactive session continues after an error.
    """
    previous = sys.excepthook

    def on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous(kind, error, trace)
        exit_code = EXIT_INTERRUPTED if issubclass(kind, KeyboardInterrupt) else getattr(error, "exit_code", 1)
        fail(exit_code)
        if not hasattr(sys, "ps1"):
            sys.exit(exit_code)

    sys.excepthook = on_exception


def end_at_failure() -> None:
    """From now on, this process ends after an error at once, without exit handlers and destructors.

    Those of TensorFlow may wait for a lost process without limit. An interactive session continues after an error.
    """
    at_failure(_end_at_once)


def _end_at_once(exit_code: int) -> None:
    if hasattr(sys, "ps1"):
        return
    for wait in _waits:
        wait(None)
    _flush()
    os._exit(exit_code)


def wait_before_ending(wait: Callable[[float | None], None]) -> None:
    """Registers `wait(seconds)` to be called before this process ends by `end_process`, SIGTERM or SIGHUP.

    `seconds` is how long it may wait; `None` sets no limit.
    """
    _waits.append(wait)


def fail(exit_code: int) -> None:
    """Calls the hooks, the last one first; a hook may end the process."""
    sys.stderr.flush()
    while _hooks:
        _hooks.pop()(exit_code)


@contextlib.contextmanager
def closed_by(close: Callable[[str, str], None], advise: Callable[[str], None] = lambda name: None) -> Iterator[None]:
    """Calls `close(status, reason)` before the process ends by `end_process`, SIGTERM or SIGHUP.

    After a signal, `advise(name)` is called last, when checkpoints are written.

    Python's own signal handlers run only when native code returns. That may be too late, since SIGTERM is usually
    followed by SIGKILL after a few seconds. A thread therefore receives the signals.
    """
    _closers.append(close)
    _advisers.append(advise)
    # Leave out signals that are ignored, such as SIGHUP under nohup.
    numbers = [number for number in ENDING_SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    threading.Thread(target=_read_signals, args=(reader, numbers), daemon=True).start()
    previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, lambda *_: None)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(previous)
        os.close(writer)
        _closers.remove(close)
        _advisers.remove(advise)
        _received.clear()


def _read_signals(reader: int, numbers: Sequence[int]) -> None:
    while received := os.read(reader, 1):
        if received[0] == signal.SIGINT:  # the main thread ends the process by `KeyboardInterrupt`
            _received.append(signal.SIGINT)
        elif received[0] in numbers:
            _received.append(received[0])
            _end_by_signal(received[0])
    os.close(reader)


def end_if_signalled() -> None:
    """Ends this process if it has got a signal to end: then the loss of other processes is no failure of the job.

    Called from any thread, before such a loss is reported.
    """
    if _received:
        _end_by_signal(_received[0])


def _end_by_signal(number: int) -> NoReturn:
    _ending.acquire()
    name = CTRL_C if number == signal.SIGINT else signal.Signals(number).name
    leave = time.monotonic() + SECONDS_FOR_PEERS
    _close("interrupted", name, _seconds_until_killed())
    for advise in _advisers:
        advise(name)
    time.sleep(max(0.0, leave - time.monotonic()))
    os._exit(128 + number)


def end_process(error: TfdistError, finish: Callable[[int], None] = lambda exit_code: None) -> NoReturn:
    """Prints `error` and ends this process at once, from any thread, even if native code does not return.

    Closes the run, if this takes at most a few seconds, and waits until a checkpoint is written. No exit handlers run.
    At the end, `finish` is called with the exit code. If several threads call this, the first one ends the process.
    """
    if isinstance(error, ClusterError):
        end_if_signalled()
    _ending.acquire()
    terminal.say(f"error: {error}")
    _close("failed", error.sentence, None)
    finish(error.exit_code)
    os._exit(error.exit_code)


@contextlib.contextmanager
def limited(seconds: float, error: Callable[[], TfdistError], fallback: TfdistError) -> Iterator[None]:
    """Ends this process with `error()` if the context takes longer than `seconds`, for example in native code.

    Native code may hold Python's global interpreter lock, so that no thread of this process can run. A program outside
    then shows `fallback`, and ends this process with its exit code, after a further `SECONDS_TO_CLOSE`.
    """
    timer = threading.Timer(seconds, lambda: end_process(error()))
    timer.daemon = True
    timer.start()
    try:
        with _limited_from_outside(seconds + 2 * SECONDS_TO_CLOSE, fallback):
            yield
    finally:
        timer.cancel()


# Waits until the pipe is closed, at the end of the context or of the process; otherwise it ends the process.
_OUTSIDE = """
timeout "$1" cat > /dev/null
if [ $? -eq 124 ]; then printf 'error: %s\\n' "$3" >&2; printf 'error: %s\\n' "$3"; kill -s QUIT "$2"; fi
"""


@contextlib.contextmanager
def _limited_from_outside(seconds: float, error: TfdistError) -> Iterator[None]:
    # SIGQUIT has the number 3, and so `_exit` as its handler, called with the number, ends the process with this code.
    assert error.exit_code == signal.SIGQUIT
    libc = ctypes.CDLL(None)
    libc.signal.restype = ctypes.c_void_p
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    command = ["sh", "-c", _OUTSIDE, "sh", f"{seconds:g}", str(os.getpid()), str(error)]
    shown = terminal.descriptor()
    log = subprocess.DEVNULL if shown == terminal.STDERR else terminal.STDERR
    try:
        outside = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=shown, start_new_session=True)
    except OSError:  # this system has no shell
        yield
        return
    previous = libc.signal(signal.SIGQUIT, ctypes.cast(libc._exit, ctypes.c_void_p))
    try:
        yield
    finally:
        libc.signal(signal.SIGQUIT, previous)
        assert outside.stdin is not None
        outside.stdin.close()
        outside.wait()


def _seconds_until_killed() -> float | None:
    """How long this process may wait after SIGTERM; `None` if the launcher has not started it."""
    seconds = os.environ.get(job_environment.END_SECONDS)
    return None if seconds is None else float(seconds) * FRACTION_TO_WAIT


def _close(status: str, reason: str, seconds: float | None) -> None:
    until = None if seconds is None else time.monotonic() + seconds

    def close_run() -> None:
        for close in _closers:
            close(status, reason)
        _flush()

    closing = threading.Thread(target=close_run, daemon=True)
    closing.start()
    closing.join(SECONDS_TO_CLOSE if seconds is None else min(seconds, SECONDS_TO_CLOSE))
    for wait in _waits:
        wait(None if until is None else max(0.0, until - time.monotonic()))


def _flush() -> None:
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):  # it is closed
            stream.flush()
