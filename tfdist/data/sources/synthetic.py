"""Made-up images of any shape, size and number of classes, with labels that can be learned.

Each class has a template of uniform noise; an example is the mean of its class' template and noise of its
own. The more pixels, the easier it is: a linear classifier suffices.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike

import numpy as np

from tfdist.data.source import Arrays, Source
from tfdist.data.spec import SPLITS, DataSpec

# Examples made at once: small beside the dataset, large beside NumPy's overhead.
_CHUNK = 1024


def load(
    data_dir: str | PathLike[str] | None = None,
    *,
    shape: Sequence[int] = (28, 28, 1),
    classes: int = 10,
    train: int = 6000,
    validation: int = 1000,
    test: int = 1000,
    seed: int = 0,
) -> Source:
    """x `[N, *shape]` in [0, 1]; the same numbers for the same `shape`, `classes` and `seed`.

    Args:
        data_dir: not used; there are no files.
        shape: of one example, without the batch.
        classes: the number of classes.
        train: training examples.
        validation: validation examples.
        test: test examples.
        seed: of templates, noise and labels.
    """
    del data_dir
    examples = {"train": train, "validation": validation, "test": test}
    spec = DataSpec("synthetic", "classification", tuple(shape), classes, examples)
    return Source(spec, lambda split, count: _make(spec, seed, SPLITS.index(split), count))


def _make(spec: DataSpec, seed: int, stream: int, count: int) -> Arrays:
    templates = np.random.default_rng([seed, len(SPLITS)]).random((spec.classes, *spec.input_shape), np.float32)
    y = np.random.default_rng([seed, stream, 0]).integers(spec.classes, size=count, dtype=np.int32)
    noise = np.random.default_rng([seed, stream, 1])
    x = np.empty((count, *spec.input_shape), np.float32)
    for first in range(0, count, _CHUNK):
        chunk = x[first : first + _CHUNK]
        noise.random(out=chunk, dtype=np.float32)
        chunk += templates[y[first : first + _CHUNK]]
        chunk *= np.float32(0.5)
    return x, y
