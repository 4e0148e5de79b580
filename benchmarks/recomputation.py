"""The savings and the cost of `recompute`: peak memory of a training process, and seconds per step, with and without.

Each measurement is a fresh process that trains on synthetic examples with `single`; the two kinds take turns. The
memory is the peak of the process, minus its memory after training a tiny model.
Example: `python -m benchmarks.recomputation --models unet resnet50`
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

# The options of the dataset `synthetic`, by model.
EXAMPLES: dict[str, dict[str, Any]] = {
    "unet": {"task": "segmentation", "shape": (128, 128, 3), "classes": 3},
    "resnet50": {"task": "classification", "shape": (224, 224, 3), "classes": 1000},
    "resnet20": {"task": "classification", "shape": (32, 32, 3), "classes": 10},
    "vgg16": {"task": "classification", "shape": (64, 64, 3), "classes": 10},
    "transformer": {"task": "text_classification", "words": 2000, "length": 128, "classes": 4},
    "resnet18": {"task": "classification", "shape": (64, 64, 3), "classes": 10},
    "segnet": {"task": "segmentation", "shape": (64, 64, 3), "classes": 3},
    "bilstm": {"task": "text_classification", "words": 20000, "length": 128, "classes": 4},
    "textcnn": {"task": "text_classification", "words": 20000, "length": 128, "classes": 4},
    "seq2seq": {"task": "translation", "words": 8000, "length": 24},
}
KINDS = ("plain", "blocks")
TARGET_MEMORY, TARGET_TIME = 0.6, 1.4


def main() -> None:
    arguments = parser().parse_args()
    if arguments.kind is not None:
        train(arguments)
        return
    print(f"{'model':<12}{'recompute':<12}{'MiB':>8}{'s per step':>12}{'memory':>10}{'time':>8}")
    for model in arguments.models:
        results: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
        for _ in range(arguments.repeats):
            for kind in KINDS:
                results[kind].append(start(arguments, model, kind))
        for kind, runs in results.items():
            memory = statistics.median(run["bytes"] for run in runs)
            seconds = statistics.median(run["seconds"] for run in runs)
            ratios = [
                statistics.median(run[what] / plain[what] for run, plain in zip(runs, results["plain"], strict=True))
                for what in ("bytes", "seconds")
            ]
            line = f"{model:<12}{kind:<12}{memory / 2**20:>8.0f}{seconds:>12.2f}{ratios[0]:>10.2f}{ratios[1]:>8.2f}"
            print(line, flush=True)


def parser() -> argparse.ArgumentParser:
    """The options of this benchmark."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--models", nargs="+", choices=EXAMPLES, default=["unet", "resnet50"])
    options.add_argument("--batch-size", type=int, default=16)
    options.add_argument("--steps", type=int, default=2, help="steps per epoch")
    options.add_argument("--epochs", type=int, default=3, help="timed epochs after a warm-up epoch; the fastest counts")
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--kind", help=argparse.SUPPRESS)
    options.add_argument("--file", help=argparse.SUPPRESS)
    return options


def start(arguments: argparse.Namespace, model: str, kind: str) -> dict[str, float]:
    """Trains in a fresh process, and returns its numbers."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "numbers.json")
        command = [sys.executable, "-m", "benchmarks.recomputation", "--models", model, "--kind", kind]
        command += ["--batch-size", str(arguments.batch_size), "--steps", str(arguments.steps), "--file", str(file)]
        command += ["--epochs", str(arguments.epochs)]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        numbers: dict[str, float] = json.loads(file.read_text())
        return numbers


def train(arguments: argparse.Namespace) -> None:
    """Trains in this process, and writes its numbers to the file."""
    import keras

    import tfdist

    (name,) = arguments.models
    strategy = tfdist.strategy("single", seed=1, recompute=None if arguments.kind == "plain" else arguments.kind)
    x, y = examples(name, arguments.batch_size * arguments.steps)
    warm_up(strategy)
    before = reset_peak()
    model = compiled(strategy, name)
    epochs: list[float] = []

    class Timer(keras.callbacks.Callback):
        """Measures the seconds of each epoch."""

        def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
            self.began = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: object = None) -> None:
            epochs.append(time.perf_counter() - self.began)

    strategy.fit(
        model, x, y, batch_size=arguments.batch_size, epochs=1 + arguments.epochs, verbose=0, callbacks=[Timer()]
    )
    numbers = {"bytes": peak() - before, "seconds": min(epochs[1:]) / arguments.steps}
    Path(arguments.file).write_text(json.dumps(numbers))


def warm_up(strategy: Any) -> None:
    """Trains a tiny model, so that TensorFlow's initialization does not count."""
    import keras
    import numpy as np

    x, layers = np.zeros((4, 16, 16, 3), "float32"), keras.layers
    with strategy.scope():
        tiny = [layers.Conv2D(4, 3), layers.BatchNormalization(), layers.MaxPooling2D(), layers.Flatten()]
        model = keras.Sequential([keras.Input(x.shape[1:]), *tiny, layers.Dense(2)])
        model.compile("adam", "mse")
    strategy.fit(model, x, np.zeros((4, 2), "float32"), batch_size=4, verbose=0)


def examples(name: str, count: int) -> tuple[Any, Any]:
    """Synthetic examples for a model."""
    from tfdist import data

    source = data.load("synthetic", None, **EXAMPLES[name], train=count, validation=1, test=1)
    batches = list(source.pipeline("train", count, shuffle=False).as_numpy_iterator())
    return batches[0]


def compiled(strategy: Any, name: str) -> Any:
    """Returns the model, compiled for its task with its usual optimizer."""
    from tfdist import data, models
    from tfdist.run import optimizers
    from tfdist.run.config import TrainConfig

    spec = data.load("synthetic", None, **EXAMPLES[name]).spec
    with strategy.scope():
        model = models.build(name, spec)
        optimizers.compile(model, spec, TrainConfig(strategy.name, name, "synthetic"), steps_per_epoch=None)
    return model


if __name__ == "__main__":
    main()
