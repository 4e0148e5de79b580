"""Milliseconds per step with the settings that `horovod` chooses by the number of processes, and with the defaults.

Each measurement is a fresh job on this machine; the settings take turns. With more processes than cores, a step waits
for cores most of the time, so that only ratios within a round are meaningful.
Example: `python -m benchmarks.horovod_settings --workers 2 4 8`
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.checkpoints import ROOT

# Environment variables take precedence over the strategy's choice.
SETTINGS: dict[str, dict[str, str]] = {
    "chosen": {},
    "cycle 0.1 ms": {"HOROVOD_CYCLE_TIME": "0.1"},
    "cycle 1 ms": {"HOROVOD_CYCLE_TIME": "1"},
    "Horovod's defaults": {"HOROVOD_CYCLE_TIME": "1", "HOROVOD_FUSION_THRESHOLD": str(128 << 20)},
}
MODELS = {"small": [784, 128, 10], "dense": [784, 2048, 2048, 512, 10]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--launcher", nargs="*", default=[], help="options of tfdist.launch, such as `--mpi`")
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.file is not None:
        train(arguments)
        return
    for model in arguments.models:
        for workers in arguments.workers:
            turns = [
                {name: measured(arguments, model, workers, name) for name in SETTINGS} for _ in range(arguments.repeats)
            ]
            results = []
            for name in SETTINGS:
                ratio = statistics.median(turn[name] / turn["chosen"] for turn in turns)
                results.append(f"{name} {statistics.median(turn[name] for turn in turns):.1f} ms ({ratio:.2f})")
            print(f"{model}, {workers} processes: {', '.join(results)}", flush=True)


def measured(arguments: argparse.Namespace, model: str, workers: int, name: str) -> float:
    """The milliseconds per step in a fresh job."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "ms")
        job = ["-m", "tfdist.launch", "--workers", str(workers), "--log-dir", f"{folder}/logs", *arguments.launcher]
        script = ["-m", "benchmarks.horovod_settings", "--model", model, "--steps", str(arguments.steps)]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"} | SETTINGS[name]
        command = [sys.executable, *job, *script, "--file", str(file)]
        subprocess.run(command, env=environment, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        return float(file.read_text())


def train(arguments: argparse.Namespace) -> None:
    """Trains in one process of the job; the chief writes the milliseconds per step to the file."""
    import keras
    import numpy as np

    import tfdist

    strategy = tfdist.strategy("horovod", seed=1, threads=1)
    first, *widths = MODELS[arguments.model]
    model = keras.Sequential([keras.Input((first,)), *(keras.layers.Dense(width, "relu") for width in widths)])
    model.compile("adam", "mse", jit_compile=False)
    rng, batch_size = np.random.default_rng(0), 128
    x = rng.random((batch_size * arguments.steps, first), "float32")
    y = rng.random((len(x), widths[-1]), "float32")
    strategy.fit(model, x, y, batch_size=batch_size, verbose=0)
    begun = time.perf_counter()
    strategy.fit(model, x, y, batch_size=batch_size, verbose=0)
    if strategy.world.is_chief:
        arguments.file.write_text(str(1e3 * (time.perf_counter() - begun) / arguments.steps))


if __name__ == "__main__":
    main()
