"""One batch that is at hand, as `train_on_batch` and the like are given it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist.data.input.dataset_feed import DatasetBatches
from tfdist.data.input.feed import Feed
from tfdist.internals.keras import tree


@dataclass(frozen=True)
class FetchedBatches(DatasetBatches):
    """A batch that was fetched already is the state itself."""

    length_known: bool = True

    def fetch(self, state: Any, step: tf.Tensor) -> Any:
        del step
        return state


class BatchFeed(Feed):
    """One batch that is at hand, as Keras' `(x, y, sample_weight)`."""

    num_batches = 1
    examples = None
    batch_size = None
    batches = FetchedBatches()

    def __init__(self, batch: Any):
        with tf.init_scope():
            self._batch = tree.map_structure(_as_tensor, batch)
        self.spec = tree.map_structure(_spec_of_any_size, self._batch)

    def start(self, epoch: int, first_batch: int) -> Any:
        del epoch, first_batch
        return self._batch


def _as_tensor(value: Any) -> Any:
    return value if value is None or tf.is_tensor(value) else tf.convert_to_tensor(value)


def _spec_of_any_size(value: Any) -> Any:
    if not isinstance(value, tf.Tensor):
        return None if value is None else tf.type_spec_from_value(value)
    return tf.TensorSpec([None, *value.shape[1:]], value.dtype)
