"""Rendezvous and heartbeat with thousands of simulated processes: seconds to start and to detect failures.

Threads in a few operating-system processes simulate the processes of a job. They run tfdist's code over real
connections on this machine, without TensorFlow. A simulated process is killed by closing its connections, and stopped
by letting its thread sleep. All of them share the cores of this machine, unlike the processes of a real job.

Example: `python -m benchmarks.control_plane --processes 64 512 4096`
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import resource
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import psutil

from tfdist.errors import ClusterError
from tfdist.jobs import rendezvous
from tfdist.jobs.connections import LineConnection, gone
from tfdist.jobs.heartbeat import Heartbeat, Limits
from tfdist.jobs.tf_config import Task
from tfdist.jobs.world import World

SETTINGS = {"TensorFlow": "2.21.0", "Keras": "3.15.1"}
SILENT_SECONDS = 10.0
START_SECONDS = 300.0
WINDOW_SECONDS = 10.0  # the time in which bytes are counted
LONGEST_SECONDS = 120.0  # from a failure until it is reported
MANY = 64
DESCRIPTORS_EACH = 8  # maximum per simulated process, without the chief's connections
FIRST_PORT = 12_000  # below the ephemeral ports


@dataclass
class Host:
    """The simulated processes of one operating-system process.

    Args:
        tasks: all processes of the job.
        ranks: the ranks that are simulated here.
        pipe: the pipe to the controlling program.
    """

    tasks: tuple[Task, ...]
    ranks: list[int]
    pipe: Connection
    heartbeats: dict[int, Heartbeat] = field(default_factory=dict)
    errors: dict[int, tuple[float, str]] = field(default_factory=dict)
    killed: set[int] = field(default_factory=set)
    stopped: set[int] = field(default_factory=set)
    sent_bytes: int = 0

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.at_work = contextlib.ExitStack()  # which is never exited
        self.met: dict[int, float] = {}
        self.messages: dict[int, bytes] = {}
        self.all_messages: list[bytes] = []
        self.exchanged = threading.Event()

    def start(self) -> None:
        """Starts the simulated processes, and returns when all of them have joined the job."""
        threads = [threading.Thread(target=self.run, args=(rank,)) for rank in self.ranks]
        for thread in threads:
            thread.start()
        while len(self.messages) < len(self.ranks):
            time.sleep(0.01)
        self.pipe.send(self.messages)
        self.all_messages = self.pipe.recv()
        self.exchanged.set()
        for thread in threads:
            thread.join()

    def run(self, rank: int) -> None:
        """Starts one simulated process."""
        size = len(self.tasks)
        world = World(rank, size, rank, size, "TF_CONFIG", self.tasks)
        rendezvous.meet(world, SETTINGS, START_SECONDS)
        self.met[rank] = time.monotonic()

        def exchange(message: bytes) -> list[bytes]:
            with self.lock:
                self.messages[rank] = message
            self.exchanged.wait()
            return self.all_messages

        def counts() -> tuple[int, int]:
            while rank in self.stopped:
                time.sleep(1.0)
            if rank in self.killed:
                sys.exit()  # ends the thread, which closes its connections
            return 1, 1

        def give_up(error: ClusterError) -> None:
            self.errors[rank] = time.monotonic(), error.sentence

        self.heartbeats[rank] = Heartbeat(world, exchange, counts, Limits(SILENT_SECONDS), give_up)

    def wait_until_all_know_all(self) -> float:
        """Waits until each process has heard of all others, and returns the time."""
        while any(heartbeat._tree.whole.processes < len(self.tasks) for heartbeat in self.heartbeats.values()):
            time.sleep(0.05)
        return time.monotonic()

    def name(self, killed: list[int], stopped: list[int]) -> tuple[float, int]:
        """Kills and stops processes; returns when all others have named them, and the number of wrong reports."""
        for heartbeat in self.heartbeats.values():
            self.at_work.enter_context(heartbeat.work())
        self.killed.update(killed)
        self.stopped.update(stopped)
        survivors = set(self.ranks) - self.killed - self.stopped
        deadline = time.monotonic() + LONGEST_SECONDS
        while not survivors <= self.errors.keys() and time.monotonic() < deadline:
            time.sleep(0.05)
        world = World(0, len(self.tasks), 0, len(self.tasks), "TF_CONFIG", self.tasks)
        expected = gone(world, [*killed, *stopped], SILENT_SECONDS).sentence
        reports = [self.errors.get(rank, (deadline, "")) for rank in survivors]
        return max((at for at, _ in reports), default=0.0), sum(sentence != expected for _, sentence in reports)

    def serve(self) -> None:
        """Executes the commands of the controlling program."""
        send = LineConnection.send

        def counted(connection: LineConnection, line: bytes) -> None:
            self.sent_bytes += len(line)
            send(connection, line)

        LineConnection.send = counted  # type: ignore[method-assign]
        threading.stack_size(1 << 19)
        # Otherwise hundreds of threads would spend their time requesting the interpreter lock 200 times per second.
        sys.setswitchinterval(1.0)
        # Does not report threads that end intentionally.
        threading.excepthook = lambda hook: None if hook.exc_type is SystemExit else print(hook, file=sys.stderr)
        before = psutil.Process().memory_info().rss
        self.pipe.send("ready")
        while True:
            order = self.pipe.recv()
            if order[0] == "start":
                self.start()
                connected = time.monotonic()
                known = self.wait_until_all_know_all()
                times = max(self.met.values()), connected, known
                self.pipe.send((*times, psutil.Process().memory_info().rss - before))
            elif order[0] == "count":
                connections = psutil.Process().net_connections("tcp")
                established = [connection for connection in connections if connection.status == "ESTABLISHED"]
                began, sent = time.monotonic(), self.sent_bytes
                time.sleep(WINDOW_SECONDS)
                self.pipe.send((len(established), (self.sent_bytes - sent) / (time.monotonic() - began)))
            else:
                self.pipe.send(self.name(*order[1:]))


def host(tasks: tuple[Task, ...], ranks: list[int], pipe: Connection) -> None:
    """The program of one operating-system process, which ends with its parent."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    raise_descriptor_limit()
    Host(tasks, ranks, pipe).serve()


class Job:
    """A context with a simulated job.

    Args:
        size: the number of simulated processes.
        hosts: the number of operating-system processes.
    """

    def __init__(self, size: int, hosts: int):
        context = multiprocessing.get_context("spawn")
        tasks = tuple(Task("worker", rank, f"localhost:{FIRST_PORT + rank}") for rank in range(size))
        pipes = [context.Pipe() for _ in range(min(hosts, size))]
        self.pipes = [ours for ours, _ in pipes]
        self.hosts = [
            context.Process(target=host, args=(tasks, list(range(size))[index :: len(pipes)], theirs), daemon=True)
            for index, (_, theirs) in enumerate(pipes)
        ]

    def __enter__(self) -> Job:
        for process in self.hosts:
            process.start()
        self.receive()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.hosts:
            process.kill()
            process.join()

    def send(self, *order: object) -> float:
        """Sends a command to all hosts, and returns the time."""
        now = time.monotonic()
        for pipe in self.pipes:
            pipe.send(order)
        return now

    def receive(self) -> list[Any]:
        """The answers of all hosts."""
        answers = []
        for pipe in self.pipes:
            if not pipe.poll(START_SECONDS + LONGEST_SECONDS):
                sys.exit("A part of the simulated job has not answered")
            answers.append(pipe.recv())
        return answers

    def start(self) -> tuple[list[float], float]:
        """Seconds until all have met, are connected, and know all others; and the total memory in bytes."""
        began = self.send("start")
        messages: dict[int, bytes] = {}
        for part in self.receive():
            messages |= part
        for pipe in self.pipes:
            pipe.send([messages[rank] for rank in sorted(messages)])
        *times, memory = zip(*self.receive(), strict=True)
        return [max(each) - began for each in times], sum(memory)

    def count(self) -> tuple[int, float]:
        """The number of connection ends, and the bytes per second that all processes send together."""
        self.send("count")
        established, sent = zip(*self.receive(), strict=True)
        return sum(established), sum(sent)

    def name(self, killed: list[int], stopped: list[int]) -> str:
        """Seconds until all others have named the failed processes, and the number of wrong reports."""
        began = self.send("name", killed, stopped)
        times, wrong = zip(*self.receive(), strict=True)
        return f"{max(times) - began:.1f}" + (f" ({sum(wrong)} wrong)" if sum(wrong) else "")


def raise_descriptor_limit() -> int:
    """Raises this process's limit of open files to its maximum, and returns it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def measure(size: int, hosts: int) -> str:
    """Measures one line of the table."""
    several = random.Random(size).sample(range(1, size), min(MANY, size // 4))
    failures: dict[str, Callable[[Job], str]] = {
        "killed": lambda job: job.name([size // 8], []),
        "several": lambda job: job.name(several, []),
        "stopped": lambda job: job.name([], [size // 8]),
    }
    named, line = [], ""
    for name, fail in failures.items():
        with Job(size, hosts) as job:
            times, memory = job.start()
            if name == "killed":
                ends, sent = job.count()
                each = f"{ends / size:>15.2f}{sent / size:>9.0f}{memory / size / 1e3:>8.0f}"
                line = f"{size:>9}" + "".join(f"{seconds:>11.1f}" for seconds in times) + each
            named.append(fail(job))
    return line + f"{named[0]:>8}{named[1]:>12}{named[2]:>14}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--hosts", type=int, default=8, help="operating-system processes that simulate them")
    arguments = parser.parse_args()
    size = max(arguments.processes)
    needed = size + DESCRIPTORS_EACH * (size // arguments.hosts + 1)
    if (limit := raise_descriptor_limit()) < needed:
        sys.exit(f"{size} processes need {needed} open files in one process, and the limit is {limit} (`ulimit -Hn`)")
    print("           seconds until all              connections  bytes/s     KB   seconds until all have named")
    print("processes        met  connected      known         each     each   each     one     several     a stopped")
    for size in arguments.processes:
        print(measure(size, arguments.hosts), flush=True)
    print(f"several: {MANY}, or a quarter, killed at once; a silent process is lost after {SILENT_SECONDS:g} s")


if __name__ == "__main__":
    main()
