"""A `tf.data.Dataset`, or what Keras makes one of: a `PyDataset`, a generator; as global batches."""

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
from tfdist.internals import keras_data, tensorflow_data
from tfdist.internals.keras import tree
from tfdist.jobs.job_environment import cores


def _on_present_cores(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """On one core tf.data's autotuning has nothing to divide, and makes a pipeline that decodes a fifth slower.

    With `num_parallel_calls=tf.data.AUTOTUNE` such a pipeline has then as many calls as cores. What the user has set
    stays (https://www.tensorflow.org/api_docs/python/tf/data/experimental/AutotuneOptions).
    """
    if cores() > 1 or dataset.options().autotune.enabled is not None:
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


class DatasetFeed(Feed):
    """Batches from a `tf.data.Dataset`, or from what Keras turns into one.

    Attributes:
        endless: a pass never ends.
    """

    def __init__(self, adapter: Any, in_order: InOrder | None = None):
        self._adapter = adapter
        self._in_order = in_order
        self._dataset = _on_present_cores(adapter.get_tf_dataset())
        self.examples = None
        self._iterator: Any = None  # of this pass, or of the one before
        self._untouched: Any = None  # made before the first pass, and stands at its begin
        self._rest: Any = None  # an iterator that `_untouched` goes on with
        self._made = 0  # iterators, of those in the run that is resumed too
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
        if first_batch and self._untouched is None:
            self._iterator = iter(self._dataset.skip(first_batch))
            self._made += 1
        else:
            self._iterator = self._new_iterator()
            for _ in range(first_batch):
                self._iterator.get_next_as_optional()
        return self._iterator

    def _new_iterator(self) -> Any:
        iterator, self._untouched = self._untouched, None
        return self._make_iterator() if iterator is None else iterator

    def _make_iterator(self) -> Any:
        self._made += 1
        return iter(self._dataset)

    def look_ahead(self, keep: bool) -> None:
        # As Keras does. A `shuffle` draws the seeds of its next order when an iterator is made, so that epochs without
        # `steps_per_epoch` have every second order.
        if self._in_order is None:
            iterator = self._make_iterator()
            self._untouched = iterator if keep else None

    def first(self, count: int) -> list[Any]:
        if self._in_order is not None:
            self._in_order.set_epoch(0)
            numbers = range(min(count, self.num_batches or count))
            return [keras_data.standardized(self._adapter, self._in_order[number]) for number in numbers]
        iterator, taken = self._make_iterator(), []
        try:
            state = tensorflow_data.iterator_state(iterator)
            taken = list(itertools.islice(iterator, count))
            tensorflow_data.iterator_state(iterator)  # what has not begun could always be set back
            tensorflow_data.restore_iterator(iterator, state)
        except tf.errors.OpError:
            iterator, self._rest = self._put_back(taken), iterator
        self._untouched = iterator
        return [tree.map_structure(batch_parts.none_if_empty, batch) for batch in taken]

    def _put_back(self, taken: list[Any]) -> Any:
        """An iterator over batches that were `taken` from one that cannot be set back, and then over its rest."""
        # TensorFlow keeps the function for good, and what it holds.
        batches = tf.data.Dataset.from_generator(lambda: itertools.chain(taken, self._rest), output_signature=self.spec)
        return iter(batches)

    def save(self) -> bytes | None:
        if self._in_order is not None:
            return b"" if self._in_order.always_alike else None
        try:
            state = b"" if self._iterator is None else tensorflow_data.iterator_state(self._iterator)
        except tf.errors.OpError:
            return None
        read = self._made - (self._untouched is not None)  # the one that is untouched is made again
        return read.to_bytes(8, "little") + state

    def resume(self, saved: bytes, epoch: int, first_batch: int) -> Any:
        if not saved:
            return self.start(epoch, first_batch)
        read, state = int.from_bytes(saved[:8], "little"), saved[8:]
        # A shuffle draws the seeds of its next order when an iterator is made; a restored one counts as the one before.
        for _ in range(read - 2 if first_batch else read):
            self._new_iterator()
        if not first_batch:
            return self.start(epoch, 0)
        iterator = self._new_iterator()
        try:
            tensorflow_data.restore_iterator(iterator, state)
        except tf.errors.OpError as error:
            raise CheckpointError(
                "The checkpoint was written within an epoch of other data: this dataset is made of other parts",
                "resume with the dataset of the run that wrote it, or from a checkpoint of an epoch's end",
            ) from error
        self._adapter.on_epoch_begin()
        self._iterator, self._made = iterator, read
        return iterator

    def finish(self) -> None:
        self._adapter.on_epoch_end()

    def reset(self) -> None:
        # Keras calls this hook once before the first epoch, and a dataset that shuffles in it begins shuffled.
        self.end_epoch()

    def begin_epoch(self) -> None:
        if self._in_order is not None:
            self._in_order.dataset.on_epoch_begin()

    def end_epoch(self) -> None:
        if self._in_order is not None:
            self._in_order.dataset.on_epoch_end()

    def release(self) -> None:
        self._iterator = self._untouched = self._rest = None

    @contextlib.contextmanager
    def naming_bad_examples(self, first_batch: int, batches: int) -> Iterator[None]:
        try:
            yield
        except tf.errors.InvalidArgumentError as error:
            if batch_parts.UNEQUAL_LENGTHS not in str(error):
                raise
            raise DataError(*batch_parts.unequal_lengths("several")) from error


@dataclass(frozen=True)
class DatasetBatches(Batches):
    """A batch is fetched from the iterator; each replica slices its part."""

    length_known: bool

    def fetch(self, state: Any, step: tf.Tensor) -> Any:
        del step
        return next(state) if self.length_known else state.get_next_as_optional()

    def part(self, state: Any, batch: Any, index: int, division: Division) -> tuple[Any, Any]:
        del state
        batch = tree.map_structure(batch_parts.none_if_empty, batch)
        if division.count == 1:
            return batch, 1.0
        with tf.device("CPU:0"):  # a replica's device then gets its part only
            flat = tree.flatten(batch)
            begin, end, share = batch_parts.bounds(batch_parts.common_length(flat), index, division)
            parts = [batch_parts.slice_examples(tensor, begin, end) for tensor in flat]
        return tree.pack_sequence_as(batch, parts), share

    def lengths_of_parts(self, state: Any, batch: Any, division: Division) -> list[Any]:
        del state
        flat = tree.flatten(tree.map_structure(batch_parts.none_if_empty, batch))
        return batch_parts.lengths_of_parts(flat, division)


class InOrder(keras.utils.PyDataset):
    """A `PyDataset` whose batches come in the order that (seed, epoch) gives, or as they are without a seed.

    Attributes:
        dataset: the user's, whose hooks are not called from here: this dataset begins and ends with a pass over the
            data, which may last several epochs.
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
    def always_alike(self) -> bool:
        """Whether nothing of the user's happens between two epochs: then a batch follows from its number."""
        kind = type(self.dataset)
        hooks = "on_epoch_begin", "on_epoch_end"
        return all(getattr(kind, name) is getattr(keras.utils.PyDataset, name) for name in hooks)

    def set_epoch(self, epoch: int) -> None:
        if self._seed is not None:
            self._order = order.epoch_order(self.dataset.num_batches, self._seed, epoch).__getitem__

    def __getitem__(self, batch: int) -> Any:
        return self.dataset[int(self._order(batch))]

    @property
    def num_batches(self) -> int | None:
        return self.dataset.num_batches
