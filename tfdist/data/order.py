"""Which example comes when: a pure function of (seed, epoch), and which replica takes which part of a batch.

Every strategy and every pipeline asks here, so that global batch k holds the same examples for any number of
replicas and processes (point 4 of the contract).

Synopsis:

    >>> list(epoch_order(5, seed=1, epoch=0)) == list(epoch_order(5, seed=1, epoch=0))
    True
    >>> [part(10, index, 4) for index in range(4)]
    [(0, 3), (3, 5), (5, 8), (8, 10)]
"""

from __future__ import annotations

import numpy as np


def epoch_order(examples: int, seed: int, epoch: int) -> np.ndarray:
    """The order of one epoch: a permutation of 0 to `examples - 1`, int32 `[examples]`."""
    return np.random.default_rng([seed, epoch]).permutation(examples).astype(np.int32)


def order_within_batches(examples: int, batch_size: int, seed: int, epoch: int) -> np.ndarray:
    """As stored, but for the examples of each batch, which are shuffled among themselves; int32 `[examples]`."""
    keys = np.random.default_rng([seed, epoch]).random(examples)
    return np.lexsort((keys, np.arange(examples) // batch_size)).astype(np.int32)


def as_stored(examples: int) -> np.ndarray:
    """The order without shuffling: 0 to `examples - 1`, int32 `[examples]`."""
    return np.arange(examples, dtype=np.int32)


def part(examples: int, index: int, count: int) -> tuple[int, int]:
    """The half-open range of a batch of `examples` that part `index` of `count` takes.

    Parts are contiguous and in order, so that joining them gives the batch back; their sizes differ by one at
    most, and part 0 of a batch with examples is never empty. Works on Python integers and on TensorFlow's integer
    tensors alike.
    """
    return (examples * index + count - 1) // count, (examples * (index + 1) + count - 1) // count
