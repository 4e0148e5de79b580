"""The 1,797 handwritten digits of 8x8 pixels that are part of scikit-learn: real data without a download.

Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning
Repository, 1998 (its test set).
"""

from __future__ import annotations

import importlib.util
from os import PathLike
from pathlib import Path

import numpy as np

from tfdist import extras
from tfdist.data.input.arrays import Arrays
from tfdist.data.input.source import Source
from tfdist.data.spec import DataSpec
from tfdist.errors import MissingPackageError

TASKS = ("classification",)
SPEC = DataSpec(
    name="digits",
    task="classification",
    input_shape=(8, 8, 1),
    classes=10,
    examples={"train": 1347, "validation": 150, "test": 300},
    class_names=tuple("0123456789"),
)


def load(data_dir: str | PathLike[str] | None = None) -> Source:
    """x `[N, 8, 8, 1]` in [0, 1]: 1,347 training, 150 validation and 300 test examples.

    Args:
        data_dir: not used; the data is part of scikit-learn.

    Raises:
        MissingPackageError: scikit-learn is not installed.
    """
    _file()
    return Source(SPEC, _read, divisor=16)


def _file() -> Path:
    # Found without importing scikit-learn, which takes more than a second.
    package = importlib.util.find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise MissingPackageError("The dataset `digits`", "scikit-learn", f"run `{extras.command('train')}`")
    return Path(package.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")


def _read(split: str, count: int) -> Arrays:
    pixels, labels = np.split(np.loadtxt(_file(), delimiter=","), [64], axis=1)
    labels = labels[:, 0]
    # The stored order is by writer; with a fixed permutation each split has digits of all writers.
    order = np.random.default_rng(0).permutation(len(labels))
    train, validation = SPEC.examples["train"], SPEC.examples["validation"]
    first = {"train": 0, "validation": train, "test": train + validation}[split]
    chosen = order[first : first + count]
    # Pixel values are 0 to 16.
    return pixels[chosen].reshape(-1, 8, 8, 1).astype(np.uint8), labels[chosen].astype(np.int64)
