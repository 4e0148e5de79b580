"""Supervises one process of a job on its host: `python -m tfdist.launcher.supervisor`, started by the launcher or ssh.

    supervisor →  {"port": 34567}                                  a port that it reserves for the process
    launcher   →  {"argv": [...], "environment": {...}, ...}       what to start, once all addresses are known
    launcher   →  15                                               a signal to pass on
    launcher   →  end of input                                     end the process: SIGTERM, then SIGKILL

The input also ends when the launcher dies or the connection to it breaks, so that no process is left behind. The
process writes to the supervisor's own output, and the supervisor exits with the exit code of the process.
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

from tfdist.cluster import job_environment, ports

SECONDS_TO_END = 4.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

Part = TypeVar("Part")


def main(port: str = "0") -> int:
    """Supervises one process, and returns its exit code: 128 plus the number of the signal if a signal ended it.

    `port` is the port of the earlier process that this one replaces.
    """
    # Orphaned descendants of the process become children of the supervisor, and are ended with it.
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
        cores = part_for(sorted(os.sched_getaffinity(0)), index, count)
        gpus = part_for(_gpus(), index, count)
        if gpus:
            environment |= {"CUDA_VISIBLE_DEVICES": ",".join(gpus), job_environment.OWN_GPUS: "1"}

    def before_exec() -> None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # TensorFlow, oneDNN and tf.data create one thread per core that they may use.
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


def part_for(parts: Sequence[Part], index: int, count: int) -> Sequence[Part]:
    """The part of `parts` (cores or GPUs) for process `index` of `count`; empty if there are too few to divide."""
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
