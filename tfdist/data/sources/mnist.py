"""MNIST, 70,000 handwritten digits of 28x28 pixels: Y. LeCun, C. Cortes and C. Burges, 1998."""

from __future__ import annotations

from os import PathLike

from tfdist.data.formats import tfds
from tfdist.data.input.source import Source

TASKS = ("classification",)
FILES = "tfds"


def load(data_dir: str | PathLike[str] | None = None) -> Source:
    """x `[N, 28, 28, 1]` in [0, 1], ten classes: 55,000 training, 5,000 validation and 10,000 test examples.

    Args:
        data_dir: the folder of prepared datasets; see `tfdist.data.load`.

    Raises:
        DataError: the dataset is not prepared and cannot be downloaded.
    """
    return tfds.in_memory("mnist", data_dir)
