"""Batches that the user's own data produce: a `tf.data.Dataset`, a `PyDataset`, a generator, or one batch alone."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist.data.input import batch_parts, order
from tfdist.data.input.division import Division
from tfdist.data.input.feed import Batches, Feed
from tfdist.errors import CheckpointError, DataError
from tfdist.internals import keras_data
from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.internals.keras import tree
from tfdist.jobs.job_environment import cores


class DatasetFeed(Feed):
    """Batches of a `tf.data.Dataset`, or of what Keras turns into one.

    Args:
        adapter: Keras' adapter of the user's data.
        in_order: the user's `PyDataset`, if the data are one.

    Attributes:
        endless: whether a pass never ends.
    """

    def __init__(self, adapter: Any, in_order: InOrder | None = None):
        self._adapter = adapter
        self._in_order = in_order
        self._dataset = _without_autotuning_on_one_core(adapter.get_tf_dataset())
        self.examples = None
        self._iterator: Any = None  # that of the current pass, or of the last one
        self._unused: Any = None  # an iterator that the next pass will use
        self._remaining: Any = None  # the iterator that `_unused` continues with, after batches that were put back
        self._made = 0  # how many iterators were made, including those before the run was resumed
        self.batch_size = adapter.batch_size
        self.endless = bool(self._dataset.cardinality() == tf.data.INFINITE_CARDINALITY)
        self.spec = self._dataset.element_spec

    @property
    def num_batches(self) -> int | None:
        return self._adapter.num_batches

    @property
    def batches(self) -> DatasetBatches:
        # A `PyDataset` may end before the number of batches that it announced.
        return DatasetBatches(length_known=self.num_batches is not None and self._in_order is None)

    def start(self, epoch: int, first_batch: int) -> Any:
        if self._in_order is not None:
            self._in_order.set_epoch(epoch)
        self._adapter.on_epoch_begin()
        if first_batch and self._unused is None:
            self._iterator = iter(self._dataset.skip(first_batch))
            self._made += 1
        else:
            self._iterator = self._next_iterator()
            for _ in range(first_batch):
                self._iterator.get_next_as_optional()
        return self._iterator

    def _next_iterator(self) -> Any:
        iterator, self._unused = self._unused, None
        return self._make_iterator() if iterator is None else iterator

    def _make_iterator(self) -> Any:
        self._made += 1
        return iter(self._dataset)

    def look_ahead(self, keep: bool) -> None:
        # Keras makes an iterator here, too. `shuffle` draws the seed of its next order when an iterator is made, so
        # epochs without `steps_per_epoch` use every second order.
        if self._in_order is None:
            iterator = self._make_iterator()
            self._unused = iterator if keep else None

    def first(self, count: int) -> list[Any]:
        if self._in_order is not None:
            self._in_order.set_epoch(0)
            numbers = range(min(count, self.num_batches or count))
            return [keras_data.standardized(self._adapter, self._in_order[number]) for number in numbers]
        iterator, taken = self._make_iterator(), []
        try:
            state = tensorflow_internals.iterator_state(iterator)
            taken = list(itertools.islice(iterator, count))
            tensorflow_internals.iterator_state(iterator)  # an iterator that has not begun could always be restored
            tensorflow_internals.restore_iterator(iterator, state)
        except tf.errors.OpError:
            iterator, self._remaining = self._put_back(taken), iterator
        self._unused = iterator
        return [tree.map_structure(batch_parts.none_if_empty, batch) for batch in taken]

    def _put_back(self, taken: list[Any]) -> Any:
        """An iterator over the batches `taken` from one that cannot be restored, followed by its remaining batches."""
        # The function must not close over the iterator: TensorFlow never frees a function, nor what it closes over.
        batches = tf.data.Dataset.from_generator(
            lambda: itertools.chain(taken, self._remaining), output_signature=self.spec
        )
        return iter(batches)

    def save(self) -> bytes | None:
        if self._in_order is not None:
            return b"" if self._in_order.without_hooks else None
        try:
            state = b"" if self._iterator is None else tensorflow_internals.iterator_state(self._iterator)
        except tf.errors.OpError:
            return None
        made = self._made - (self._unused is not None)  # the resumed run makes the unused iterator itself
        return made.to_bytes(8, "little") + state

    def resume(self, saved: bytes, epoch: int, first_batch: int) -> Any:
        if not saved:
            return self.start(epoch, first_batch)
        made, state = int.from_bytes(saved[:8], "little"), saved[8:]
        # `shuffle` draws the seed of its next order when an iterator is made; a restored iterator counts as the one
        # before it.
        for _ in range(made - 2 if first_batch else made):
            self._next_iterator()
        if not first_batch:
            return self.start(epoch, 0)
        iterator = self._next_iterator()
        try:
            tensorflow_internals.restore_iterator(iterator, state)
        except tf.errors.OpError as error:
            raise CheckpointError(
                "The checkpoint was written within an epoch of other data: this dataset is made of other parts",
                "resume with the dataset of the run that wrote it, or from a checkpoint of an epoch's end",
            ) from error
        self._adapter.on_epoch_begin()
        self._iterator, self._made = iterator, made
        return iterator

    def finish(self) -> None:
        self._adapter.on_epoch_end()

    def begin_epoch(self) -> None:
        if self._in_order is not None:
            self._in_order.dataset.on_epoch_begin()

    def end_epoch(self) -> None:
        if self._in_order is not None:
            self._in_order.dataset.on_epoch_end()

    def release(self) -> None:
        self._iterator = self._unused = self._remaining = None

    @contextlib.contextmanager
    def naming_bad_examples(self, first_batch: int, batches: int) -> Iterator[None]:
        try:
            yield
        except tf.errors.InvalidArgumentError as error:
            if batch_parts.UNEQUAL_LENGTHS not in str(error):
                raise
            raise DataError(*batch_parts.unequal_lengths("several")) from error


def _without_autotuning_on_one_core(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Switches off tf.data's autotuning on one core, where it makes a pipeline that decodes a fifth slower.

    `num_parallel_calls=tf.data.AUTOTUNE` then means as many calls as cores. A choice of the user's is kept
    (https://www.tensorflow.org/api_docs/python/tf/data/experimental/AutotuneOptions).
    """
    if cores() > 1 or dataset.options().autotune.enabled is not None:
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


@dataclass(frozen=True)
class DatasetBatches(Batches):
    """A batch is fetched from the iterator of the pass; the part of each replica is sliced on the host."""

    length_known: bool

    def fetch(self, state: Any, step: tf.Tensor) -> Any:
        return next(state) if self.length_known else state.get_next_as_optional()

    def part(self, state: Any, batch: Any, index: int, division: Division) -> tuple[Any, Any]:
        batch = tree.map_structure(batch_parts.none_if_empty, batch)
        if division.count == 1:
            return batch, 1.0
        with tf.device("CPU:0"):  # so that the device of a replica receives its part only
            flat = tree.flatten(batch)
            begin, end, share = batch_parts.bounds(batch_parts.common_length(flat), index, division)
            parts = [batch_parts.slice_examples(tensor, begin, end) for tensor in flat]
        return tree.pack_sequence_as(batch, parts), share

    def lengths_of_parts(self, state: Any, batch: Any, division: Division) -> list[Any]:
        flat = tree.flatten(tree.map_structure(batch_parts.none_if_empty, batch))
        return batch_parts.lengths_of_parts(flat, division)


@dataclass(frozen=True)
class FetchedBatches(DatasetBatches):
    """`DatasetBatches` whose state is a batch that was fetched already, and not an iterator."""

    length_known: bool = True

    def fetch(self, state: Any, step: tf.Tensor) -> Any:
        return state


class BatchFeed(Feed):
    """One batch as Keras' `(x, y, sample_weight)`, such as that of `train_on_batch`."""

    num_batches = 1
    examples = None
    batch_size = None
    batches = FetchedBatches()

    def __init__(self, batch: Any):
        def as_tensor(value: Any) -> Any:
            return value if value is None or tf.is_tensor(value) else tf.convert_to_tensor(value)

        def spec(value: Any) -> Any:
            return None if value is None else batch_parts.of_any_size(tf.type_spec_from_value(value))

        with tf.init_scope():
            self._batch = tree.map_structure(as_tensor, batch)
        self.spec = tree.map_structure(spec, self._batch)

    def start(self, epoch: int, first_batch: int) -> Any:
        return self._batch


class InOrder(keras.utils.PyDataset):
    """A `PyDataset` whose batches come in the order that (seed, epoch) determine, or unchanged without a seed.

    The hooks of `dataset`, which is the user's, are not called from here: this dataset begins and ends with a pass over
    the data, which may last several epochs.
    """

    def __init__(self, dataset: keras.utils.PyDataset, seed: int | None):
        super().__init__(
            workers=dataset.workers,
            use_multiprocessing=dataset.use_multiprocessing,
            max_queue_size=dataset.max_queue_size,
        )
        self.dataset = dataset
        self._seed = seed
        self._order: Callable[[int], int] = lambda batch: batch

    @property
    def without_hooks(self) -> bool:
        """Whether the user's dataset has no hooks, so that a batch depends on its number only."""
        kind = type(self.dataset)
        hooks = "on_epoch_begin", "on_epoch_end"
        return all(getattr(kind, name) is getattr(keras.utils.PyDataset, name) for name in hooks)

    def set_epoch(self, epoch: int) -> None:
        """Sets the order of the batches to that of `epoch`."""
        if self._seed is not None:
            self._order = order.epoch_order(self.dataset.num_batches, self._seed, epoch).__getitem__

    def __getitem__(self, batch: int) -> Any:
        return self.dataset[int(self._order(batch))]

    @property
    def num_batches(self) -> int | None:
        return self.dataset.num_batches
