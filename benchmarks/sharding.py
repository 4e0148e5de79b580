"""The savings and the cost of `shard`: the peak memory of a process and the time per step, with and without it.

Each measurement is a fresh job of two processes on this machine, or one process on one core; the kinds take turns.
Adam trains a dense model; the memory is the memory per parameter that training adds to the process.
Example: `python -m benchmarks.sharding --strategy horovod --launcher=--mpi`
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
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import ROOT, peak, reset_peak

KINDS = ("one core", "none", "optimizer", "gradients")


def main() -> None:
    arguments = _parser().parse_args()
    if arguments.kind is not None:
        train(arguments)
        return
    results: dict[str, list[list[dict[str, float]]]] = {kind: [] for kind in arguments.kinds}
    for _ in range(arguments.repeats):
        for kind in arguments.kinds:
            results[kind].append(start(arguments, kind))
    print(
        f"{arguments.strategy}, layers of {arguments.widths}, {arguments.optimizer}, batch size {arguments.batch_size}"
    )
    print(f"{'shard':<12}{'bytes per parameter':>20}{'ms per step':>12}{'speed / one core':>20}")
    one_core = results.get("one core", ())
    for kind, runs in results.items():
        memory = statistics.median(max(process["bytes"] for process in run) for run in runs)
        steps = statistics.median(run[0]["ms"] for run in runs)
        ratios = [single[0]["ms"] / run[0]["ms"] for single, run in zip(one_core, runs, strict=False) if run]
        speed = f"{statistics.median(ratios):.2f}" if ratios else ""
        print(f"{kind:<12}{memory:>20.1f}{steps:>12.1f}{speed:>20}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--strategy", default="multiworker")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--widths", type=int, nargs="+", default=[784, 2048, 2048, 512, 10], help="units of the layers")
    parser.add_argument("--optimizer", default="adam")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--steps", type=int, default=60, help="timed steps, after as many warm-up steps")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--launcher", nargs="*", default=[], help="options of tfdist.launch, such as `--mpi`")
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser


def start(arguments: argparse.Namespace, kind: str) -> list[dict[str, float]]:
    """Runs a job, and returns the numbers of each process."""
    with tempfile.TemporaryDirectory() as folder:
        script = ["-m", "benchmarks.sharding", *sys.argv[1:], "--kind", kind, "--folder", folder]
        job = ["-m", "tfdist.launch", "--workers", "2", "--log-dir", f"{folder}/logs", *arguments.launcher]
        command = [sys.executable, *([] if kind == "one core" else job), *script]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
        subprocess.run(command, env=environment, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        return [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]


def train(arguments: argparse.Namespace) -> None:
    """Trains in one process of the job, and writes its numbers to the folder."""
    import keras
    import numpy as np

    import tfdist

    if arguments.kind == "one core":
        os.sched_setaffinity(0, {0})
        strategy = tfdist.strategy("single", seed=1, threads=1)
    else:
        shard = None if arguments.kind == "none" else arguments.kind
        strategy = tfdist.strategy(arguments.strategy, seed=1, shard=shard, threads=1)
    before = reset_peak()
    with strategy.scope():
        first, *widths = arguments.widths
        model = keras.Sequential([keras.Input((first,)), *(keras.layers.Dense(width, "relu") for width in widths)])
        model.compile(arguments.optimizer, "mse", jit_compile=False)
    steps, rng = arguments.steps, np.random.default_rng(0)
    x = rng.random((arguments.batch_size * steps, first), "float32")
    y = rng.random((arguments.batch_size * steps, widths[-1]), "float32")

    timer = epoch_timer()
    strategy.fit(model, x, y, batch_size=arguments.batch_size, epochs=2, verbose=0, callbacks=[timer])
    added = (peak() - before - x.nbytes - y.nbytes) / model.count_params()
    numbers = {"ms": 1e3 * timer.seconds / steps, "bytes": added}
    Path(arguments.folder, f"{strategy.world.rank}.json").write_text(json.dumps(numbers))


def epoch_timer() -> Any:
    """Returns a callback with the `seconds` of the last epoch."""
    import keras

    class Timer(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
            self.began = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: object = None) -> None:
            self.seconds = time.perf_counter() - self.began

    return Timer()


if __name__ == "__main__":
    main()
