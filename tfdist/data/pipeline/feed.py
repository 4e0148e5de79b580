"""What Keras' `fit`, `evaluate` and `predict` accept, as global batches that replicas take their parts of.

A feed is the host's side: it knows how many batches a pass over the data has, and starts passes. Its `batches` are the
graph's side: they fetch a global batch and cut one replica's part out of it. Arrays stay whole in memory and are
indexed, so that nothing but the order of the examples changes from pass to pass; all else arrives through a
`tf.data.Dataset`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import keras
import numpy as np
import tensorflow as tf

from tfdist.cluster.world import World, cores
from tfdist.data.pipeline import order
from tfdist.data.pipeline.processes import PerProcess
from tfdist.errors import CheckpointError, DataError, UsageError
from tfdist.internals import keras_data
from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.internals.keras import tree

NO_BATCHES = "The dataset has no batches", "pass at least one example"
ONLY_PARTS = (
    "Each process of the job reads its own part of the data, and to verify a model it needs whole global batches",
    "call `strategy.verify(model, x, y)` with a few batches that every process has",
)


@dataclass(frozen=True)
class Request:
    """The data arguments of one call of `fit`, `evaluate` or `predict`, as Keras defines them."""

    x: Any
    y: Any = None
    sample_weight: Any = None
    class_weight: Any = None
    batch_size: int | None = None
    steps: int | None = None
    shuffle: Any = False
    own: bool = False  # of this process; the others have theirs
    passes: bool = False  # each pass begins anew and has `steps` batches


def request(x: Any, y: Any = None, sample_weight: Any = None, **options: Any) -> Request:
    """The request for what the user passed as data.

    Raises:
        UsageError: `per_process` holds only some of it.
    """
    own = isinstance(x, PerProcess)
    rest = {name: value for name, value in (("y", y), ("sample_weight", sample_weight)) if value is not None}
    apart = rest if own else {name: value for name, value in rest.items() if isinstance(value, PerProcess)}
    if apart:
        raise UsageError(
            f"`{next(iter(apart))}` was passed beside `x`, and `per_process` takes all of a process' data at once",
            "pass `per_process((x, y))`, or `per_process((x, y, sample_weight))`",
        )
    if own:
        x, y, sample_weight = keras_data.unpack_x_y_sample_weight(x.data)
    return Request(x, y, sample_weight, **options, own=own)


def split(whole: Request, fraction: float) -> tuple[Request, Any]:
    """`whole` without its last `fraction`, and those data as `fit` takes them for validation."""
    arrays = whole.x, whole.y, whole.sample_weight
    (x, y, sample_weight), last = keras_data.train_validation_split(arrays, validation_split=fraction)
    return replace(whole, x=x, y=y, sample_weight=sample_weight), PerProcess(last) if whole.own else last


# The indices of the examples in the order in which pass number `epoch` takes them: int32 `[n]`.
Order = Callable[[int], np.ndarray]


def make(request: Request, seed: int) -> Feed:
    """The feed for what the user passed.

    Raises:
        DataError: there is not one batch in it.
        ValueError: Keras refuses the combination of arguments.
    """
    if isinstance(request.x, Feed):
        return request.x
    x, shuffle = request.x, request.shuffle
    if isinstance(x, keras.utils.PyDataset):
        x, shuffle = _InOrder(x, seed if shuffle and x.num_batches else None), False
    elif keras_data.is_tf_dataset(x):
        shuffle = False
    adapter = keras_data.get_data_adapter(
        x=x,
        y=request.y,
        sample_weight=request.sample_weight,
        batch_size=request.batch_size,
        steps_per_epoch=request.steps,
        shuffle=shuffle,
        class_weight=request.class_weight,
    )
    if request.passes and request.steps and isinstance(adapter, keras_data.GeneratorDataAdapter):
        adapter.generator = functools.partial(_one_more, adapter.generator, request.steps)
    if adapter.num_batches == 0:
        raise DataError(*NO_BATCHES)
    if isinstance(adapter, keras_data.ArrayDataAdapter):
        arrays = keras_data.sliceable(adapter)
        examples = keras_data.number_of_examples(arrays)
        return ArrayFeed(arrays, adapter.batch_size, _order(examples, adapter.batch_size, shuffle, seed))
    return DatasetFeed(adapter, x if isinstance(x, _InOrder) else None)


class Feed:
    """Global batches, pass after pass.

    Attributes:
        num_batches: batches in a pass, `None` when only the end of the data will tell.
        examples: examples in a pass, `None` when unknown.
        batch_size: examples in a full global batch, `None` when unknown.
        spec: the `tf.TensorSpec`s of a global batch.
        batches: the graph's side of the feed.
        own: other processes of the job have other data.
    """

    own: ClassVar[bool] = False
    num_batches: Any
    examples: Any
    batch_size: Any
    spec: Any
    batches: Any

    def start(self, epoch: int, first_batch: int) -> Any:
        """The state of pass number `epoch`, whose next batch is number `first_batch`."""
        raise NotImplementedError

    def finish(self) -> None:
        """Ends a pass."""

    def release(self) -> None:
        """Lets go of what passes have left open, when none is to follow."""

    def first(self, count: int) -> list[Any]:
        """Up to `count` global batches that the first pass begins with; that pass has them all the same."""
        state, count = self.start(0, 0), min(count, self.num_batches or count)
        return [self.batches.part(state, batch, 0, 1)[0] for batch in self.batches.take(state, 0, count)]

    def save(self) -> bytes | None:
        """What `resume` needs besides the place in the pass; `None` where that pass cannot be gone on with."""
        return b""

    def resume(self, saved: bytes, epoch: int, first_batch: int) -> Any:
        """As `start`, going on from where another process had `saved` its feed of the same data.

        Raises:
            CheckpointError: these are other data, and a pass has begun.
        """
        del saved
        return self.start(epoch, first_batch)

    def naming_bad_examples(self, first_batch: int, batches: int) -> contextlib.AbstractContextManager[Any]:
        """The context in which these batches are read: it names the example that cannot be used."""
        del first_batch, batches
        return contextlib.nullcontext()


class Batches:
    """How a graph gets at the batches of a feed; equal ones can share a graph.

    Attributes:
        length_known: every step that the loop asks for has a batch.
        own: the other processes of the job take no part in the steps.
    """

    length_known: bool
    own: ClassVar[bool] = False

    def fetch(self, state: Any, step: tf.Tensor) -> Any:
        """Global batch number `step` (int32 scalar) of the pass; an optional where `length_known` is false."""
        raise NotImplementedError

    def part(self, state: Any, batch: Any, index: int, count: int) -> tuple[Any, Any]:
        """Part `index` of `count` of a global batch, and its share, a float or a float64 scalar.

        Where there are fewer examples than parts, an empty part holds an example of another one, so that no model sees
        a batch without examples; its share is 0.
        """
        raise NotImplementedError

    def of_any_length(self) -> Batches:
        """The same, but that a graph does not know the lengths of parts, which then show where it uses them."""
        return self

    def take(self, state: Any, first: int, count: int) -> Iterator[Any]:
        """Up to `count` batches from number `first` on, fetched one by one outside of a graph."""
        for step in range(first, first + count):
            batch = self.fetch(state, tf.constant(step))
            if not self.length_known:
                if not batch.has_value():
                    return
                batch = batch.get_value()
            yield batch


def tensors(x: Any, y: Any, *, on_host: bool = False) -> Any:
    """x and y as `ArrayFeed` takes them; `on_host` puts them where tf.data works, not on the current device."""
    with tf.init_scope(), tf.device("CPU:0") if on_host else contextlib.nullcontext():
        if x is y:
            x = y = tf.convert_to_tensor(x)
        return keras_data.sliceable(keras_data.get_data_adapter(x=x, y=y))


def _one_more(generator: Callable[[], Iterator[Any]], steps: int) -> Iterator[Any]:
    """The batches of one pass over a generator, which loses one more, always.

    Keras begins each pass with the first batches again, which it keeps, and goes on where the generator stands. That
    depends on how many batches were prefetched, by the clock; one, mostly.
    """
    batches = generator()
    for number, batch in enumerate(itertools.islice(batches, steps), 1):
        if number == steps:
            next(batches, None)
        yield batch


def _order(examples: int, batch_size: int, shuffle: Any, seed: int) -> Order:
    """The order that Keras' argument `shuffle` asks for."""
    if shuffle == "batch":
        return lambda epoch: order.order_within_batches(examples, batch_size, seed, epoch)
    if shuffle:
        return lambda epoch: order.epoch_order(examples, seed, epoch)
    return lambda epoch: order.as_stored(examples)


class Transform(Protocol):
    """What is done to the examples of a batch once they are gathered; equal ones can share a graph."""

    def extras(self, epoch: int, indices: np.ndarray) -> tuple[np.ndarray, ...]:
        """What it must know of each example of a pass, in the pass' order: arrays `[n, ...]`."""

    def __call__(self, data: Any, *extras: tf.Tensor) -> Any:
        """The examples `data`, as Keras' (x, y), transformed; in the graph. `extras` are theirs: `[b, ...]`."""


class ArrayFeed(Feed):
    """Examples in memory, in an order that each pass may have of its own.

    Args:
        arrays: a structure of tensors, as `keras_data.sliceable` gives it; also an attribute.
        batch_size: examples in a full global batch.
        order_of: the order of each pass; all passes take equally many examples.
        transform: what is done to a batch, if anything.
    """

    def __init__(self, arrays: Any, batch_size: int, order_of: Order, transform: Transform | None = None):
        self.arrays = arrays
        self._order_of = order_of
        self._transform = transform
        self._datasets: dict[tuple[int, int, bool], Callable[..., tf.data.Dataset]] = {}
        self.examples = len(order_of(0))
        self.batch_size = batch_size
        self.num_batches = -(-self.examples // batch_size)
        self.spec = keras_data.batch_spec(arrays)
        self.batches = ArrayBatches(batch_size, self.examples % batch_size == 0, transform)

    def start(self, epoch: int, first_batch: int) -> Any:
        del first_batch  # any batch can be fetched at any time
        indices = self._order_of(epoch)
        extras = () if self._transform is None else self._transform.extras(epoch, indices)
        return self.arrays, tuple(tf.constant(of_each) for of_each in (indices, *extras))

    def datasets(self, index: int, count: int, deterministic: bool) -> Callable[..., tf.data.Dataset]:
        """A graph, kept for all epochs: `datasets(first_batch, *positions)` is a pass of part `index` of `count`."""
        asked = (index, count, deterministic)
        if asked not in self._datasets:
            self._datasets[asked] = self._make_datasets(index, count, deterministic)
        return self._datasets[asked]

    def _make_datasets(self, index: int, count: int, deterministic: bool) -> Callable[..., tf.data.Dataset]:
        @tf.function(autograph=False)
        def dataset(first_batch: tf.Tensor, *positions: tf.Tensor) -> tf.data.Dataset:
            @tf.autograph.experimental.do_not_convert
            def gather(step: tf.Tensor) -> Any:
                state = self.arrays, positions
                return self.batches.examples(state, self.batches.fetch(state, step), index, count)

            steps = tf.data.Dataset.range(first_batch, self.num_batches, output_type=tf.int32)
            batches = steps.map(gather, num_parallel_calls=tf.data.AUTOTUNE, deterministic=deterministic)
            return batches.prefetch(tf.data.AUTOTUNE)

        return dataset


@dataclass(frozen=True)
class ArrayBatches(Batches):
    """A batch is fetched as the indices of its examples, and what is known of each; each replica gathers its own."""

    batch_size: int
    even: bool  # the batches are all of one size: a static shape makes a faster graph
    transform: Transform | None = None
    length_known: bool = True
    length_is_known: bool = True  # in the graph, where the batches are even

    def of_any_length(self) -> ArrayBatches:
        return replace(self, length_is_known=False)

    def fetch(self, state: Any, step: tf.Tensor) -> tuple[tf.Tensor, ...]:
        _, positions = state
        return tuple(self._rows(of_each, step * self.batch_size) for of_each in positions)

    def _rows(self, of_each: tf.Tensor, begin: tf.Tensor) -> tf.Tensor:
        if not (self.even and self.length_is_known):
            return of_each[begin : begin + self.batch_size]
        rest = of_each.shape[1:]
        return tf.slice(of_each, [begin, *[0] * len(rest)], [self.batch_size, *rest])

    def part(self, state: Any, batch: tuple[tf.Tensor, ...], index: int, count: int) -> tuple[Any, Any]:
        begin, end, share = _bounds(self.batch_size if self.even else length(batch[0]), index, count)
        return self._gathered(state, [of_each[begin:end] for of_each in batch] if count > 1 else batch), share

    def examples(self, state: Any, batch: tuple[tf.Tensor, ...], index: int, count: int) -> Any:
        """The examples of part `index` of `count` of a global batch, of which there may be none."""
        begin, end = order.part(length(batch[0]), index, count)
        return self._gathered(state, [of_each[begin:end] for of_each in batch])

    def _gathered(self, state: Any, positions: Sequence[tf.Tensor]) -> Any:
        arrays, _ = state
        data = keras_data.gather(arrays, positions[0])
        return data if self.transform is None else self.transform(data, *positions[1:])


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

    def __init__(self, adapter: Any, in_order: _InOrder | None = None):
        self._adapter = adapter
        self._in_order = in_order
        self._dataset = _on_present_cores(adapter.get_tf_dataset())
        self.examples = None
        self._iterator: Any = None  # of this pass, or of the one before
        self._untouched: Any = None  # made before the first pass, and stands at its begin
        self._rest: Any = None  # an iterator that `_untouched` goes on with
        self._begun = 0  # passes, of those in the run that is resumed too
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
        self._begun += 1
        self._adapter.on_epoch_begin()
        if first_batch and self._untouched is None:
            self._iterator = iter(self._dataset.skip(first_batch))
        else:
            self._iterator = self._new_iterator()
            for _ in range(first_batch):
                self._iterator.get_next_as_optional()
        return self._iterator

    def _new_iterator(self) -> Any:
        iterator, self._untouched = self._untouched, None
        return iter(self._dataset) if iterator is None else iterator

    def first(self, count: int) -> list[Any]:
        if self._in_order is not None:
            self._in_order.set_epoch(0)
            numbers = range(min(count, self.num_batches or count))
            return [keras_data.standardized(self._adapter, self._in_order[number]) for number in numbers]
        iterator, taken = iter(self._dataset), []
        try:
            state = tensorflow_internals.iterator_state(iterator)
            taken = list(itertools.islice(iterator, count))
            tensorflow_internals.iterator_state(iterator)  # what has not begun could always be set back
            tensorflow_internals.restore_iterator(iterator, state)
        except tf.errors.OpError:
            iterator, self._rest = self._put_back(taken), iterator
        self._untouched = iterator
        return [tree.map_structure(none_if_empty, batch) for batch in taken]

    def _put_back(self, taken: list[Any]) -> Any:
        """An iterator over batches that were `taken` from one that cannot be set back, and then over its rest."""
        # TensorFlow keeps the function for good, and what it holds.
        batches = tf.data.Dataset.from_generator(lambda: itertools.chain(taken, self._rest), output_signature=self.spec)
        return iter(batches)

    def save(self) -> bytes | None:
        if self._in_order is not None:
            return b"" if self._in_order.always_alike else None
        try:
            state = b"" if self._iterator is None else tensorflow_internals.iterator_state(self._iterator)
        except tf.errors.OpError:
            return None
        return self._begun.to_bytes(8, "little") + state

    def resume(self, saved: bytes, epoch: int, first_batch: int) -> Any:
        if not saved:
            return self.start(epoch, first_batch)
        self._begun, state = int.from_bytes(saved[:8], "little"), saved[8:]
        # A shuffle draws the seeds of its next order when an iterator is made; a restored one counts as the one before.
        for _ in range(self._begun - 2 if first_batch else self._begun):
            self._new_iterator()
        if not first_batch:
            return self.start(epoch, 0)
        iterator = self._new_iterator()
        try:
            tensorflow_internals.restore_iterator(iterator, state)
        except tf.errors.OpError as error:
            raise CheckpointError(
                "The checkpoint was written within an epoch of other data: this dataset is made of other parts",
                "resume with the dataset of the run that wrote it, or from a checkpoint of an epoch's end",
            ) from error
        self._adapter.on_epoch_begin()
        self._iterator = iterator
        return iterator

    def finish(self) -> None:
        self._adapter.on_epoch_end()

    def release(self) -> None:
        self._iterator = self._untouched = self._rest = None

    @contextlib.contextmanager
    def naming_bad_examples(self, first_batch: int, batches: int) -> Iterator[None]:
        try:
            yield
        except tf.errors.InvalidArgumentError as error:
            if UNEQUAL_LENGTHS not in str(error):
                raise
            raise DataError(*_unequal_lengths("several")) from error


@dataclass(frozen=True)
class DatasetBatches(Batches):
    """A batch is fetched from the iterator; each replica slices its part."""

    length_known: bool
    length_is_known: bool = field(default=True, kw_only=True)

    def of_any_length(self) -> DatasetBatches:
        return replace(self, length_is_known=False)

    def fetch(self, state: Any, step: tf.Tensor) -> Any:
        del step
        return next(state) if self.length_known else state.get_next_as_optional()

    def part(self, state: Any, batch: Any, index: int, count: int) -> tuple[Any, Any]:
        del state
        batch = tree.map_structure(none_if_empty, batch)
        if count == 1:
            return batch, 1.0
        with tf.device("CPU:0"):  # a replica's device then gets its part only
            flat = tree.flatten(batch)
            begin, end, share = _bounds(_common_length(flat), index, count)
            parts = [_slice(tensor, begin, end) if _has_examples(tensor) else tensor for tensor in flat]
            if not self.length_is_known:
                parts = [_of_any_length(part) for part in parts]
        return tree.pack_sequence_as(batch, parts), share


class FileFeed(Feed):
    """Batches that are decoded from files, a pipeline a pass.

    Args:
        pipeline: `pipeline(epoch, first_batch)`: this rank's parts of the global batches of a pass.
        problem: `problem(epoch, first_batch, batches)`: what is wrong with the files of these batches, if anything.
        examples: examples in a pass.
        batch_size: examples in a full global batch.
        world: this process' place.
    """

    def __init__(
        self,
        pipeline: Callable[[int, int], tf.data.Dataset],
        problem: Callable[[int, int, int], DataError | None],
        examples: int,
        batch_size: int,
        world: World,
    ):
        self._pipeline = pipeline
        self._problem = problem
        self._epoch = 0
        self.examples = examples
        self.batch_size = batch_size
        self.num_batches = -(-examples // batch_size)
        of_any_size = functools.partial(tree.map_structure, lambda s: tf.TensorSpec([None, *s.shape[1:]], s.dtype))
        self.spec = of_any_size(pipeline(0, 0).element_spec)
        alone = world.world_size == 1
        self.batches: Any = (
            DatasetBatches(length_known=True)
            if alone
            else RankBatches(True, world.rank, world.world_size, examples, batch_size)
        )

    def start(self, epoch: int, first_batch: int) -> Any:
        self._epoch = epoch
        return iter(self._pipeline(epoch, first_batch))

    def first(self, count: int) -> list[Any]:
        if isinstance(self.batches, RankBatches):
            raise UsageError(*ONLY_PARTS)
        return super().first(count)

    @contextlib.contextmanager
    def naming_bad_examples(self, first_batch: int, batches: int) -> Iterator[None]:
        try:
            yield
        except (tf.errors.InvalidArgumentError, tf.errors.NotFoundError, tf.errors.DataLossError) as error:
            problem = self._problem(self._epoch, first_batch, batches)
            if problem is None:
                raise
            raise problem from error


@dataclass(frozen=True)
class RankBatches(DatasetBatches):
    """The iterator has only what the replicas of this rank take of a global batch."""

    rank: int
    world_size: int
    examples: int
    batch_size: int

    def fetch(self, state: Any, step: tf.Tensor) -> Any:
        size = tf.minimum(self.batch_size, self.examples - step * self.batch_size)
        return next(state), size

    def part(self, state: Any, batch: Any, index: int, count: int) -> tuple[Any, Any]:
        del state
        mine, size = batch
        of_rank, _ = order.part(size, self.rank, self.world_size)
        begin, end = order.part(size, index, count)
        part = tree.map_structure(lambda tensor: at_least_one(tensor[begin - of_rank : end - of_rank]), mine)
        return part, (end - begin) / size


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


def none_if_empty(value: Any) -> Any:
    """Keras' generators carry an absent target or weight as an empty optional."""
    return None if isinstance(value, tf.experimental.Optional) else value


def _of_any_length(tensor: Any) -> Any:
    if not isinstance(tensor, tf.Tensor) or tensor.shape.rank in (None, 0) or tf.executing_eagerly():
        return tensor
    return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=[None, *tensor.shape[1:]])


def at_least_one(value: Any) -> Any:
    """`value`, or an example of zeros where it has none, and those of other processes are not here."""
    if not _has_examples(value) or (isinstance(value, tf.Tensor) and value.shape[0]):
        return value
    missing = tf.maximum(0, 1 - length(value))
    if isinstance(value, tf.SparseTensor):
        shape = tf.concat([value.dense_shape[:1] + tf.cast(missing, tf.int64), value.dense_shape[1:]], 0)
        return tf.SparseTensor(value.indices, value.values, shape)
    if isinstance(value, tf.RaggedTensor):
        splits = value.row_splits
        more = tf.fill([missing], splits[-1])
        return tf.RaggedTensor.from_row_splits(value.values, tf.concat([splits, more], 0), validate=False)
    zeros = tf.zeros([missing, *[size or 1 for size in value.shape[1:]]], value.dtype)
    return tf.concat([value, zeros], 0)


def _has_examples(value: Any) -> bool:
    """Whether a part of a batch has an axis of examples; a number beside them belongs to each replica."""
    return value is not None and value.shape.rank != 0


def _common_length(values: Sequence[Any]) -> Any:
    """How many examples a batch has: an integer, or an int32 scalar.

    Raises:
        DataError: its tensors differ in their first axes. In a graph that is only found when it runs.
    """
    lengths = [length(value) for value in values if _has_examples(value)]
    if not lengths:
        raise DataError(
            "The batches hold nothing but scalars, which cannot be divided among replicas", "batch the data"
        )
    known = [one for one in lengths if isinstance(one, int)]
    if len(set(known)) > 1:
        raise DataError(*_unequal_lengths(", ".join(map(str, known))))
    checks = [
        tf.debugging.assert_equal(one, lengths[0], _unequal_lengths("several")[0], summarize=1)
        for one in lengths[1:]
        if not isinstance(one, int) or not known
    ]
    with tf.control_dependencies([check for check in checks if check is not None]):
        return known[0] if known else tf.identity(lengths[0])


def _unequal_lengths(found: str) -> tuple[str, str]:
    return (
        f"{UNEQUAL_LENGTHS}: found {found} in one batch",
        "give each tensor of a batch one row per example, or train on one device",
    )


UNEQUAL_LENGTHS = "The tensors of a batch have different lengths, so that it cannot be divided among replicas"


def _bounds(examples: Any, index: int, count: int) -> tuple[Any, Any, Any]:
    """Where part `index` of `count` of so many examples begins and ends, and its share.

    A part without examples has the share 0, and is where another one is.
    """
    if count == 1:
        return 0, examples, 1.0
    begin, end = order.part(examples, index, count)
    if isinstance(examples, int):
        share = (end - begin) / examples if examples else 0.0
        first = min(begin, max(examples - 1, 0))
        return first, max(end, first + 1), share
    share = tf.math.divide_no_nan(tf.cast(end - begin, tf.float64), tf.cast(examples, tf.float64))
    first = tf.minimum(begin, tf.maximum(examples - 1, 0))
    return first, tf.maximum(end, first + 1), share


def length(tensor: Any) -> Any:
    """How many examples `tensor` has: an integer, or an int32 scalar."""
    if isinstance(tensor, tf.SparseTensor):
        return tf.cast(tensor.dense_shape[0], tf.int32)
    if isinstance(tensor, tf.RaggedTensor):
        return tf.cast(tensor.nrows(), tf.int32)
    return tf.shape(tensor)[0] if tensor.shape[0] is None else tensor.shape[0]


def _slice(tensor: Any, begin: Any, end: Any) -> Any:
    if not isinstance(tensor, tf.SparseTensor):
        return tensor[begin:end]
    rest = tf.zeros_like(tensor.dense_shape[1:])
    start = tf.concat([[tf.cast(begin, tf.int64)], rest], 0)
    size = tf.concat([[tf.cast(end - begin, tf.int64)], tensor.dense_shape[1:]], 0)
    return tf.sparse.slice(tensor, start, size)


class _InOrder(keras.utils.PyDataset):
    """A `PyDataset` whose batches come in the order that (seed, epoch) gives, or as they are without a seed."""

    def __init__(self, dataset: keras.utils.PyDataset, seed: int | None):
        super().__init__(
            workers=dataset.workers,
            use_multiprocessing=dataset.use_multiprocessing,
            max_queue_size=dataset.max_queue_size,
        )
        self._dataset = dataset
        self._seed = seed
        self._order: Callable[[int], int] = lambda batch: batch

    @property
    def always_alike(self) -> bool:
        """Whether nothing of the user's happens between two epochs: then a batch follows from its number."""
        kind = type(self._dataset)
        hooks = "on_epoch_begin", "on_epoch_end"
        return all(getattr(kind, name) is getattr(keras.utils.PyDataset, name) for name in hooks)

    def set_epoch(self, epoch: int) -> None:
        if self._seed is not None:
            self._order = order.epoch_order(self._dataset.num_batches, self._seed, epoch).__getitem__

    def __getitem__(self, batch: int) -> Any:
        return self._dataset[int(self._order(batch))]

    @property
    def num_batches(self) -> int | None:
        return self._dataset.num_batches

    def on_epoch_begin(self) -> None:
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._dataset.on_epoch_end()
