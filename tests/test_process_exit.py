"""A process ends after an error, whatever its threads and destructors wait for."""

import subprocess
import sys

import pytest

LIMITED = """
import ctypes, time
from tfdist.errors import ClusterError
from tfdist.jobs import process_exit
process_exit.SECONDS_TO_CLOSE = 0.3
with process_exit.limited(0.3, lambda: ClusterError("by a thread", "-"), ClusterError("from outside", "-")):
    {wait}
print("in time")
"""


@pytest.mark.parametrize(
    ("wait", "code", "says"),
    [
        ("pass", 0, ""),
        ("ctypes.CDLL(None).sleep(30)", 3, "error: by a thread\n\nhint: -\n"),
        ("ctypes.PyDLL(None).sleep(30)", 3, "error: from outside\n\nhint: -\n"),  # which holds the interpreter lock
    ],
    ids=["in time", "native code", "native code that holds the interpreter lock"],
)
def test_a_context_that_takes_too_long_ends_the_process_with_its_error(wait, code, says):
    command = [sys.executable, "-c", LIMITED.replace("{wait}", wait)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=25)
    assert (done.returncode, done.stderr) == (code, says)
    assert done.stdout == ("in time\n" if code == 0 else "")


LOGGED = """
import ctypes, sys
from pathlib import Path
from tfdist import terminal
from tfdist.errors import ClusterError
from tfdist.jobs import process_exit
process_exit.SECONDS_TO_CLOSE = 0.3
error = ClusterError("from outside", "-")
with terminal.logged_to(Path(sys.argv[1])), process_exit.limited(0.1, lambda: error, error):
    ctypes.PyDLL(None).sleep(30)
"""


def test_the_error_from_outside_is_shown_on_the_terminal_and_in_the_log(tmp_path):
    command = [sys.executable, "-c", LOGGED, tmp_path / "log.txt"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=25)
    said = "error: from outside\n\nhint: -\n"
    assert (done.returncode, done.stdout, done.stderr) == (3, "", said)
    assert (tmp_path / "log.txt").read_text() == said


FAILING = """
import atexit, sys, threading
from tfdist.jobs import process_exit

class Blocking:
    def __del__(self):
        threading.Event().wait()  # like TensorFlow's objects whose server is stopped

process_exit.end_at_failure()
kept = Blocking()
print("before", end="")
raise {error}
"""


@pytest.mark.parametrize(
    ("error", "code"), [("KeyboardInterrupt", 130), ("ValueError('wrong')", 1)], ids=["interrupt", "error"]
)
def test_a_process_ends_after_an_error_although_a_destructor_waits_without_limit(error, code):
    command = [sys.executable, "-c", FAILING.replace("{error}", error)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert (done.returncode, done.stdout) == (code, "before")
    assert error.partition("(")[0] in done.stderr


UNCAUGHT = """
import atexit
from tfdist.errors import ClusterError
from tfdist.jobs import process_exit

atexit.register(print, "closed")
process_exit.end_with_exit_codes()
process_exit.end_with_exit_codes()
raise {error}
"""


@pytest.mark.parametrize(
    ("error", "code"), [("ClusterError('lost', '-')", 3), ("ValueError('wrong')", 1), ("KeyboardInterrupt", 130)]
)
def test_a_script_ends_with_the_exit_code_of_its_error_after_its_exit_handlers(error, code):
    command = [sys.executable, "-c", UNCAUGHT.replace("{error}", error)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert (done.returncode, done.stdout) == (code, "closed\n")
    assert done.stderr.count("Traceback") == 1
