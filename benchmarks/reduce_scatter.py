"""Milliseconds of a reduce-scatter over sockets, compared with an all-reduce of which each process keeps its part.

Both run in turn in the same processes on this machine, with float32 arrays.
Example: `python -m benchmarks.reduce_scatter --processes 2 --megabytes 1 32`
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection

PORT = 2000  # nothing listens on it, because only the hosts are used


def measure(rank: int, size: int, megabytes: list[float], repeats: int, pipe: Connection) -> None:
    """Measures in one process; rank 0 prints the table."""
    import numpy as np

    from tfdist.groups.socket_group import SocketGroup
    from tfdist.jobs.world import World

    def exchange(message: bytes) -> list[bytes]:
        pipe.send(message)
        answers: list[bytes] = pipe.recv()
        return answers

    cluster = {"worker": [f"localhost:{PORT + index}" for index in range(size)]}
    world = World.detect({"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}})})
    group = SocketGroup(world, exchange, 10.0, 600.0)
    for each in megabytes:
        rows = int(each * 1e6 / 4 / size)
        values = np.ones(rows * size, np.float32)
        ways = {
            "reduce-scatter": lambda values=values: group.sum_part(values),
            "all-reduce": lambda values=values, rows=rows: group.sum(values)[rank * rows : (rank + 1) * rows],
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(repeats + 2):
            for name, way in ways.items():
                group.sum(np.zeros(1, np.float32))  # synchronizes the processes
                began = time.perf_counter()
                way()
                if turn >= 2:
                    seconds[name].append(time.perf_counter() - began)
        if rank == 0:
            scattered, whole = (1e3 * statistics.median(seconds[name]) for name in ways)
            print(f"{size:>9}{each:>8g}{scattered:>19.2f}{whole:>15.2f}{scattered / whole:>8.2f}", flush=True)
    group.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--megabytes", type=float, nargs="+", default=[0.1, 1, 10, 100])
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    print("processes      MB  reduce-scatter, ms  all-reduce, ms   ratio")
    context = multiprocessing.get_context("spawn")
    for size in arguments.processes:
        pipes = [context.Pipe() for _ in range(size)]
        workers = [
            context.Process(target=measure, args=(rank, size, arguments.megabytes, arguments.repeats, pipes[rank][1]))
            for rank in range(size)
        ]
        for worker in workers:
            worker.start()
        for _ in range(2):  # messages for connecting
            messages = [pipe.recv() for pipe, _ in pipes]
            for pipe, _ in pipes:
                pipe.send(messages)
        for worker in workers:
            worker.join()


if __name__ == "__main__":
    main()
