"""The error of the cost model of `tfdist advise` for a job of two processes of `multiworker`, measured in turns.

Each round measures the inputs of the prediction (steps of two simultaneous processes and the link between them) and
then the job, so that other work on the machine affects both. The ratio is measured / predicted seconds per step.
Example: `python -m benchmarks.advice --model cnn --dataset fashion_mnist --batch-size 128 --steps 100`
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import keras

from tfdist.advisor import costs, measured
from tfdist.run.folder import load_record
from tfdist.study import ratios
from tfdist.study.plan import as_options


def wide(spec: Any) -> keras.Model:
    """A model with 6.6 million parameters, whose exchange takes longer than the computation with small batches."""
    units = [keras.layers.Dense(count, "relu") for count in (2048, 2048, 1024)]
    return keras.Sequential([keras.Input(spec.input_shape), keras.layers.Flatten(), *units, keras.layers.Dense(10)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="benchmarks.advice:wide")
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60, help="steps per epoch")
    parser.add_argument("--repeats", type=int, default=4, help="rounds")
    arguments = parser.parse_args()
    options = {name: getattr(arguments, name) for name in ("model", "dataset", "optimizer")}
    steps, size = arguments.steps, arguments.batch_size
    predicted: dict[object, float] = {}
    actual: dict[object, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.repeats):
            round_folder = Path(folder) / str(number)
            predicted[number] = prediction(options, size, steps, round_folder / "alone")
            actual[number] = job(options, size, steps, round_folder / "job")
            print(f"{1e3 * predicted[number]:.2f} ms predicted, {1e3 * actual[number]:.2f} ms measured", flush=True)
    sample = ratios.logarithms(actual, predicted)
    low, high = ratios.of_next(sample)
    mean = math.exp(statistics.fmean(sample))
    print(f"measured / predicted {mean:.2f}; the next one lies between {low:.2f} and {high:.2f} (95 %)")


def prediction(options: dict[str, object], size: int, steps: int, folder: Path) -> float:
    """Predicts the seconds per step like `tfdist advise`: the computation of half a batch, and an all-reduce."""
    work = measured.Work(options, size, sys.maxsize, tuple(sorted(os.sched_getaffinity(0))), steps)
    records = measured.run_side_by_side(work, size // 2, 2, folder)
    seconds = [epoch.step_seconds for record in records for epoch in record.epochs[1:] if epoch.step_seconds]
    half = costs.Compute(statistics.median(seconds), 0.0)
    link = measured.link("multiworker")
    assert link is not None
    return costs.collective(half, link, 4.0 * (records[0].model.parameters or 0), size, 2)


def job(options: dict[str, object], size: int, steps: int, folder: Path) -> float:
    """Measures the seconds per step of a job of two processes."""
    job_options = {"batch_size": size, "limit": steps * size, "epochs": measured.EPOCHS, "run_dir": folder}
    command = [sys.executable, "-m", "tfdist.train", "--strategy", "multiworker", "--workers", "2", "--quiet"]
    subprocess.run([*command, *as_options({**options, **job_options})], check=True, stdout=subprocess.DEVNULL)
    epochs = load_record(folder).epochs[1:]
    return statistics.median(epoch.train_seconds / steps for epoch in epochs if epoch.train_seconds)


if __name__ == "__main__":
    main()
