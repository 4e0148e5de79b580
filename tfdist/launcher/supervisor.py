"""Supervises one process of a job on its host: `python -m tfdist.launcher.supervisor`, started by the launcher or ssh.

    supervisor →  {"port": 34567}                                  a port that it holds for the process
    launcher   →  {"argv": [...], "environment": {...}, ...}       what to start, when all addresses are known
    launcher   →  15                                               a signal to pass on
    launcher   →  end of input                                     end the process: SIGTERM, then SIGKILL

The end of input also comes when the launcher, or the connection to it, is no more, so that nothing is left behind.
What the process writes goes where the supervisor's own output goes, and its exit code is the supervisor's.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any, TextIO, TypeVar

import psutil

from tfdist.cluster import ports

SECONDS_TO_END = 4.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

Part = TypeVar("Part")


def main(port: str = "0") -> int:
    """Keeps one process, and returns its exit code: 128 and the signal's number if a signal ended it.

    `port` is that of the process before, whose place this one takes.
    """
    # What the process starts and leaves becomes a child of the supervisor, and is ended with it.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with ports.hold(int(port)) as held:
        print(json.dumps({"port": held.getsockname()[1]}), flush=True)
        order = sys.stdin.readline()
        if not order.strip():
            return 0
        child = _start(json.loads(order))
        threading.Thread(target=_obey, args=(child, sys.stdin), daemon=True).start()
        code = child.wait()
        _kill_children()
    return code if code >= 0 else 128 - code


def _start(order: dict[str, Any]) -> subprocess.Popen[bytes]:
    environment = os.environ | order["environment"]
    cores = None
    if order["share"] is not None:
        index, count = order["share"]
        cores = share(sorted(os.sched_getaffinity(0)), index, count)
        gpus = share(_gpus(), index, count)
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)

    def before_exec() -> None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # TensorFlow, oneDNN and tf.data make as many threads as there are cores that they may use.
        if cores:
            os.sched_setaffinity(0, cores)

    return subprocess.Popen(
        order["argv"],
        cwd=order["cwd"],
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=before_exec,  # noqa: PLW1509 - no thread has been started yet
    )


def share(parts: Sequence[Part], index: int, count: int) -> Sequence[Part]:
    """What the process `index` of `count` gets of `parts`; nothing of its own where there are fewer than processes."""
    each = len(parts) // count
    return parts[index * each : (index + 1) * each]


def _gpus() -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False).stdout
    return [str(index) for index, line in enumerate(listed.splitlines()) if line.startswith("GPU ")]


def _obey(child: subprocess.Popen[bytes], orders: TextIO) -> None:
    for line in orders:
        _signal(child, int(line))
    _signal(child, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(SECONDS_TO_END)
    _kill_children()


def _signal(child: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, number)


def _kill_children() -> None:
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
