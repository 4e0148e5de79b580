"""Four ways to train the same network on Fashion-MNIST, on equal work: the comparison of a published study, checked.

    single       one process, all cores                    ("without MPI")
    mpi_split    two processes, averaging each epoch       ("with MPI")
    mirrored     two logical devices
    custom       one process

flatten, dense 128, dropout, dense 10; Adam; the same initial weights, the same examples, the same total batch. Each way
is a run of `tfdist.train`, alone on the machine; the table is made from the runs' records.

Example: `python -m benchmarks.four_ways --epochs 10 --output four_ways`
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

WAYS = {
    "single": ["--strategy", "single"],
    "mpi_split on 2": ["--strategy", "mpi_split", "--workers", "2"],
    "mirrored on 2": ["--strategy", "mirrored", "--devices", "2"],
    "custom": ["--strategy", "custom"],
}
# Seconds that the study reports for these ways.
STUDY = {"single": 46.18, "mpi_split on 2": 35.49, "mirrored on 2": 29.21, "custom": 17.46}
MODEL = "benchmarks.four_ways:build"


def build(spec: Any) -> Any:
    """The network; it prints a hash of its initial weights."""
    import tensorflow as tf

    from tfdist import models

    model = models.build("mlp", spec)
    if not tf.executing_eagerly():  # only built to count the operations of a step
        return model
    digest = hashlib.sha256(b"".join(weight.tobytes() for weight in model.get_weights())).hexdigest()[:16]
    folder = Path(os.environ["FOUR_WAYS_HASHES"])
    (folder / f"{os.getpid()}").write_text(digest)
    return model


def run(way: str, epochs: int, batch_size: int, folder: Path) -> dict[str, Any]:
    """The record of one way."""
    run_dir, hashes = folder / way.replace(" ", "-"), folder / "hashes"
    hashes.mkdir(parents=True, exist_ok=True)
    options = ["--model", MODEL, "--dataset", "fashion_mnist", "--seed", "0", "--quiet", "--run-dir", str(run_dir)]
    options += ["--epochs", str(epochs), "--batch-size", str(batch_size)]
    subprocess.run(
        [sys.executable, "-m", "tfdist.train", *WAYS[way], *options],
        check=True,
        env=os.environ | {"FOUR_WAYS_HASHES": str(hashes), "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    return json.loads((run_dir / "run.json").read_text())


def row(way: str, record: dict[str, Any]) -> dict[str, Any]:
    """A line of the table."""
    epochs = record["epochs"]
    seconds = [epoch["train_seconds"] for epoch in epochs]
    later = seconds[1:] or seconds
    return {
        "way": way,
        "training_seconds": sum(seconds),
        "epoch_seconds": sum(later) / len(later),
        "examples_per_second": record["dataset"]["examples"]["train"] * len(later) / sum(later),
        "test_accuracy": record["test_metrics"]["accuracy"],
        "validation_accuracy": [epoch["metrics"]["val_accuracy"] for epoch in epochs],
        "elapsed_seconds": [sum(seconds[: index + 1]) for index in range(len(seconds))],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The table in Markdown."""
    base = rows[0]["training_seconds"]
    lines = [
        "| way | training s | first / later epochs | relative to `single` | relative, in the study | examples/s "
        "| test accuracy |",
        "|---|---|---|---|---|---|---|",
    ]
    for found in rows:
        first = found["elapsed_seconds"][0]
        lines.append(
            f"| {found['way']} | {found['training_seconds']:.1f} | {first:.2f} / {found['epoch_seconds']:.2f} s "
            f"| {found['training_seconds'] / base:.2f} | {STUDY[found['way']] / STUDY['single']:.2f} "
            f"| {found['examples_per_second']:,.0f} | {found['test_accuracy']:.4f} |"
        )
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Accuracy over time, and the time of each way."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for found in rows:
        left.plot(found["elapsed_seconds"], found["validation_accuracy"], marker="o", markersize=3, label=found["way"])
    left.set(xlabel="training time, s", ylabel="validation accuracy", title="Accuracy against time")
    left.legend()
    bars = right.barh([found["way"] for found in rows], [found["training_seconds"] for found in rows])
    right.bar_label(bars, fmt="%.1f s", padding=3)
    right.invert_yaxis()
    right.margins(x=0.15)
    right.set(xlabel="training time, s", title="Time by way")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="global batch size, over all processes and devices")
    parser.add_argument("--output", type=Path, default=Path("four_ways"), help="folder for runs, table and picture")
    arguments = parser.parse_args()
    records = {way: run(way, arguments.epochs, arguments.batch_size, arguments.output) for way in WAYS}
    found = {file.read_text() for file in (arguments.output / "hashes").iterdir()}
    if len(found) != 1:
        sys.exit(f"The ways began with different weights: {sorted(found)}")
    rows = [row(way, record) for way, record in records.items()]
    text = table(rows)
    (arguments.output / "table.md").write_text(text + "\n")
    draw(rows, arguments.output / "four_ways.png")
    print(f"Initial weights of all processes: {found.pop()}\n\n{text}\n\n{arguments.output / 'four_ways.png'}")


if __name__ == "__main__":
    main()
