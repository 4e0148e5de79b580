"""A dataset that can be read: its spec, its arrays, and its batches for the loop and for `tf.data`.

Synopsis:

    >>> x = np.linspace(0, 1, 12, dtype=np.float32).reshape(6, 2)
    >>> source = Source.from_arrays("mine", classes=2, train=(x, np.array([0, 1, 0, 1, 0, 1])))
    >>> source.spec.examples
    {'train': 6, 'validation': 0, 'test': 0}
    >>> source.limit(4).arrays("train")[1]
    array([0, 1, 0, 1], dtype=int32)
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from tfdist.data.input import augmentation as augmentations
from tfdist.data.input import order, padding
from tfdist.data.input.arrays import Arrays, as_numpy, cast, checked, head, main_input, seen_types, sentence_lengths
from tfdist.data.input.division import Division
from tfdist.data.input.origin import Asked, FeedOrigin, Origin, Part
from tfdist.data.input.transforms import FromHeld
from tfdist.data.spec import SPLITS, DataSpec
from tfdist.errors import DataError, UnknownNameError, UsageError
from tfdist.jobs.world import World

if TYPE_CHECKING:
    import tensorflow as tf

    from tfdist.data.input.array_feed import ArrayFeed, OrderOf
    from tfdist.data.input.augmentation import Augmentation
    from tfdist.data.input.feed import Feed
    from tfdist.data.input.large_feed import LargePasses
    from tfdist.data.input.transforms import Transform


class Held:
    """x and y of a split.

    Args:
        spec: of the dataset.
        arrays: x and y as `arrays.checked` gives them.
        divisor: what a model sees is x divided by it.
    """

    def __init__(self, spec: DataSpec, arrays: Arrays, divisor: int):
        self.arrays = arrays
        self._spec = spec
        self._divisor = divisor
        self._cast: weakref.WeakValueDictionary[str, np.ndarray] = weakref.WeakValueDictionary()

    @functools.cached_property
    def tensors(self) -> Any:
        """x and y as `ArrayFeed` takes them: TensorFlow's copy, which from then on is the only one."""
        from tfdist.data.input.array_feed import held_once

        tensors, self.arrays = held_once(self.arrays)
        return tensors

    def seen(self) -> Arrays:
        """x and y as a model sees them; an array that is cast for it is kept as long as it is used."""
        (x, y), (x_type, y_type) = self.arrays, seen_types(self._spec)
        if isinstance(x, dict):
            return {name: self._seen(name, one, x_type) for name, one in x.items()}, self._seen("y", y, y_type)
        seen = self._seen("x", x, x_type, self._divisor)
        return seen, (seen if x is y else self._seen("y", y, y_type))

    def _seen(self, name: str, array: np.ndarray, dtype: type[np.generic], divisor: int = 1) -> np.ndarray:
        found = self._cast.get(name)
        if found is None:
            found = cast(array, dtype, divisor)
            if found is not array:
                self._cast[name] = found
        return found


# The first `count` examples of a split, in the split's stored order.
Read = Callable[[str, int], Arrays]

ALONE = World()


class Source:
    """A dataset of examples `x` with targets `y`, in memory once it is read, in the type that was read.

    Attributes:
        spec: its facts, known without reading an example.
        origin: how another process can load it; `None` if it was not made by `tfdist.data.load`.
        skipped: the bad examples that were left out, one sentence each.
        bucketed: whether the batches of sentences have different widths.
        has_bytes: whether examples that were read are bytes (uint8) above 1, such as pixels that nobody has scaled.
    """

    def __init__(
        self, spec: DataSpec, read: Read, *, divisor: int = 1, bucketed: bool = False, skipped: Sequence[str] = ()
    ):
        """Makes a source of `spec.examples[split]` examples a split.

        Args:
            spec: the facts about the dataset.
            read: `read(split, count)` gives the first `count` examples as `tfdist.data.spec` describes them: numbers
                of any type, scaled but for `divisor`. It is called once a split.
            divisor: what a model sees is x divided by it, in float32: 255 for pixels that are read as bytes.
            bucketed: whether training batches hold sentences of similar lengths, and all batches are cut at their
                longest sentence.
            skipped: the bad examples that were left out, one sentence each.
        """
        self.spec = spec
        self.skipped = tuple(skipped)
        self.has_bytes = False
        self.origin: Origin | None = None
        self._read = read
        self._divisor = divisor
        self.bucketed = bucketed
        self._held: dict[str, Held] = {}
        self._made: dict[Any, ArrayFeed | LargePasses] = {}

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
        """A source of arrays that are already there.

        Args:
            name: the dataset's name, for messages and the record of a run.
            classes: the number of classes; labels are 0 to `classes - 1`.
            train: x and y, as `tfdist.data.spec` describes them; for classification x `[N, ...]`, numbers scaled as
                the model shall see them, and y `[N]`, integers.
            validation: the same, or None.
            test: the same, or None.
            task: what is to be learned.
            divisor: see `Source`.
            bucketed: see `Source`.
            skipped: see `Source`.
            **facts: further fields of the `DataSpec`, such as `class_names`.
        """
        given = {"train": train, "validation": validation, "test": test}
        splits = {split: (as_numpy(pair[0]), np.asarray(pair[1])) for split, pair in given.items() if pair}
        counts = {split: len(main_input(x)) for split, (x, _) in splits.items()}
        x, y = splits["train"]
        spec = DataSpec(name, task, main_input(x).shape[1:], classes, counts, **{"target_shape": y.shape[1:]} | facts)

        options: Any = {"divisor": divisor, "bucketed": bucketed, "skipped": skipped}
        return cls(spec, lambda split, count: head(splits[split], count), **options)

    def arrays(self, split: str) -> Arrays:
        """All examples of "train", "validation" or "test", read once and then kept; do not write into them.

        Returns:
            x and y as `tfdist.data.spec` describes them: of pictures x is float32 `[N, *spec.input_shape]` in
            [0, 1], of labels y is int32 `[N]`; all C-contiguous, in stored order. What is held in another type is cast.

        Raises:
            UnknownNameError: no such split.
            DataError: the split has no examples, or they do not fit the spec.
        """
        return self._examples(split).seen()

    def _examples(self, split: str) -> Held:
        """All examples of a split, read once and then kept."""
        self._check_split(split)
        if split not in self._held:
            x, y = self._read(split, self.spec.examples[split])
            self._held[split] = Held(self.spec, checked(self.spec, split, x, y), self._divisor)
            bytes_read = self._divisor == 1 and getattr(x, "dtype", None) == np.uint8
            self.has_bytes |= bytes_read and bool(np.max(x, initial=0) > 1)
        return self._held[split]

    def limit(self, examples: int) -> Self:
        """The same dataset with only the first `examples` training examples; no others are read.

        Raises:
            UsageError: fewer than one, or more than there are.
        """
        there = self.spec.examples["train"]
        if not 1 <= examples <= there:
            raise UsageError(
                f"The limit is `{examples}` training examples, dataset `{self.spec.name}` has {there}",
                f"use `--limit` with a number from 1 to {there}",
            )
        limited = self._with_spec(examples={**self.spec.examples, "train": examples})
        if self.origin is not None:
            limited.origin = dataclasses.replace(self.origin, limit=examples)
        return limited

    def for_autoencoding(self) -> Self:
        """The same pictures, each its own target.

        Raises:
            UsageError: the examples are no pictures.
        """
        if self.spec.task == "autoencoding":
            return self
        if len(self.spec.input_shape) != 3:
            raise UsageError(
                f"An example of `{self.spec.name}` has the shape `{self.spec.input_shape}`, which is no picture's",
                "use a dataset of pictures for autoencoding",
            )
        source = self._with_spec(
            task="autoencoding",
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
        if self.origin is not None:
            source.origin = dataclasses.replace(self.origin, autoencoding=True)
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
        """A split as `strategy.fit(model, feed)`, `evaluate` and `predict` take it: all epochs of global batches.

        Args:
            split: "train", "validation" or "test".
            global_batch_size: examples a step, over all ranks.
            world: this process' place; examples that are files, or too many for an order that is drawn, are read by
                the rank that needs them.
            seed: with the epoch, all that order and augmentation depend on.
            shuffle: whether to shuffle; None shuffles "train" alone. Characters stay in order.
            augment: one of `tfdist.data.input.augmentation.NAMES`.
            stream_positions: of characters, x is a dict of "tokens" `[b, steps]`, "stream" `[b]`, the example's row in
                its batch, and "position" `[b]`, how many come before it in that stream: for models that keep a state.

        Raises:
            UsageError: a batch size below 1, or an augmentation that the examples cannot have.
            UnknownNameError, DataError: as `arrays`.
        """
        asked = Asked(split, global_batch_size, seed, shuffle, augment, stream_positions)
        feed = self._feed(asked, world)
        if self.origin is not None:
            feed.origin = FeedOrigin(self.origin, asked)
        return feed

    def _feed(self, asked: Asked, world: World) -> Feed:
        if not self._by_range(asked.split):
            from tfdist.data.input.array_feed import ArrayFeed

            return ArrayFeed(*self._made_of(*self._arguments(asked)))
        from tfdist.data.input.large_feed import LargeFeed

        return LargeFeed(self._passes(*self._arguments(asked)), world)

    def _arguments(self, asked: Asked) -> tuple[Any, ...]:
        """The arguments of `_passes` and `_made_of`."""
        augmentation = self.augmentation(asked.augment)
        return asked.split, asked.global_batch_size, asked.seed, asked.shuffle, augmentation, asked.stream_positions

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
        ranks; each example comes once. The last batch holds the remainder. Every rank gets the same number of
        batches, so a part is empty where a batch has fewer examples than there are ranks.

        Args:
            split: "train", "validation" or "test".
            global_batch_size: examples a step, over all ranks.
            world: this process' place; alone by default.
            seed: with `epoch`, all that order and augmentation depend on.
            epoch: which epoch, from 0.
            first_batch: the batch to begin with; those before it are not read.
            shuffle: whether to shuffle; None shuffles "train" alone. Characters stay in order.
            augment: one of `tfdist.data.input.augmentation.NAMES`.
            threads: a private pool of so many threads; None shares TensorFlow's.
            deterministic: False lets a batch that is ready earlier come earlier.
            by_file: gives each rank whole files, for disks that several ranks had better not read the same of. Each
                example still comes once, but which examples meet in a global batch depends on the number of ranks.

        Returns:
            A `tf.data.Dataset` of (x, y), on the CPU; of pictures float32 `[b, *spec.input_shape]` and int32 `[b]`.

        Raises:
            UsageError: a batch size below 1, an augmentation that the examples cannot have, or `by_file` where they
                are in no files.
            UnknownNameError, DataError: as `arrays`.
        """
        from tfdist.data.input import tf_datasets

        part = Part(split, global_batch_size, world, seed, epoch, first_batch, shuffle, augment, deterministic, by_file)
        return tf_datasets.with_options(self._batches(part), threads, deterministic)

    def _batches(self, part: Part) -> tf.data.Dataset:
        if part.by_file:
            raise UsageError(
                f"The examples of `{self.spec.name}` are in no files that could be dealt out", "leave `by_file` out"
            )
        passes = self.passes(
            part.split, part.global_batch_size, seed=part.seed, shuffle=part.shuffle, augment=part.augment
        )
        division = Division.among_processes(part.world)
        return passes.dataset(part.world.rank, division, part.epoch, part.first_batch, part.deterministic)

    def passes(
        self, split: str, global_batch_size: int, *, seed: int, shuffle: bool | None = None, augment: str = "none"
    ) -> ArrayFeed | LargePasses:
        """As `feed`, for pipelines on the CPU, where `tf.data` works; made once."""
        return self._passes(split, global_batch_size, seed, shuffle, self.augmentation(augment), False)

    def _passes(self, *asked: Any) -> Any:
        if asked not in self._made:
            from tfdist.data.input.array_feed import ArrayFeed
            from tfdist.data.input.large_feed import LargePasses

            kind = LargePasses if self._by_range(asked[0]) else ArrayFeed
            self._made[asked] = kind(*self._made_of(*asked))
        return self._made[asked]

    def _by_range(self, split: str) -> bool:
        """Whether a split has so many examples that their order is never a tensor as a whole."""
        self._check_split(split)
        return order.is_computed(self.spec.examples[split])

    def augmentation(self, augment: str) -> Augmentation | None:
        """The augmentation of that name, `None` for "none", after a check that the examples can have it."""
        augmentation = augmentations.parse(augment)
        augmentations.check(augmentation, self.spec)
        return augmentation

    def _made_of(
        self,
        split: str,
        batch_size: int,
        seed: int,
        shuffle: bool | None,
        augmentation: Augmentation | None,
        stream_positions: bool,
    ) -> tuple[Any, int, OrderOf, FromHeld | None]:
        """What a feed of arrays is made of."""
        from tfdist.data.input.array_feed import tensors

        order_of = self._order_of(split, batch_size, seed, shuffle)
        held = self._examples(split)
        transform = FromHeld(self.spec, self._divisor, self._transform(held.arrays, batch_size, augmentation, seed))
        if stream_positions:
            stream, position = order.stream_positions(len(held.arrays[1]), batch_size)
            x = {"tokens": held.arrays[0], "stream": stream, "position": position}
            return tensors(x, held.arrays[1]), batch_size, order_of, transform
        return held.tensors, batch_size, order_of, transform

    def _order_of(self, split: str, batch_size: int, seed: int, shuffle: bool | None) -> OrderOf:
        """The order of each epoch, after a check of what it is asked for."""
        self._check_split(split)
        examples = self.spec.examples[split]
        if batch_size < 1:
            raise UsageError(f"The global batch size is `{batch_size}`", "use 1 or more")
        if self.spec.task == "characters":
            if 0 < examples < batch_size:
                raise UsageError(
                    f"A batch of {batch_size} streams needs as many examples, and `{split}` of `{self.spec.name}` "
                    f"has {examples}",
                    f"use a batch size of at most {examples}, or fewer steps an example",
                )
            return lambda epoch: order.streams(examples, batch_size)
        if shuffle is None:
            shuffle = split == "train"
        return self._shuffled(split, batch_size, seed) if shuffle else lambda epoch: order.as_stored(examples)

    def _shuffled(self, split: str, batch_size: int, seed: int) -> OrderOf:
        if self.bucketed:
            lengths = np.sum([*sentence_lengths(self._examples(split).arrays[0]).values()], axis=0)
            return lambda epoch: order.bucketed_order(lengths, batch_size, seed, epoch)
        return lambda epoch: order.epoch_order(self.spec.examples[split], seed, epoch)

    def _transform(
        self, arrays: Arrays, batch_size: int, augmentation: Augmentation | None, seed: int
    ) -> Transform | None:
        if self.bucketed:
            import tensorflow as tf

            # For GPUs XLA compiles the step once per width, and their matrix units work on multiples of 8.
            multiple = 8 if tf.config.list_physical_devices("GPU") else 1
            return padding.Trimmed(sentence_lengths(arrays[0]), batch_size, multiple)
        return None if augmentation is None else augmentations.Augmented(self.spec, augmentation, seed, len(arrays[1]))

    def _with_spec(self, **changes: Any) -> Self:
        """A copy with other facts, which has read nothing yet."""
        changed = copy.copy(self)
        changed.spec = dataclasses.replace(self.spec, **changes)
        changed._held, changed._made = {}, {}
        return changed

    def _check_split(self, split: str) -> None:
        if split not in SPLITS:
            raise UnknownNameError("split", split, SPLITS)
        if self.spec.examples[split] == 0:
            raise DataError(
                f"Dataset `{self.spec.name}` has no examples in its split `{split}`, so no batches",
                f"use a dataset that has `{split}` examples",
            )
