"""Milliseconds of an all-reduce of float32 inside a `tf.function`, by the engine that carries it.

The engines are tfdist's sockets (the default of `multiworker` on CPUs), TensorFlow's ring over gRPC and Horovod over
Gloo. Each is measured in a job of real processes with one compute thread each, started by `tfdist.launch`; the jobs
take turns. A ratio is the time of a peer, divided by the time of the sockets in the same round.
Example: `python -m benchmarks.engines --processes 2 4 8 16`
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
ENGINES = ("sockets", "ring", "horovod")
KIB = [1, 16, 128, 1024, 8192]
SECONDS = 0.5  # total time of the repetitions of one measurement


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--kib", type=int, nargs="+", default=KIB)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measured", choices=ENGINES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measured:
        measure(arguments.measured, arguments.kib)
        return
    print(
        "processes     KiB"
        + "".join(f"{name + ', ms':>13}" for name in ENGINES)
        + "  ring / sockets  horovod / sockets"
    )
    for size in arguments.processes:
        rounds = [{name: job(name, size, arguments.kib) for name in ENGINES} for _ in range(arguments.rounds)]
        for kib in map(str, arguments.kib):
            times = "".join(f"{1e3 * statistics.median(r[name][kib] for r in rounds):>13.2f}" for name in ENGINES)
            ratios = [statistics.median(r[peer][kib] / r["sockets"][kib] for r in rounds) for peer in ENGINES[1:]]
            print(f"{size:>9}{kib:>8}{times}{ratios[0]:>16.2f}{ratios[1]:>19.2f}", flush=True)


def job(engine: str, size: int, kib: list[int]) -> dict[str, float]:
    """The median seconds of an all-reduce, by the KiB of each process."""
    script = ["-m", "benchmarks.engines", "--measured", engine, "--kib", *map(str, kib)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tfdist.launch", "--workers", str(size), "--log-dir", folder, *script]
        done = subprocess.run(command, env=environment, cwd=folder, check=True, stdout=subprocess.PIPE, text=True)
    seconds: dict[str, float] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return seconds


def measure(engine: str, kib: list[int]) -> None:
    """Measures in one process of the job; rank 0 prints the seconds."""
    import tensorflow as tf

    import tfdist

    tf.config.threading.set_intra_op_parallelism_threads(1)
    if engine == "horovod":
        strategy = tfdist.strategy("horovod", timeout_seconds=600.0)
    else:
        strategy = tfdist.strategy("multiworker", communication=engine, timeout_seconds=600.0)
    slowest = _slowest(strategy)
    seconds = {str(each): slowest(_all_reduce(strategy, engine, tf.ones([each << 8]))) for each in kib}
    if strategy.group.rank == 0:
        print(json.dumps(seconds), flush=True)


def _all_reduce(strategy: Any, engine: str, values: Any) -> Callable[[], Any]:
    import tensorflow as tf

    if engine != "ring":
        return tf.function(lambda: strategy.group.all_reduce([values + 0.0], "values"), autograph=False)

    def on_replica() -> Any:
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, values + 0.0)

    stock = strategy.variables.strategy
    return tf.function(lambda: stock.run(on_replica), autograph=False)


def _slowest(strategy: Any) -> Callable[[Callable[[], Any]], float]:
    """A function that returns the median seconds of an operation that all processes call together."""

    def timed(operation: Callable[[], Any], count: int) -> float:
        times = []
        for _ in range(count):
            began = time.perf_counter()
            operation()
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    def slowest(operation: Callable[[], Any]) -> float:
        estimate = timed(operation, 5)
        count = int(strategy.group.exchange(str(max(5, min(500, int(SECONDS / estimate)))).encode())[0])
        return timed(operation, count)

    return slowest


if __name__ == "__main__":
    main()
