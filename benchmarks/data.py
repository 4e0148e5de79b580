"""The training examples of the contestants, written once per run as `.npy` files.

A separate process prepares them, so that a contestant has only the arrays in memory, without a dataset library, and
without TensorFlow in a process of PyTorch.

Synopsis:

    python -m benchmarks.data FOLDER --data-dir DIR     # writes x_train.npy, y_train.npy, x_test.npy, y_test.npy
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

Arrays = tuple[np.ndarray, np.ndarray]


def prepare(folder: Path, data_dir: str | None) -> bool:
    """Writes the arrays into `folder`, in a separate process; returns whether they are the real Fashion-MNIST."""
    command = [sys.executable, "-m", "benchmarks.data", str(folder)]
    if data_dir:
        command += ["--data-dir", data_dir]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    description = json.loads(done.stdout.splitlines()[-1])
    print(f"data: {description['what']}", flush=True)
    return description["real"]


def load(folder: str, split: str = "train", examples: int | None = None) -> Arrays:
    """Returns x float32 `[N, 28, 28, 1]` in [0, 1] and y int32 `[N]`, for the first `examples` examples or all."""
    x = np.load(Path(folder, f"x_{split}.npy"))
    y = np.load(Path(folder, f"y_{split}.npy"))
    if examples is None or examples == len(y):
        return x, y  # not copied, so that copies do not count in the peak memory of the contestant
    return x[:examples].copy(), y[:examples].copy()


def _read(data_dir: str | None) -> tuple[dict[str, Arrays], str | None]:
    """Fashion-MNIST's 60,000 + 10,000 examples, or synthetic examples of the same size and the reason why."""
    import tfdist.data
    from tfdist.errors import TfdistError

    reason = None
    if data_dir and Path(data_dir, "fashion_mnist").is_dir():
        try:
            source = tfdist.data.load("fashion_mnist", data_dir)
            parts = [source.arrays("train"), source.arrays("validation")]
            train = (np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts]))
            return {"train": train, "test": source.arrays("test")}, None
        except TfdistError as error:
            reason = str(error).splitlines()[0]
    source = tfdist.data.load("synthetic", shape=(28, 28, 1), classes=10, train=60_000, test=10_000)
    arrays = {"train": source.arrays("train"), "test": source.arrays("test")}
    return arrays, reason or "no prepared Fashion-MNIST in --data-dir or TFDS_DATA_DIR"


def main() -> None:
    """Writes the files, and prints their description as JSON."""
    parser = argparse.ArgumentParser(description="Writes the arrays that the benchmarks train on.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data-dir", default=os.environ.get("TFDS_DATA_DIR"))
    arguments = parser.parse_args()
    arrays, reason = _read(arguments.data_dir)
    for split, (x, y) in arrays.items():
        np.save(arguments.folder / f"x_{split}.npy", x)
        np.save(arguments.folder / f"y_{split}.npy", y)
    count = len(arrays["train"][1])
    what = f"Fashion-MNIST, {count:,} training examples (train and validation joined)"
    if reason:
        what = f"SYNTHETIC, {count:,} synthetic examples of 28x28x1, because: {reason}"
    print(json.dumps({"real": reason is None, "what": what}))


if __name__ == "__main__":
    main()
