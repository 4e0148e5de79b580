"""What the console promises of a process that is ended from outside."""

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Python's own handler of a signal would wait for the second lock for ever.
BUSY = """
import ctypes, os
from tfdist import console
mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
with console.closed_by(lambda status, reason: print(status, reason, os.getpid(), flush=True)):
    print("busy", flush=True)
    lock(mutex)
    lock(mutex)
"""
CLOSED_TWICE = """
import signal, time
from tfdist import console
for _ in range(2):
    with console.closed_by(print):
        pass
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
print("busy", flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def busy(script, *under):
    command = [*under, sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout.readline() == "busy\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_run_is_closed_at_a_signal_even_while_native_code_waits(number):
    with busy(BUSY, "env", "--default-signal") as process:  # these tests may run under nohup
        process.send_signal(number)
        out, _ = process.communicate(timeout=5)
    assert out == f"interrupted {number.name} {process.pid}\n"
    assert process.returncode == 128 + number


def test_a_hangup_that_is_ignored_ends_nothing():
    with busy(BUSY, "nohup") as process:
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=1)
        process.terminate()
        out, _ = process.communicate(timeout=5)
    assert out == f"interrupted SIGTERM {process.pid}\n"


def test_after_a_run_signals_do_what_they_did_before():
    with busy(CLOSED_TWICE) as process:
        process.terminate()
        assert process.wait(timeout=5) == -signal.SIGTERM
