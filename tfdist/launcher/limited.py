"""Child processes with a time limit, each the leader of a process group that ends with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess

SECONDS_TO_END = 5.0


def wait(child: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Waits for a child's end, and ends it where its time is over; what it leaves of its group is killed in any case.

    Args:
        child: started with `start_new_session=True`.
        seconds: its time.

    Returns:
        Its exit code; `None` if it was ended.
    """
    try:
        return child.wait(seconds)
    except subprocess.TimeoutExpired:
        child.terminate()  # a launcher then ends its processes
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(SECONDS_TO_END)
        return None
    finally:
        kill(child)


def kill(child: subprocess.Popen[bytes]) -> None:
    """Kills a child with its group, if it is there."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
