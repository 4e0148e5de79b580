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
from tfdist.jobs import process_exit
mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
with process_exit.closed_by(lambda status, reason: print(status, reason, os.getpid(), flush=True)):
    print("busy", flush=True)
    lock(mutex)
    lock(mutex)
"""
CLOSED_TWICE = """
import signal, time
from tfdist.jobs import process_exit
for _ in range(2):
    with process_exit.closed_by(print):
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


GOES_ON = """
import os, sys
from tfdist import terminal
with terminal.guarded_stdout():
    for _ in range(3):
        print("shown", flush=True)
    os.write(1, b"as a library writes")
    assert open(os.devnull).fileno() > 2  # no file of the program's takes the place of a stream
print("done", file=sys.stderr)
"""
NOT_TAKEN = pytest.mark.parametrize(
    ("where", "reason"), [(">&-", "it is closed"), ("> /dev/full", "No space left on device")]
)


def run_with_stdout(where, *command):
    shell = f'exec "$@" {where}'
    return subprocess.run(
        ["sh", "-c", shell, "sh", sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False
    )


@NOT_TAKEN
def test_a_program_goes_on_where_nobody_takes_what_it_shows_and_says_so_once(where, reason):
    done = run_with_stdout(where, "-c", GOES_ON)
    told = f"Standard output cannot be written ({reason}): further output is discarded.\n"
    assert (done.returncode, done.stderr) == (0, told + "done\n")


def test_both_streams_may_be_closed():
    assert run_with_stdout(">&- 2>&-", "-c", GOES_ON).returncode == 0


@pytest.mark.sampled(4)
@NOT_TAKEN
@pytest.mark.parametrize(
    "command", [("tfdist.world",), ("tfdist.launch", "--emit", "slurm", "x.py"), ("tfdist.train", "--help")]
)
def test_a_program_that_is_there_for_its_output_fails_in_a_sentence_where_nobody_takes_it(where, reason, command):
    done = run_with_stdout(where, "-m", *command)
    assert (done.returncode, done.stderr) == (
        1,
        f"Standard output cannot be written ({reason}): further output is discarded.\n",
    )


@pytest.mark.exhaustive  # as the quick ones above, in a whole training
@NOT_TAKEN
def test_a_training_goes_on_where_nobody_takes_what_it_shows(tmp_path, where, reason):
    options = ["--strategy", "single", "--model", "mlp", "--dataset", "digits", "--epochs", "1"]
    done = run_with_stdout(where, "-m", "tfdist.train", *options, "--run-dir", str(tmp_path / "run"))
    assert done.returncode == 0 and (tmp_path / "run" / "model.keras").exists()
    assert f"Standard output cannot be written ({reason})" in done.stderr and "Traceback" not in done.stderr
