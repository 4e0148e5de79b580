"""A dataset that can be read: its spec, its arrays, and its batches for the loop and for `tf.data`.

A `Source` keeps its examples in memory; an `IndexedSource` reads them by number, batch by batch, for datasets that do
not fit into memory. Its `Origin`, which has names and numbers but no data, describes it to another process: the workers
of a `parameter_server` job, which run no program of the user's, read their data with it.

Synopsis:

    >>> x = np.linspace(0, 1, 12, dtype=np.float32).reshape(6, 2)
    >>> source = Source.from_arrays("mine", classes=2, train=(x, np.array([0, 1, 0, 1, 0, 1])))
    >>> source.spec.examples
    {'train': 6, 'validation': 0, 'test': 0}
    >>> source.limit(4).arrays("train")[1]
    array([0, 1, 0, 1], dtype=int32)
    >>> indexed = IndexedSource(source.spec, lambda split, indices: (x[indices], indices % 2))
    >>> indexed.limit(3).arrays("train")[1]
    array([0, 1, 0], dtype=int32)
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from tfdist import registry
from tfdist.data.input import augmentation as augmentations
from tfdist.data.input import masking, order, padding
from tfdist.data.input.arrays import (
    Arrays,
    ToModelTypes,
    Transform,
    cast,
    checked,
    head,
    inputs,
    main_input,
    map_inputs,
    map_x,
    sentence_lengths,
    target_type,
)
from tfdist.data.input.division import Division
from tfdist.data.spec import OF_TEXTS, SPLITS, DataSpec
from tfdist.errors import DataError, UnknownNameError, UsageError
from tfdist.jobs.world import World
from tfdist.options import Count, check_value

if TYPE_CHECKING:
    import tensorflow as tf

    from tfdist.data.input.array_feed import ArrayFeed
    from tfdist.data.input.augmentation import Augmentation
    from tfdist.data.input.feed import Feed
    from tfdist.data.input.file_feed import LargeExamples


# The first `count` examples of a split, in stored order.
Read = Callable[[str, int], Arrays]
# x and y of the examples of a split with these numbers, integers `[n]`.
ReadAt = Callable[[str, np.ndarray], Arrays]

ALONE = World()


class Source:
    """A dataset of examples `x` with targets `y`. Once read, it stays in memory in the type that was read.

    Attributes:
        spec: the dataset's spec, which is known before any example is read.
        origin: how another process can load it; `None` if it was not made by `tfdist.data.load`.
        skipped: the bad examples that were left out, one sentence each.
        bucketed: whether the batches of sentences have different widths.
        divisor: a model sees the values of x divided by it.
        has_bytes: whether an example that was read has bytes (uint8) above 1, such as pixels that were not scaled.
    """

    def __init__(
        self, spec: DataSpec, read: Read, *, divisor: int = 1, bucketed: bool = False, skipped: Sequence[str] = ()
    ):
        """Makes a source of `spec.examples[split]` examples per split.

        Args:
            spec: the facts about the dataset.
            read: `read(split, count)` returns the first `count` examples as `tfdist.data.spec` describes them, but not
                yet divided by `divisor`, and numbers may be of any type. It is called once per split.
            divisor: a model sees x divided by it, in float32: 255 for pixels that are read as bytes.
            bucketed: whether training batches have sentences of similar lengths, and all batches are trimmed to their
                longest sentence.
            skipped: the bad examples that were left out, one sentence each.

        Raises:
            UsageError: `spec` is no `DataSpec`.
        """
        if not isinstance(spec, DataSpec):
            raise UsageError(
                f"`spec` of a source is `{spec!r:.80}`, of type `{type(spec).__name__}`",
                "make a `tfdist.data.DataSpec`",
            )
        self.spec = spec
        self.skipped = tuple(skipped)
        self.has_bytes = False
        self.origin: Origin | None = None
        self._read = read
        self.divisor = divisor
        self.bucketed = bucketed
        self._stored: dict[str, StoredArrays] = {}
        self._pipelines: dict[FeedArguments, ArrayFeed | LargeExamples] = {}

    def __repr__(self) -> str:
        counts = ", ".join(f"{count} {split}" for split, count in self.spec.examples.items() if count)
        classes = f"; {self.spec.classes} classes" if self.spec.classes else ""
        return (
            f"<tfdist data `{self.spec.name}` for {self.spec.task}: {counts} examples of shape "
            f"{self.spec.input_shape}{classes}>"
        )

    @classmethod
    def from_arrays(
        cls,
        name: str,
        *,
        classes: int,
        train: Arrays,
        validation: Arrays | None = None,
        test: Arrays | None = None,
        task: str = "classification",
        divisor: int = 1,
        bucketed: bool = False,
        skipped: Sequence[str] = (),
        **facts: Any,
    ) -> Source:
        """Makes a source of arrays.

        Args:
            name: the dataset's name, for messages and the record of a run.
            classes: the number of classes; labels are 0 to `classes - 1`.
            train: x and y, as `tfdist.data.spec` describes them; for classification x `[N, ...]`, numbers scaled as
                the model shall see them, and y `[N]`, integers.
            validation: the same, or None.
            test: the same, or None.
            task: one of `tfdist.data.spec.TASKS`.
            divisor: see `Source`.
            bucketed: see `Source`.
            skipped: see `Source`.
            **facts: further fields of the `DataSpec`, such as `class_names`.

        Raises:
            UsageError: a split is not a pair of x and y of the same length, or a fact is unknown or cannot be true.
        """
        owner = f"The dataset `{name}`"
        classes, divisor = check_value(int, classes, "classes", owner), check_value(Count, divisor, "divisor", owner)
        of_arrays = ("name", "task", "input_shape", "classes", "examples")
        known = [field.name for field in dataclasses.fields(DataSpec) if field.name not in of_arrays]
        if unknown := [fact for fact in facts if fact not in known]:
            raise registry.unknown_option("dataset", name, unknown[0], known)
        by_split = {"train": train, "validation": validation, "test": test}
        for split, pair in by_split.items():
            if pair is not None:
                _require_pair(name, split, pair)
        splits = {split: (map_x(np.asarray, pair[0]), np.asarray(pair[1])) for split, pair in by_split.items() if pair}
        counts = {split: len(main_input(x)) for split, (x, _) in splits.items()}
        x, y = splits["train"]
        spec = DataSpec(name, task, main_input(x).shape[1:], classes, counts, **{"target_shape": y.shape[1:]} | facts)

        options: Any = {"divisor": divisor, "bucketed": bucketed, "skipped": skipped}
        return cls(spec, lambda split, count: head(splits[split], count), **options)

    def arrays(self, split: str) -> Arrays:
        """All examples of "train", "validation" or "test", read once and then kept; do not write into them.

        Returns:
            x and y as `tfdist.data.spec` describes them: for pictures x is float32 `[N, *spec.input_shape]` in
            [0, 1], for labels y is int32 `[N]`; all C-contiguous, in stored order. Examples that are stored in another
            type are cast.

        Raises:
            UnknownNameError: no such split.
            DataError: the split has no examples, or they do not fit the spec.
        """
        return self._examples(split).for_model()

    def _examples(self, split: str) -> StoredArrays:
        """All examples of a split, read once and then kept."""
        self._check_split(split)
        if split not in self._stored:
            x, y = self._read(split, self.spec.examples[split])
            self._stored[split] = StoredArrays(self.spec, checked(self.spec, split, x, y), self.divisor)
            bytes_read = self.divisor == 1 and getattr(x, "dtype", None) == np.uint8
            self.has_bytes |= bytes_read and bool(np.max(x, initial=0) > 1)
        return self._stored[split]

    def tokens_per_example(self, split: str) -> float | None:
        """The mean number of tokens, without padding, of an example of a text, or of its target for translation.

        `None` for other examples, and for those that are read by number.
        """
        if self.spec.task == "characters":
            return float(self.spec.input_shape[0])
        if self.spec.task not in OF_TEXTS or not self.spec.vocabulary_size or self._by_range(split):
            return None
        x, _ = self._examples(split).arrays
        return float(padding.lengths(x["target"] if isinstance(x, dict) else x).mean())

    def limit(self, examples: int) -> Self:
        """The same dataset with only the first `examples` training examples; others are not read.

        Raises:
            UsageError: fewer than one, or more than there are.
        """
        available = self.spec.examples["train"]
        if not 1 <= examples <= available:
            raise UsageError(
                f"The limit is `{examples}` training examples, dataset `{self.spec.name}` has {available}",
                f"use `--limit` with a number from 1 to {available}",
            )
        limited = self._with_spec(examples={**self.spec.examples, "train": examples})
        limited.origin = self._origin_with(limit=examples)
        return limited

    def for_autoencoding(self) -> Self:
        """The same pictures, each its own target.

        Raises:
            UsageError: the examples are not pictures.
        """
        return self.for_task("autoencoding")

    def for_task(self, task: str) -> Self:
        """The same examples for a task of `tfdist.data.spec.DERIVED`; each picture is its own target.

        Raises:
            UsageError: the examples are not pictures, or for `masked_lm` not texts.
        """
        if task == "masked_lm":
            return self.for_masked_lm()
        if self.spec.task == task:
            return self
        if len(self.spec.input_shape) != 3:
            raise UsageError(
                f"An example of `{self.spec.name}` has the shape `{self.spec.input_shape}`, and is not a picture",
                f"use a dataset of pictures for {task}",
            )
        source = self._with_spec(
            task=task,
            target_shape=self.spec.input_shape,
            classes=0,
            class_names=(),
            ignored_class=None,
        )
        read = self._read

        def with_itself(split: str, count: int) -> Arrays:
            x, _ = read(split, count)
            return x, x

        source._read = with_itself
        source.origin = self._origin_with(task=task)
        return source

    def for_masked_lm(self) -> Self:
        """The same texts, of which the feeds mask words that a model predicts; see `tfdist.data.input.masking`.

        Raises:
            UsageError: the examples are not texts, or the batches have different widths.
        """
        if self.spec.task == "masked_lm":
            return self
        changes, shift = masking.facts(self.spec)
        if self.bucketed:
            raise UsageError(
                f"The batches of `{self.spec.name}` have different widths, in which no words are masked",
                "load the dataset without `buckets`",
            )
        source = self._with_spec(**changes)
        source._read = lambda split, count: masking.texts_alone(self._read(split, count), shift)
        source.origin = self._origin_with(task="masked_lm")
        return source

    def cached(self) -> Source:
        """The same dataset, whose examples are read once and then kept in memory."""
        return self

    def feed(
        self,
        split: str,
        global_batch_size: int,
        *,
        world: World = ALONE,
        seed: int = 0,
        shuffle: bool | None = None,
        augment: str = "none",
        stream_positions: bool = False,
    ) -> Feed:
        """A split as `strategy.fit(model, feed)`, `evaluate` and `predict` take it: the global batches of all epochs.

        Args:
            split: "train", "validation" or "test".
            global_batch_size: the number of examples per step over all ranks.
            world: this process's place in the job; examples that are in files, or too many for an order that is drawn
                as a whole, are read by the rank that needs them.
            seed: with the epoch, determines order and augmentation.
            shuffle: whether to shuffle; None shuffles only "train", and reads characters as streams, of any split.
            augment: one of `tfdist.data.input.augmentation.NAMES`.
            stream_positions: for characters, makes x a dict of "tokens" `[b, steps]`, "stream" `[b]`, the example's row
                in its batch, and "position" `[b]`, the number of examples before it in that stream: for models that
                keep a state.

        Raises:
            UsageError: a batch size below 1, or an augmentation that the examples cannot have.
            UnknownNameError, DataError: see `arrays`.
        """
        arguments = FeedArguments(split, global_batch_size, seed, shuffle, augment, stream_positions)
        feed = self._feed(arguments, world)
        if self.origin is not None:
            feed.origin = FeedOrigin(self.origin, arguments)
        return feed

    def _feed(self, arguments: FeedArguments, world: World) -> Feed:
        if self._by_range(arguments.split):
            return self.pipelines(arguments).feed(world)
        from tfdist.data.input.array_feed import ArrayFeed

        return ArrayFeed(*self._parts_of_feed(arguments))

    def repeated_feed(self, split: str, global_batch_size: int, **options: Any) -> Feed:
        """Passes of the same length as those of `feed`, in which every batch has the examples of its first batch.

        This input costs nothing, and so measures what the dataset's own input costs. Each process reads one global
        batch.

        Args:
            split: "train", "validation" or "test".
            global_batch_size: the number of examples per step over all ranks.
            **options: the other arguments of `feed`, except `world`.

        Raises:
            UsageError: the batches have different widths, so that one batch cannot replace the others.
        """
        if self.bucketed:
            raise UsageError(
                f"The batches of `{self.spec.name}` have different widths, but a batch that is repeated has only one",
                "load the dataset without `buckets`",
            )
        from tfdist.data.input import array_feed

        return array_feed.repeated(self.feed(split, global_batch_size, **options))

    def pipeline(
        self,
        split: str,
        global_batch_size: int,
        *,
        world: World = ALONE,
        seed: int = 0,
        epoch: int = 0,
        first_batch: int = 0,
        shuffle: bool | None = None,
        augment: str = "none",
        threads: int | None = None,
        deterministic: bool = True,
        by_file: bool = False,
    ) -> tf.data.Dataset:
        """One epoch of a split, as this rank's part of each global batch.

        Joined in the order of the ranks, the parts of batch k are the same global batch for any number of
        ranks; each example comes once. The last batch has the remaining examples. Every rank gets the same number of
        batches, so a part is empty if a batch has fewer examples than there are ranks.

        Args:
            split: "train", "validation" or "test".
            global_batch_size: the number of examples per step over all ranks.
            world: this process's place in the job; alone by default.
            seed: with `epoch`, determines order and augmentation.
            epoch: the number of the epoch, from 0.
            first_batch: the batch to begin with; earlier batches are not read.
            shuffle: whether to shuffle; None shuffles only "train", and reads characters as streams, of any split.
            augment: one of `tfdist.data.input.augmentation.NAMES`.
            threads: the size of a private thread pool; None shares TensorFlow's.
            deterministic: False lets a batch that is ready earlier come earlier.
            by_file: assigns whole files to each rank, for disks from which several ranks should not read the same
                files. Each example still comes once, but which examples share a global batch depends on the number of
                ranks.

        Returns:
            A `tf.data.Dataset` of (x, y), on the CPU; for pictures float32 `[b, *spec.input_shape]` and int32 `[b]`.

        Raises:
            UsageError: a batch size below 1, an augmentation that the examples cannot have, or `by_file` for examples
                that are not in files.
            UnknownNameError, DataError: see `arrays`.
        """
        from tfdist.data.input import file_feed

        feed = FeedArguments(split, global_batch_size, seed, shuffle, augment)
        arguments = PipelineArguments(feed, world, deterministic, by_file, epoch, first_batch)
        return file_feed.with_options(self._batches(arguments), threads, deterministic)

    def _batches(self, arguments: PipelineArguments) -> tf.data.Dataset:
        if arguments.by_file:
            raise UsageError(
                f"The examples of `{self.spec.name}` are in no files, which `by_file` assigns to ranks",
                "leave `by_file` out",
            )
        pipelines, division = self.pipelines(arguments.feed), Division.among_processes(arguments.world)
        return pipelines.dataset(
            arguments.world.rank, division, arguments.epoch, arguments.first_batch, arguments.deterministic
        )

    def pipelines(self, arguments: FeedArguments) -> Any:
        """The `ArrayFeed` or `LargeExamples` whose method `dataset` makes the pipelines of all epochs; made once."""
        if arguments not in self._pipelines:
            from tfdist.data.input.array_feed import ArrayFeed
            from tfdist.data.input.file_feed import LargeExamples

            kind = LargeExamples if self._by_range(arguments.split) else ArrayFeed
            self._pipelines[arguments] = kind(*self._parts_of_feed(arguments))
        return self._pipelines[arguments]

    def _by_range(self, split: str) -> bool:
        """Whether a split has so many examples that its order is computed by range, and is never one tensor."""
        self._check_split(split)
        return order.is_computed(self.spec.examples[split])

    def augmentation(self, augment: str) -> Augmentation | None:
        """The augmentation with that name, `None` for "none".

        Raises:
            UnknownNameError: there is no such augmentation.
            UsageError: the examples are not pictures.
        """
        augmentation = augmentations.parse(augment)
        if augmentation is not None and len(self.spec.input_shape) != 3:
            raise UsageError(
                f"The augmentation `{augmentation.name}` needs pictures, but an example of `{self.spec.name}` has the "
                f"shape `{self.spec.input_shape}`",
                "leave `--augment` out",
            )
        return augmentation

    def _parts_of_feed(self, arguments: FeedArguments) -> tuple[Any, int, order.OrderOf, ToModelTypes | None]:
        """The arguments of `ArrayFeed` and `LargeExamples`: examples, batch size, order and transform."""
        from tfdist.data.input.array_feed import tensors

        augmented, batch_size = self._augmented(arguments), arguments.global_batch_size
        order_of = self._order_of(arguments)
        stored = self._examples(arguments.split)
        then = self._trimmed(stored.arrays[0], batch_size) if self.bucketed else augmented
        transform = ToModelTypes(self.spec, self.divisor, then)
        if arguments.stream_positions:
            stream, position = order.stream_positions(len(stored.arrays[1]), batch_size)
            x = {"tokens": stored.arrays[0], "stream": stream, "position": position}
            return tensors(x, stored.arrays[1]), batch_size, order_of, transform
        return stored.tensors, batch_size, order_of, transform

    def _order_of(self, arguments: FeedArguments) -> order.OrderOf:
        """The order of each epoch, after a check of the arguments."""
        split, batch_size, shuffle = arguments.split, arguments.global_batch_size, arguments.shuffle
        self._check_split(split)
        examples = self.spec.examples[split]
        if batch_size < 1:
            raise UsageError(f"The global batch size is `{batch_size}`", "use 1 or more")
        if self.spec.task == "characters" and (shuffle is None or arguments.stream_positions):
            if 0 < examples < batch_size:
                raise UsageError(
                    f"A batch of {batch_size} streams needs at least {batch_size} examples, "
                    f"but `{split}` of `{self.spec.name}` has {examples}",
                    f"use a batch size of at most {examples}, or fewer steps per example",
                )
            return lambda epoch: order.streams(examples, batch_size)
        if shuffle is None:
            shuffle = split == "train"
        return self._shuffled(split, batch_size, arguments.seed) if shuffle else lambda epoch: order.as_stored(examples)

    def _shuffled(self, split: str, batch_size: int, seed: int) -> order.OrderOf:
        if self.bucketed:
            lengths = np.sum([*sentence_lengths(self._examples(split).arrays[0]).values()], axis=0)
            return lambda epoch: order.bucketed_order(lengths, batch_size, seed, epoch)
        return lambda epoch: order.epoch_order(self.spec.examples[split], seed, epoch)

    def _trimmed(self, x: Any, batch_size: int) -> padding.Trimmed:
        import tensorflow as tf

        # For GPUs, XLA compiles the step once per width, and their matrix units need multiples of 8.
        multiple = 8 if tf.config.list_physical_devices("GPU") else 1
        return padding.Trimmed(sentence_lengths(x), batch_size, multiple)

    def _augmented(self, arguments: FeedArguments) -> Transform | None:
        if self.spec.task == "masked_lm":
            return masking.Masked(self.spec, arguments.seed, each_epoch=arguments.split == "train")
        augmentation, examples = self.augmentation(arguments.augment), self.spec.examples[arguments.split]
        if augmentation is None:
            return None
        return augmentations.Augmented(self.spec, augmentation, arguments.seed, examples)

    def _with_spec(self, **changes: Any) -> Self:
        """A copy with changes of the spec, which has read nothing yet."""
        changed = copy.copy(self)
        changed.spec = dataclasses.replace(self.spec, **changes)
        changed._stored, changed._pipelines = {}, {}
        return changed

    def _origin_with(self, **changes: Any) -> Origin | None:
        return None if self.origin is None else dataclasses.replace(self.origin, **changes)

    def _check_split(self, split: str) -> None:
        if split not in SPLITS:
            raise UnknownNameError("split", split, SPLITS)
        if self.spec.examples[split] == 0:
            raise DataError(
                f"Dataset `{self.spec.name}` has no examples in its split `{split}`, so no batches",
                f"use a dataset that has `{split}` examples",
            )


class IndexedSource(Source):
    """A source that reads the examples of each batch when they are needed; see `Source`.

    A process reads only its own part of each batch, and several batches at the same time, in threads. What the reader
    returns is checked for each batch:

        order of the epoch, by range ──> this rank's numbers of a batch ──> the user's reader ──> check ──> augment
    """

    def __init__(self, spec: DataSpec, read_at: ReadAt):
        """Makes a source of `spec.examples[split]` examples per split.

        Args:
            spec: the facts about the dataset.
            read_at: `read_at(split, indices)` returns the examples with these numbers, in this order, as
                `tfdist.data.spec` describes them: for example rows of arrays from `numpy.load(..., mmap_mode="r")`. It
                is called from several threads.
        """
        super().__init__(spec, lambda split, count: read_at(split, np.arange(count)))
        self._read_at = read_at
        self._problem: DataError | None = None

    def for_masked_lm(self) -> Self:
        source, (_, shift) = super().for_masked_lm(), masking.facts(self.spec)
        source._read_at = lambda split, indices: masking.texts_alone(self._read_at(split, indices), shift)
        return source

    def cached(self) -> Source:
        source = Source(self.spec, self._read)
        source.origin = self._origin_with(cached=True)
        return source

    def _feed(self, arguments: FeedArguments, world: World) -> Feed:
        return self.pipelines(arguments).feed(world, lambda: self._problem)

    def _by_range(self, split: str) -> bool:
        self._check_split(split)
        return True

    def _parts_of_feed(self, arguments: FeedArguments) -> tuple[Any, int, order.OrderOf, ToModelTypes | None]:
        if arguments.stream_positions:
            raise UsageError(
                f"The examples of `{self.spec.name}` are read by number, without their positions in streams",
                "use a source of arrays for a model that keeps a state",
            )
        augmented = self._augmented(arguments)
        transform = None if augmented is None else ToModelTypes(self.spec, then=augmented)
        read = functools.partial(self._examples_at, arguments.split)
        return read, arguments.global_batch_size, self._order_of(arguments), transform

    def _examples_at(self, split: str, indices: tf.Tensor) -> Any:
        """Reads the examples with these numbers in a graph."""
        import tensorflow as tf

        specs = _specs(self.spec)
        flat_specs = tf.nest.flatten(specs)

        def read(numbers: np.ndarray) -> list[np.ndarray]:
            spec = dataclasses.replace(self.spec, examples={split: len(numbers)})
            try:
                x, y = self._read_at(split, numbers)
                arrays = tf.nest.flatten(checked(spec, split, x, x if spec.targets_are_inputs else y))
                return [cast(array, of.dtype.as_numpy_dtype) for array, of in zip(arrays, flat_specs, strict=True)]
            except DataError as error:
                self._problem = error
                raise

        arrays = tf.numpy_function(read, [indices], [spec.dtype for spec in flat_specs])
        flat = [tf.ensure_shape(array, spec.shape) for array, spec in zip(arrays, flat_specs, strict=True)]
        return tf.nest.pack_sequence_as(specs, flat)


@dataclass(frozen=True)
class Origin:
    """How a source was made.

    Attributes:
        name: the dataset's name, as `tfdist.data.load` takes it.
        data_dir: the folder of prepared datasets, if the user named one.
        options: the options of the dataset: pairs of a name and a value that JSON can represent.
        limit: the number of training examples that the source was limited to, if it was.
        task: the task that it was changed to, if it was.
        cached: whether its examples are read once, into memory.
    """

    name: str
    data_dir: str | None
    options: tuple[tuple[str, Any], ...]
    limit: int | None = None
    task: str | None = None
    cached: bool = False


@dataclass(frozen=True)
class FeedArguments:
    """The arguments of `Source.feed` except `world`."""

    split: str
    global_batch_size: int
    seed: int
    shuffle: bool | None
    augment: str
    stream_positions: bool = False


@dataclass(frozen=True)
class PipelineArguments:
    """The arguments of `Source.pipeline` except `threads`; those that `Source.feed` has too are in `feed`."""

    feed: FeedArguments
    world: World
    deterministic: bool = True
    by_file: bool = False
    epoch: int = 0
    first_batch: int = 0


@dataclass(frozen=True)
class FeedOrigin:
    """How a feed was made: with these `arguments`, by the source with the origin `source`."""

    source: Origin
    arguments: FeedArguments

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, line: str) -> FeedOrigin:
        """Reads what `to_json` wrote."""
        fields = json.loads(line)
        options = tuple((name, value) for name, value in fields["source"].pop("options"))
        return cls(Origin(**fields["source"], options=options), FeedArguments(**fields["arguments"]))


def origin_of(name: str, data_dir: Any, options: dict[str, Any]) -> Origin | None:
    """The origin of a source that was loaded with these arguments; `None` if JSON cannot represent an option."""
    try:
        represented = json.loads(json.dumps(options))
    except TypeError:
        return None
    return Origin(name, None if data_dir is None else str(data_dir), tuple(represented.items()))


class StoredArrays:
    """x and y of a split in memory.

    Args:
        spec: the spec of the dataset.
        arrays: x and y as `arrays.checked` returns them.
        divisor: a model sees x divided by it.
    """

    def __init__(self, spec: DataSpec, arrays: Arrays, divisor: int):
        self.arrays = arrays
        self._spec = spec
        self._divisor = divisor
        self._casts: weakref.WeakValueDictionary[str, np.ndarray] = weakref.WeakValueDictionary()

    @functools.cached_property
    def tensors(self) -> Any:
        """x and y as `ArrayFeed` takes them: TensorFlow's copy, whose memory `arrays` shares from then on."""
        from tfdist.data.input.array_feed import tensors_and_views

        tensors, self.arrays = tensors_and_views(self.arrays)
        return tensors

    def for_model(self) -> Arrays:
        """x and y as a model sees them; a cast array is kept only while it is used."""
        (x, y), promised = self.arrays, inputs(self._spec)
        x_for_model = map_inputs(lambda name, array: self._cast(name, array, promised[name][1], self._divisor), x)
        return x_for_model, (x_for_model if x is y else self._cast("y", y, target_type(self._spec)))

    def _cast(self, name: str, array: np.ndarray, dtype: type[np.generic], divisor: int = 1) -> np.ndarray:
        result = self._casts.get(name)
        if result is None:
            result = cast(array, dtype, divisor)
            if result is not array:
                self._casts[name] = result
        return result


def _specs(spec: DataSpec) -> Any:
    """The `tf.TensorSpec`s of x and y in a batch, as a model sees them."""
    import tensorflow as tf

    x = {name: tf.TensorSpec([None, *shape], dtype) for name, (shape, dtype) in inputs(spec).items()}
    return x.get("x", x), tf.TensorSpec([None, *spec.target_shape], target_type(spec))


def _require_pair(dataset: str, split: str, pair: Any) -> None:
    """Raises `UsageError` if the examples of a split are not a pair of x and y with the same number of examples."""
    if not (isinstance(pair, tuple | list) and len(pair) == 2):
        raise UsageError(
            f"`{split}` of the dataset `{dataset}` is a `{type(pair).__name__}`, not a pair of arrays",
            f"pass the examples and their targets: `{split}=(x, y)`",
        )
    examples, targets = len(main_input(pair[0])), len(pair[1])
    if examples != targets:
        raise UsageError(
            f"`{split}` of the dataset `{dataset}` has {examples} examples x and {targets} targets y",
            "give each example its target",
        )
