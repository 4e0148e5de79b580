"""Batches of Grain's `DataLoader`, `MapDataset` and `IterDataset`, in Grain's order: what `fit` of stock Keras takes.

A Grain iterator returns its state and can be set to it, so that a resumed run reads no earlier batch again.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.input.dataset_feed import DatasetFeed
from tfdist.data.input.feed import NO_BATCHES
from tfdist.errors import CheckpointError, DataError, UsageError
from tfdist.internals import grain_data, keras_data
from tfdist.internals.keras import tree
from tfdist.jobs import consensus

_IDENTITY = {"sampler", "data_source", "worker_count"}  # what must not change in the state of a `DataLoader`
_ADDRESS = re.compile(r"\b0x[0-9a-f]+\b")  # of an object without `__repr__`, another one in each process


class GrainFeed(DatasetFeed):
    """The batches of `data`, which is a `DataLoader`, a `MapDataset` or an `IterDataset`.

    Raises:
        DataError: there are no batches.
        UsageError: the elements are examples and not batches.
    """

    def __init__(self, data: Any):
        self._loader = _Loader(data)
        self.shard = grain_data.shard_of(data)
        super().__init__(self._loader)

    def first(self, count: int) -> list[Any]:
        return list(itertools.islice(self._loader.batches(), count))

    def sample(self) -> str:
        return consensus.fingerprint_of_arrays(
            np.ascontiguousarray(array) for array in tree.flatten(self._loader.first_batch) if array is not None
        )

    def save(self) -> bytes:
        return self._loader.state()

    def resume(self, saved: bytes, epoch: int, first_batch: int) -> Any:
        if not saved or not first_batch:
            return self.start(epoch, first_batch)  # which reads the earlier batches again
        self._loader.resume(saved)
        self._iterator = self._make_iterator()
        return self._iterator


class _Loader:
    """What `DatasetFeed` calls of an adapter of Keras'; one that knows the Grain iterator which is being read."""

    num_batches = None  # as with stock Keras: a filter may leave fewer than `len`

    def __init__(self, data: Any):
        self._data = data
        self._reading: Any = None
        self._resumed: Any = None  # an iterator that continues a pass, for the next call of `batches`
        batches = list(itertools.islice(data, keras_data.BATCHES_FOR_SPEC))
        if not batches:
            raise DataError(*NO_BATCHES)
        self.first_batch = batches[0]
        if any(np.ndim(value) == 0 for value in tree.flatten(self.first_batch) if value is not None):
            raise UsageError(
                f"An element of the Grain `{type(data).__name__}` has a scalar in it, so that it is no batch",
                "batch it with `.batch(32)`, or pass `tfdist.data.examples(dataset)` with `batch_size=32`",
            )
        self._spec = keras_data.spec_of_batches(batches)
        self.batch_size = tree.flatten(self._spec)[0].shape[0] or len(tree.flatten(self.first_batch)[0])

    def get_tf_dataset(self) -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_generator(self.batches, output_signature=self._spec)
        # Grain reads ahead itself. If tf.data did, as it does by default, the state would be ahead of the steps.
        options = tf.data.Options()
        options.autotune.enabled = False
        options.experimental_optimization.apply_default_optimizations = False
        options.experimental_optimization.inject_prefetch = False
        return dataset.with_options(options)

    def batches(self) -> Iterator[Any]:
        resumed, self._resumed = self._resumed, None
        self._reading = iter(self._data) if resumed is None else resumed
        for batch in self._reading:
            yield keras_data.as_yielded(batch)

    def state(self) -> bytes:
        """The state of the iterator that is being read, as JSON; nothing if JSON cannot represent it."""
        if self._reading is None:
            return b""
        state = self._reading.get_state()
        try:
            return state if isinstance(state, bytes) else json.dumps(state).encode()
        except TypeError:
            return b""

    def resume(self, saved: bytes) -> None:
        """Makes the next pass begin where another process called `state`.

        Raises:
            CheckpointError: these are other data.
        """
        iterator = iter(self._data)
        fresh = iterator.get_state()
        if isinstance(fresh, bytes):
            iterator.set_state(json.dumps(_state_of_loader(json.loads(saved), json.loads(fresh))).encode())
        else:
            iterator.set_state(json.loads(saved))
        self._resumed = iterator

    def on_epoch_begin(self) -> None:
        """Grain's data have no hooks."""

    def on_epoch_end(self) -> None:
        """Grain's data have no hooks."""


def _state_of_loader(saved: dict[str, Any], fresh: dict[str, Any]) -> dict[str, Any]:
    """The state that a `DataLoader` wrote, for a loader of the same data whose iterator has the state `fresh`.

    Grain compares the texts of the sampler and of the data source, which may contain an address.
    """
    for name in _IDENTITY & saved.keys():
        was, now = (_ADDRESS.sub("", str(state.get(name))) for state in (saved, fresh))
        if was != now:
            raise CheckpointError(
                f"The checkpoint was written within an epoch of another Grain `DataLoader`: its `{name}` was `{was}`, "
                f"and is `{now}`",
                "resume with the loader of the run that wrote it, or from a checkpoint of an epoch's end",
            )
    return saved | {name: fresh[name] for name in _IDENTITY & saved.keys()}
