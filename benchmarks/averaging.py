"""The time that `mpi_split` takes to average a model's weights and slots over two processes, by layer size.

The processes of a job average the same model repeatedly; the time is that of the slowest process. The exchanges alone
are all-reduces of arrays of the same sizes. `--before FOLDER` also measures another checkout, in turns.
Example: `python -m benchmarks.averaging --before ../main`
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
# The number of weights per layer; Adam has two slots per weight.
MODELS = {"one layer of 64 MiB": [16 << 20], "64 layers of 1 MiB": [256 << 10] * 64, "mlp, 0.4 MB": [100_000, 1_000]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5, help="jobs per checkout")
    parser.add_argument("--averagings", type=int, default=10, help="averagings per model and job")
    parser.add_argument("--before", metavar="FOLDER", help="another checkout of the project")
    parser.add_argument("--process", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.process:
        measure(arguments.averagings)
        return
    trees = {"now": ROOT} | ({"before": Path(arguments.before).resolve()} if arguments.before else {})
    results: dict[str, list[dict[str, list[float]]]] = {name: [] for name in trees}
    for number in range(arguments.repeats):
        for name, tree in list(trees.items())[:: 1 if number % 2 else -1]:
            results[name].append(job(tree, arguments.averagings))
    for model in MODELS:
        for name, runs in results.items():
            whole, exchanges = (statistics.median(run[model][index] for run in runs) for index in (0, 1))
            print(f"{model:20} {name:7} {1e3 * whole:8.1f} ms, exchanges alone {1e3 * exchanges:8.1f} ms", flush=True)
        if len(results) == 2:
            ratios = [now[model][0] / before[model][0] for now, before in zip(*results.values(), strict=True)]
            print(f"{model:20} now / before, by pair of jobs: {' '.join(f'{ratio:.2f}' for ratio in sorted(ratios))}")


def job(tree: Path, averagings: int) -> dict[str, list[float]]:
    """The median seconds of an averaging and of its exchanges alone, per model, with the package of `tree`."""
    script = [str(Path(__file__).resolve()), "--process", "--averagings", str(averagings)]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tfdist.launch", "--mpi", "--workers", "2", "--log-dir", "logs", *script]
        environment = os.environ | {"PYTHONPATH": str(tree), "TF_CPP_MIN_LOG_LEVEL": "3"}
        done = subprocess.run(command, env=environment, cwd=folder, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


def measure(averagings: int) -> None:
    """Runs the measurement in one process of the job; rank 0 prints it."""
    import time

    import keras
    import numpy as np
    import tensorflow as tf

    import tfdist
    from tfdist.relaxed import averages as _averages

    strategy = tfdist.strategy("mpi_split", seed=1)
    group = strategy.group
    tf.get_logger().setLevel("ERROR")  # TensorFlow warns that each model traces new graphs

    def slowest(function) -> float:  # type: ignore[no-untyped-def]
        seconds = []
        for _ in range(averagings):
            group.barrier()
            began = time.perf_counter()
            function()
            group.barrier()
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds)

    results = {}
    for name, sizes in MODELS.items():
        layers = [keras.layers.Dense(size // 8, use_bias=False) for size in sizes]
        inputs = keras.Input((8,))
        model = keras.Model(inputs, [layer(inputs) for layer in layers])
        model.compile(keras.optimizers.Adam(), "mse")
        model.optimizer.build(model.trainable_variables)
        averages = _averages.Averages(group, model)
        arrays = [np.zeros(min(3 * sum(sizes), 4 << 20), np.float32) for _ in range(-(-3 * sum(sizes) // (4 << 20)))]

        def average(averages: _averages.Averages = averages) -> None:
            averages.note(1)
            averages.take()

        average()  # traces the graphs
        results[name] = [slowest(average), slowest(lambda arrays=arrays: list(map(group.sum_in_place, arrays)))]
    if group.rank == 0:
        print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
