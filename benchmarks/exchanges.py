"""What an agreement and a sum cost over sockets, by the number of processes.

`--processes` starts real ones, which import no TensorFlow: one line per number of processes and of bytes, with the tree
and with the ring, as on hosts of their own, in the memory of one host, and what `tfdist.groups.sockets.costs` chooses.
`--operation` measures a reduce-scatter or an all-gather instead of a sum, `--before FOLDER` another checkout of the
project too, in turns. `--simulated` runs each process of the job as a thread of a few real processes, through the same
code over the same sockets, so that one machine can show an agreement of thousands: its time is what all of them compute
on this machine's cores, where each process of a real job has a core of its own.
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
PORT = 2000  # of no server: only the hosts are used
AGREEMENT = json.dumps(["is about to run steps", [100, False, "0123456789ab"]]).encode()
KIB = [1, 16, 64, 128, 256, 1024, 8192]
OPERATING_SYSTEM_PROCESSES = 16  # of a simulation, each with consecutive ranks
SECONDS = 0.4  # that the repetitions of one measurement take

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
    found: dict[str, dict[str, list[float]]] = {}
    for _ in range(rounds):
        for name, folder in {"tfdist": ROOT, "before": before}.items():
            if folder is not None:
                for key, seconds in _measured(size, kib, operation, folder).items():
                    what, _, way = key.partition(":")
                    if name == "tfdist" or not way:
                        found.setdefault(what, {}).setdefault(way or name, []).append(seconds)
    for what, ways in found.items():
        numbers = [f"{1e3 * statistics.median(ways[way]):.2f}" if way in ways else "-" for way in WAYS]
        print(f"{size:>9}{what:>12}" + "".join(map("{:>{}}".format, numbers, (10, 10, 12, 12, 12))), flush=True)


WAYS = ("tree", "ring", "memory", "tfdist", "before")


def _measured(size: int, kib: list[int], operation: str, folder: Path) -> dict[str, float]:
    """The seconds that processes, which import tfdist from `folder`, find; the parent carries what they say first."""
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
            said = [_line(worker) for worker in workers]
            for worker in workers:
                assert worker.stdin is not None
                worker.stdin.write(json.dumps(said) + "\n")
                worker.stdin.flush()
        found: dict[str, float] = _line(workers[0])
    finally:
        for worker in workers:
            worker.wait(120)
    return found


def _line(worker: subprocess.Popen[str]) -> Any:
    assert worker.stdout is not None
    return json.loads(worker.stdout.readline())


def work(rank: int, size: int, kib: list[int], operation: str) -> None:
    """One real process; rank 0 prints the seconds of each operation."""
    import numpy as np

    from tfdist.groups.sockets import costs
    from tfdist.groups.sockets.messages import Mailbox
    from tfdist.groups.sockets.sockets import Sockets

    def exchange(message: bytes) -> list[bytes]:
        print(json.dumps(message.hex()), flush=True)
        return [bytes.fromhex(each) for each in json.loads(sys.stdin.readline())]

    apart, together = (
        Sockets(_world(size, rank, hosts), exchange, 60.0, 600.0, Mailbox()) for hosts in (range(size), [0] * size)
    )
    chosen = costs.longest_by_tree
    ways = {
        "": (together, chosen),
        ":tree": (apart, lambda *arguments: 1 << 40),
        ":ring": (apart, lambda *arguments: -1),
        ":memory": (together, lambda *arguments: -1),
    }
    found = {"agreement": _seconds(lambda: together.exchange(AGREEMENT), apart.exchange, rank)}
    for each in kib:
        values = np.ones((each << 8) // (size if operation == "join" else 1), np.float32)
        for way, (sockets, limit) in ways.items():
            costs.longest_by_tree = limit
            call = getattr(sockets, operation)
            found[f"{each} KiB{way}"] = _seconds(lambda values=values, call=call: call(values), apart.exchange, rank)
    if rank == 0:
        print(json.dumps(found), flush=True)


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
    """The job as `rank` sees it; `hosts` are the numbers of the hosts, which all mean this machine."""
    from tfdist.jobs.world import World

    hosts = [0] * size if hosts is None else hosts
    cluster = {"worker": [f"127.0.0.{1 + host}:{PORT + index}" for index, host in enumerate(hosts)]}
    task = {"cluster": cluster, "task": {"type": "worker", "index": 0}}
    return dataclasses.replace(World.detect({"TF_CONFIG": json.dumps(task)}), rank=rank, local_rank=rank)


def _simulate(size: int) -> None:
    """Prints what an agreement of `size` simulated processes costs."""
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
        said: dict[int, bytes] = {}
        for pipe, _ in pipes:
            said |= pipe.recv()
        for pipe, _ in pipes:
            pipe.send([said[rank] for rank in range(size)])
    seconds: list[float] = []
    traffic: dict[int, tuple[int, int]] = {}
    for pipe, _ in pipes:
        times, of_part = pipe.recv()
        seconds += times
        traffic |= of_part
    for worker in workers:
        worker.join()
    connections = sum(count for count, _ in traffic.values()) // 2
    most, sent = (max(column) for column in zip(*traffic.values(), strict=True))
    print(f"{size:>9}{1e3 * statistics.median(seconds):>15.1f}{connections:>13}{most:>29}{sent:>23.0f}", flush=True)


@dataclasses.dataclass
class Peers:
    """The other processes, as `tfdist.jobs.consensus` reaches them."""

    world: Any
    exchange: Exchange
    metrics_by_process: bool = False
    servers: Any = None


def simulate(size: int, ranks: range, pipe: Connection) -> None:
    """One operating system's process: each of `ranks` is a thread."""
    from tfdist.groups.sockets.messages import Mailbox
    from tfdist.groups.sockets.sockets import Sockets
    from tfdist.jobs import consensus

    # The threads of a process take turns: one core is enough for them, and they give way where they wait anyhow.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[ranks[0] * OPERATING_SYSTEM_PROCESSES // size % len(cores)]})
    sys.setswitchinterval(1.0)
    threading.stack_size(1 << 18)
    world, repeats = _world(size, 0), max(5, 4000 // size)
    said: dict[int, bytes] = {}
    heard: list[bytes] = []
    seconds: list[float] = []
    traffic: dict[int, tuple[int, float]] = {}

    def carry() -> None:
        pipe.send(dict(said))
        heard[:] = pipe.recv()

    barrier = threading.Barrier(len(ranks), carry)

    def run(rank: int) -> None:
        def exchange(message: bytes) -> list[bytes]:
            said[rank] = message
            barrier.wait()
            return list(heard)

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
