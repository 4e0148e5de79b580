"""The cost of an agreement and of an all-reduce over sockets, by the number of processes.

`--processes` starts real processes without TensorFlow, and prints one line per number of processes and of bytes: with
the tree and with the ring, as on separate hosts; in the memory of one host; and with the choice of
`tfdist.groups.sockets.costs`. `--operation` measures a reduce-scatter or an all-gather instead of an all-reduce.
`--before FOLDER` also measures another checkout of the project, in turns. `--simulated` runs each process of the job as
a thread of a few real processes, with the same code and sockets, so that one machine can run an agreement of thousands.
Its time is the computation of all of them on this machine's cores, while each process of a real job has its own core.
Example: `python -m benchmarks.exchanges --processes 2 4 8 16 --simulated 64 512 4096`
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PORT = 2000  # nothing listens on it, because only the hosts are used
AGREEMENT = json.dumps(["is about to run steps", [100, False, "0123456789ab"]]).encode()
KIB = [1, 16, 64, 128, 256, 1024, 8192]
OPERATING_SYSTEM_PROCESSES = 16  # per simulation, each with consecutive ranks
SECONDS = 0.4  # total time of the repetitions of one measurement

Exchange = Callable[[bytes], list[bytes]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="*", default=[2, 4, 8, 16])
    parser.add_argument("--kib", type=int, nargs="*", default=KIB)
    parser.add_argument("--before", type=Path, help="another checkout of the project")
    parser.add_argument("--operation", choices=["sum", "sum_part", "join"], default="sum", help="`join` is all-gather")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--simulated", type=int, nargs="*", default=[64, 512])
    arguments = parser.parse_args()
    if arguments.processes:
        print("processes        what  tree, ms  ring, ms  memory, ms  tfdist, ms  before, ms")
    for size in arguments.processes:
        _compare(size, arguments.kib, arguments.operation, arguments.before, arguments.rounds)
    if arguments.simulated:
        print("simulated  agreement, ms  connections  connections of one, at most  bytes of one, at most")
    for size in arguments.simulated:
        _simulate(size)


def _compare(size: int, kib: list[int], operation: str, before: Path | None, rounds: int) -> None:
    """Prints the medians over the rounds."""
    results: dict[str, dict[str, list[float]]] = {}
    for _ in range(rounds):
        for name, folder in {"tfdist": ROOT, "before": before}.items():
            if folder is not None:
                for key, seconds in _measured(size, kib, operation, folder).items():
                    what, _, way = key.partition(":")
                    if name == "tfdist" or not way:
                        results.setdefault(what, {}).setdefault(way or name, []).append(seconds)
    for what, ways in results.items():
        numbers = [f"{1e3 * statistics.median(ways[way]):.2f}" if way in ways else "-" for way in WAYS]
        print(f"{size:>9}{what:>12}" + "".join(map("{:>{}}".format, numbers, (10, 10, 12, 12, 12))), flush=True)


WAYS = ("tree", "ring", "memory", "tfdist", "before")


def _measured(size: int, kib: list[int], operation: str, folder: Path) -> dict[str, float]:
    """The seconds measured by processes that import tfdist from `folder`; the parent exchanges their addresses."""
    command = [sys.executable, str(Path(__file__)), "--"]
    environment = os.environ | {"PYTHONPATH": str(folder), "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen(
            [*command, json.dumps([rank, size, kib, operation])],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        for _ in range(4):  # to connect twice
            messages = [_line(worker) for worker in workers]
            for worker in workers:
                assert worker.stdin is not None
                worker.stdin.write(json.dumps(messages) + "\n")
                worker.stdin.flush()
        seconds: dict[str, float] = _line(workers[0])
    finally:
        for worker in workers:
            worker.wait(120)
    return seconds


def _line(worker: subprocess.Popen[str]) -> Any:
    assert worker.stdout is not None
    return json.loads(worker.stdout.readline())


def work(rank: int, size: int, kib: list[int], operation: str) -> None:
    """The program of one real process; rank 0 prints the seconds of each operation."""
    import numpy as np

    from tfdist.groups.socket_group import Sockets
    from tfdist.groups.sockets import costs
    from tfdist.groups.sockets.messages import Mailbox

    def exchange(message: bytes) -> list[bytes]:
        print(json.dumps(message.hex()), flush=True)
        return [bytes.fromhex(each) for each in json.loads(sys.stdin.readline())]

    separate_hosts, one_host = (
        Sockets(_world(size, rank, hosts), exchange, 60.0, 600.0, Mailbox()) for hosts in (range(size), [0] * size)
    )
    chosen = costs.longest_by_tree
    ways = {
        "": (one_host, chosen),
        ":tree": (separate_hosts, lambda *arguments: 1 << 40),
        ":ring": (separate_hosts, lambda *arguments: -1),
        ":memory": (one_host, lambda *arguments: -1),
    }
    exchange_all = separate_hosts.exchange
    seconds = {"agreement": _seconds(lambda: one_host.exchange(AGREEMENT), exchange_all, rank)}
    for size_kib in kib:
        values = np.ones((size_kib << 8) // (size if operation == "join" else 1), np.float32)
        for way, (sockets, limit) in ways.items():
            costs.longest_by_tree = limit
            call = getattr(sockets, operation)
            key = f"{size_kib} KiB{way}"
            seconds[key] = _seconds(lambda values=values, call=call: call(values), exchange_all, rank)
    if rank == 0:
        print(json.dumps(seconds), flush=True)


def _seconds(operation: Callable[[], Any], exchange: Exchange, rank: int) -> float:
    """The median time of `operation`, which all processes call together."""

    def timed(count: int) -> list[float]:
        times = []
        for _ in range(count):
            began = time.perf_counter()
            operation()
            times.append(time.perf_counter() - began)
        return times

    times = timed(5)
    count = int(exchange(str(max(5, min(1000, int(SECONDS / statistics.median(times))))).encode())[0])
    return statistics.median(timed(count))


def _world(size: int, rank: int, hosts: Sequence[int] | None = None) -> Any:
    """The job from the view of `rank`; `hosts` are the numbers of the hosts, which are all this machine."""
    from tfdist.jobs.world import World

    hosts = [0] * size if hosts is None else hosts
    cluster = {"worker": [f"127.0.0.{1 + host}:{PORT + index}" for index, host in enumerate(hosts)]}
    task = {"cluster": cluster, "task": {"type": "worker", "index": 0}}
    return dataclasses.replace(World.detect({"TF_CONFIG": json.dumps(task)}), rank=rank, local_rank=rank)


def _simulate(size: int) -> None:
    """Prints the cost of an agreement of `size` simulated processes."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    context = multiprocessing.get_context("spawn")
    cuts = [size * index // OPERATING_SYSTEM_PROCESSES for index in range(OPERATING_SYSTEM_PROCESSES + 1)]
    parts = [range(begin, end) for begin, end in itertools.pairwise(cuts)]
    pipes = [context.Pipe() for _ in parts]
    workers = [
        context.Process(target=simulate, args=(size, part, pipe)) for part, (_, pipe) in zip(parts, pipes, strict=True)
    ]
    for worker in workers:
        worker.start()
    for _ in range(2):
        messages: dict[int, bytes] = {}
        for pipe, _ in pipes:
            messages |= pipe.recv()
        for pipe, _ in pipes:
            pipe.send([messages[rank] for rank in range(size)])
    seconds: list[float] = []
    traffic: dict[int, tuple[int, int]] = {}
    for pipe, _ in pipes:
        times, part = pipe.recv()
        seconds += times
        traffic |= part
    for worker in workers:
        worker.join()
    connections = sum(count for count, _ in traffic.values()) // 2
    most, sent = (max(column) for column in zip(*traffic.values(), strict=True))
    print(f"{size:>9}{1e3 * statistics.median(seconds):>15.1f}{connections:>13}{most:>29}{sent:>23.0f}", flush=True)


@dataclasses.dataclass
class Peers:
    """The interface to the other processes that `tfdist.jobs.consensus` uses."""

    world: Any
    exchange: Exchange
    metrics_by_process: bool = False
    servers: Any = None


def simulate(size: int, ranks: range, pipe: Connection) -> None:
    """The program of one operating-system process, with a thread per rank in `ranks`."""
    from tfdist.groups.socket_group import Sockets
    from tfdist.groups.sockets.messages import Mailbox
    from tfdist.jobs import consensus

    # One core is enough for the threads of a process, which hold the interpreter lock in turn, until they wait.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[ranks[0] * OPERATING_SYSTEM_PROCESSES // size % len(cores)]})
    sys.setswitchinterval(1.0)
    threading.stack_size(1 << 18)
    world, repeats = _world(size, 0), max(5, 4000 // size)
    sent_messages: dict[int, bytes] = {}
    all_messages: list[bytes] = []
    seconds: list[float] = []
    traffic: dict[int, tuple[int, float]] = {}

    def exchange_with_parent() -> None:
        pipe.send(dict(sent_messages))
        all_messages[:] = pipe.recv()

    barrier = threading.Barrier(len(ranks), exchange_with_parent)

    def run(rank: int) -> None:
        def exchange(message: bytes) -> list[bytes]:
            sent_messages[rank] = message
            barrier.wait()
            return list(all_messages)

        sockets = Sockets(dataclasses.replace(world, rank=rank), exchange, 600.0, 600.0, Mailbox())
        peers, before = Peers(world, sockets.exchange), sockets.traffic()[1]
        for turn in range(repeats + 2):
            began = time.perf_counter()
            assert consensus.next_call(peers, 100, False, "0123456789ab") == (100, False)
            if rank == 0 and turn >= 2:
                seconds.append(time.perf_counter() - began)
        connections, sent = sockets.traffic()
        traffic[rank] = connections, (sent - before) / (repeats + 2)
        sockets.exchange(b"done")

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pipe.send((seconds, traffic))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--"]:
        work(*json.loads(sys.argv[2]))
    else:
        main()
