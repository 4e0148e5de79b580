"""Child processes with a time limit, each the leader of a process group that ends with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess

SECONDS_TO_END = 5.0


def wait(child: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Waits for a child to end, terminates it after `seconds`, and always kills the rest of its process group.

    Args:
        child: started with `start_new_session=True`.
        seconds: the time limit.

    Returns:
        The exit code of the child; `None` if it was terminated.
    """
    try:
        return child.wait(seconds)
    except subprocess.TimeoutExpired:
        child.terminate()  # so that a launcher can end its processes
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(SECONDS_TO_END)
        return None
    finally:
        kill(child)


def kill(child: subprocess.Popen[bytes]) -> None:
    """Kills a child and its process group, if they still run."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
