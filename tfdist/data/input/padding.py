"""Pads sentences of different lengths into one array, and trims a batch to its longest sentence.

Synopsis:

    >>> padded([[5, 4], [7]], 3)
    array([[5, 4, 0],
           [7, 0, 0]], dtype=int32)
    >>> lengths(padded([[5, 4], [7]], 3)).tolist()
    [2, 1]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdist.data.spec import PADDING

if TYPE_CHECKING:
    import tensorflow as tf


def padded(sentences: Sequence[Sequence[int]], length: int) -> np.ndarray:
    """Sentences of tokens in one array: int32 `[N, length]`, cut at `length` and padded at the end."""
    rows = np.full((len(sentences), length), PADDING, np.int32)
    for row, sentence in zip(rows, sentences, strict=True):
        kept = sentence[:length]
        row[: len(kept)] = kept
    return rows


def lengths(tokens: np.ndarray) -> np.ndarray:
    """The number of tokens in each row that are not padding: int64 `[N]`."""
    return np.count_nonzero(tokens != PADDING, axis=1)


class Trimmed:
    """A `Transform` that removes the columns in which the whole global batch has padding.

    Args:
        lengths_of: the length of each example, int `[N]`, per kind of sentence: "x", or "source" and "target".
        batch_size: the number of examples per global batch; all replicas trim to its longest sentence.
        multiple: widths are rounded up to multiples of this.
    """

    def __init__(self, lengths_of: dict[str, np.ndarray], batch_size: int, multiple: int = 1):
        self._lengths_of = lengths_of
        self._batch_size = batch_size
        self._multiple = multiple

    def extras(self, epoch: int, indices: np.ndarray) -> tuple[np.ndarray, ...]:
        """The width of the global batch of each example, int32 `[n]`, per kind of sentence."""
        return tuple(self._widths(lengths[indices]) for lengths in self._lengths_of.values())

    def __call__(self, data: tuple[Any, Any], *widths: tf.Tensor) -> tuple[Any, Any]:
        import tensorflow as tf

        # At least one column, for a part without examples.
        width = {
            kind: tf.maximum(tf.reduce_max(column), 1) for kind, column in zip(self._lengths_of, widths, strict=True)
        }
        x, y = data
        if not isinstance(x, dict):
            return x[:, : width["x"]], y
        return {kind: x[kind][:, : width[kind]] for kind in x}, y[:, : width["target"]]

    def _widths(self, lengths: np.ndarray) -> np.ndarray:
        first = np.arange(0, len(lengths), self._batch_size)
        widths = -(-np.maximum.reduceat(lengths, first) // self._multiple) * self._multiple
        return np.repeat(widths, self._batch_size)[: len(lengths)].astype(np.int32)
