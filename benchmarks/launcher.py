"""The launcher with many processes: seconds, open files, memory and size of the environment, by their number.

The processes run `cat`, without Python or TensorFlow, on this machine. With several hosts, a script replaces `ssh`,
and starts the agent of each host here. The bytes of TF_CONFIG are those in the environment of one process; 0 means that
a file describes the cluster. The memory is that of the launcher and its agents.

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
from dataclasses import dataclass
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
COLUMNS = ("processes", "hosts", "ssh", "start s", "end s", "launcher", "an agent", "TF_CONFIG B", "memory MB")


class WaitingJob(Job):
    """A job whose processes wait until a pipe is written."""

    def argv(self) -> list[str]:
        return ["cat", *self.command]


def launch(processes: int, hosts: int, folder: Path) -> int:
    """Runs the job, in the process that is measured."""
    addresses = tuple(f"127.0.{host // 200}.{host % 200 + 1}" for host in range(hosts))
    host_by_rank = tuple(addresses[rank * hosts // processes] for rank in range(processes)) if hosts > 1 else ()
    job = WaitingJob(
        (str(folder / "pipe"),),
        workers=processes,
        hosts=host_by_rank,
        start_seconds=START_SECONDS,
        log_dir=folder / "logs",
    )
    return run.run(job)


@dataclass
class Figures:
    """The measured figures, and the standard error of the launcher."""

    processes: int
    hosts: int
    ssh_calls: int
    start_seconds: float
    end_seconds: float
    launcher_files: int
    agent_files: int
    cluster_bytes: int
    memory_bytes: int
    supervisors: int
    errors: str

    def __str__(self) -> str:
        times = f"{self.start_seconds:.1f}", f"{self.end_seconds:.1f}"
        files = self.launcher_files, self.agent_files
        sizes = f"{self.cluster_bytes:,}", f"{self.memory_bytes / 1e6:.0f}"
        return ROW.format(self.processes, self.hosts, self.ssh_calls, *times, *files, *sizes)


def measure(processes: int, hosts: int) -> Figures:
    """Starts processes on simulated hosts, measures them, and ends them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.mkfifo(folder / "pipe")
        (folder / "ssh").write_text(SSH)
        (folder / "ssh").chmod(0o755)
        (folder / "calls").touch()
        environment = os.environ | {"PATH": f"{name}:{os.environ['PATH']}", "SSH_CALLS": str(folder / "calls")}
        command = [sys.executable, "-m", "benchmarks.launcher", "--launch", str(processes), str(hosts), name]
        began = time.monotonic()
        errors = (folder / "errors").open("w+")
        launcher = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=errors)
        try:
            waiting = wait_for(processes, psutil.Process(launcher.pid))
            started = time.monotonic()
            figures = look(psutil.Process(launcher.pid), waiting)
            calls = len((folder / "calls").read_text().splitlines())
            began_to_end = time.monotonic()
            os.close(os.open(folder / "pipe", os.O_WRONLY))
            code = launcher.wait(START_SECONDS)
            ended = time.monotonic()
        finally:
            launcher.kill()
            launcher.wait()
        errors.seek(0)
        output = errors.read()
        if code:
            sys.exit(f"The launcher ended with exit code {code}: {output}")
        return Figures(processes, hosts, calls, started - began, ended - began_to_end, *figures, output)


def wait_for(count: int, launcher: psutil.Process) -> list[psutil.Process]:
    """Waits until all processes of the job run, and returns them."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and launcher.is_running():
        time.sleep(0.1)
        # Inspecting thousands of processes takes as long as starting some of them, so this is checked first.
        if len(psutil.pids()) < count:
            continue
        processes = [each for each in launcher.children(recursive=True) if runs_cat(each)]
        if len(processes) == count:
            return processes
    sys.exit(f"Not all of the {count} processes have started")


def runs_cat(process: psutil.Process) -> bool:
    """Whether `process` is a process of the job."""
    try:
        return process.name() == "cat"
    except psutil.Error:
        return False


def look(launcher: psutil.Process, waiting: list[psutil.Process]) -> tuple[int, int, int, int, int]:
    """Open files of the launcher and of an agent, bytes of TF_CONFIG, and memory and number of the supervisors."""
    agents = [psutil.Process(pid) for pid in {process.ppid() for process in waiting}]
    memory = sum(process.memory_full_info().uss for process in [launcher, *agents])
    others = {process.pid for process in launcher.children(recursive=True)} - {process.pid for process in waiting}
    size = len(waiting[-1].environ().get("TF_CONFIG", ""))
    return launcher.num_fds(), max(agent.num_fds() for agent in agents), size, memory, 1 + len(others)


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
    print(" " * 37 + "       open files of")
    print(ROW.format(*COLUMNS))
    for processes in arguments.processes:
        for hosts in arguments.hosts:
            print(measure(processes, hosts), flush=True)


if __name__ == "__main__":
    main()
