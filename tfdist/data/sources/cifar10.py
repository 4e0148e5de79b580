"""CIFAR-10, 60,000 pictures of 32x32 pixels in 10 classes: A. Krizhevsky, 2009."""

from __future__ import annotations

from os import PathLike

from tfdist.data.formats import tfds
from tfdist.data.input.source import Source

TASKS = ("classification",)
FILES = "tfds"


def load(data_dir: str | PathLike[str] | None = None) -> Source:
    """x `[N, 32, 32, 3]` in [0, 1], 10 classes: 45,000 training, 5,000 validation and 10,000 test examples.

    Args:
        data_dir: the folder of prepared datasets; see `tfdist.data.load`.

    Raises:
        DataError: the dataset is not prepared and cannot be downloaded.
    """
    return tfds.in_memory("cifar10", data_dir)
