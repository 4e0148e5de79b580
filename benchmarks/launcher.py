"""The launcher with many processes: seconds, open files, memory and bytes of environment, by their number.

The processes run `cat`, without Python or TensorFlow, on this machine. With several hosts, a script stands for `ssh`,
and starts the agent of each host here.

Example: `python -m benchmarks.launcher --processes 64 512 4096 --hosts 1 64`
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tfdist.launcher import run
from tfdist.launcher.job import Job

SSH = """#!/bin/sh
echo >> "$SSH_CALLS"
while [ "$1" != "--" ]; do shift; done
shift 2
exec sh -c "$*"
"""
START_SECONDS = 300.0
ROW = "{:>9}{:>7}{:>5}{:>9}{:>7}{:>10}{:>10}{:>13}{:>11}"
COLUMNS = ("processes", "hosts", "ssh", "start s", "end s", "launcher", "an agent", "environment", "memory MB")


class Waiting(Job):
    """A job whose processes wait until somebody writes to a pipe."""

    def argv(self) -> list[str]:
        return ["cat", *self.command]


def launch(processes: int, hosts: int, folder: Path) -> int:
    """Runs the job; this is another process, which its measurement looks at."""
    addresses = tuple(f"127.0.{host // 200}.{host % 200 + 1}" for host in range(hosts))
    named = tuple(addresses[rank * hosts // processes] for rank in range(processes)) if hosts > 1 else ()
    job = Waiting(
        (str(folder / "pipe"),),
        workers=processes,
        hosts=named,
        start_seconds=START_SECONDS,
        log_dir=folder / "logs",
    )
    return run.run(job)


def measure(processes: int, hosts: int) -> str:
    """One line of the table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.mkfifo(folder / "pipe")
        (folder / "ssh").write_text(SSH)
        (folder / "ssh").chmod(0o755)
        (folder / "calls").touch()
        environment = os.environ | {"PATH": f"{name}:{os.environ['PATH']}", "SSH_CALLS": str(folder / "calls")}
        command = [sys.executable, "-m", "benchmarks.launcher", "--launch", str(processes), str(hosts), name]
        began = time.monotonic()
        launcher = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            waiting = wait_for(processes, psutil.Process(launcher.pid))
            started = time.monotonic()
            figures = look(psutil.Process(launcher.pid), waiting)
            calls = len((folder / "calls").read_text().splitlines())
            began_to_end = time.monotonic()
            os.close(os.open(folder / "pipe", os.O_WRONLY))
            if code := launcher.wait(START_SECONDS):
                sys.exit(f"The launcher ended with exit code {code}")
        finally:
            launcher.kill()
        ended = time.monotonic()
        seconds = f"{started - began:.1f}", f"{ended - began_to_end:.1f}"
        return ROW.format(processes, hosts, calls, *seconds, *figures)


def wait_for(count: int, launcher: psutil.Process) -> list[psutil.Process]:
    """The processes of the job, when all of them are there."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and launcher.is_running():
        found = [each for each in launcher.children(recursive=True) if runs_cat(each)]
        if len(found) == count:
            return found
        time.sleep(0.2)
    sys.exit(f"Not all of the {count} processes have started")


def runs_cat(process: psutil.Process) -> bool:
    """Whether this is a process of the job."""
    try:
        return process.name() == "cat"
    except psutil.Error:
        return False


def look(launcher: psutil.Process, waiting: list[psutil.Process]) -> tuple[int, int, str, str]:
    """Open files of the launcher and of an agent, bytes that describe the job, and memory of all that supervises."""
    agents = {process.ppid() for process in waiting}
    others = [psutil.Process(each) for each in agents]
    described = [value for name, value in waiting[-1].environ().items() if name in ("TF_CONFIG", "TFDIST_CLUSTER")]
    memory = sum(each.memory_full_info().uss for each in [launcher, *others])
    size = f"{len(described[0].encode()):,}"
    return launcher.num_fds(), max(each.num_fds() for each in others), size, f"{memory / 1e6:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--hosts", type=int, nargs="+", default=[1])
    parser.add_argument("--launch", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.launch:
        processes, hosts, folder = arguments.launch
        sys.exit(launch(int(processes), int(hosts), Path(folder)))
    if shutil.which("cat") is None:
        sys.exit("There is no `cat` on the path")
    print(" " * 37 + "  open files of  TF_CONFIG or")
    print(ROW.format(*COLUMNS))
    for processes in arguments.processes:
        for hosts in arguments.hosts:
            print(measure(processes, hosts), flush=True)


if __name__ == "__main__":
    main()
