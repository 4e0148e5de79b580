"""The 1,797 handwritten digits of 8x8 pixels that scikit-learn carries: real data without a download.

Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning
Repository, 1998 (its test set).
"""

from __future__ import annotations

from os import PathLike

import numpy as np

from tfdist.data.source import Arrays, Source
from tfdist.data.spec import DataSpec

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
    """
    del data_dir
    return Source(SPEC, _read)


def _read(split: str, count: int) -> Arrays:
    from sklearn.datasets import load_digits

    digits = load_digits()
    # The stored order goes writer by writer; a fixed permutation gives each split all of them.
    order = np.random.default_rng(0).permutation(len(digits.target))
    train, validation = SPEC.examples["train"], SPEC.examples["validation"]
    first = {"train": 0, "validation": train, "test": train + validation}[split]
    chosen = order[first : first + count]
    # The pixels are 0 to 16.
    return (digits.images[chosen, :, :, np.newaxis] / 16).astype(np.float32), digits.target[chosen]
