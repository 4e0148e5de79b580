"""A dataset that can be read: its spec, its arrays, and its pipelines of batches.

Synopsis:

    >>> x = np.linspace(0, 1, 12, dtype=np.float32).reshape(6, 2)
    >>> source = Source.from_arrays("mine", classes=2, train=(x, np.array([0, 1, 0, 1, 0, 1])))
    >>> source.spec.examples
    {'train': 6, 'validation': 0, 'test': 0}
    >>> source.limit(4).arrays("train")[1]
    array([0, 1, 0, 1], dtype=int32)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdist.data.order import epoch_order
from tfdist.data.spec import SPLITS, DataSpec
from tfdist.errors import DataError, UnknownNameError, UsageError
from tfdist.world import World

if TYPE_CHECKING:
    import tensorflow as tf

Arrays = tuple[np.ndarray, np.ndarray]
# The first `count` examples of a split, in the split's stored order.
Read = Callable[[str, int], Arrays]


class Source:
    """A dataset of examples `x` with labels `y`, in memory once it is read.

    Attributes:
        spec: its facts, known without reading an example.
    """

    def __init__(self, spec: DataSpec, read: Read):
        """Makes a source of `spec.examples[split]` examples a split.

        Args:
            spec: the facts about the dataset.
            read: `read(split, count)` gives the first `count` examples: x `[count, *spec.input_shape]`, any
                float or integer type, already scaled; y `[count]`, integers. It is called once a split.
        """
        self.spec = spec
        self._read = read
        self._arrays: dict[str, Arrays] = {}
        self._tensors: dict[str, tuple[tf.Tensor, tf.Tensor]] = {}

    @classmethod
    def from_arrays(
        cls,
        name: str,
        *,
        classes: int,
        train: Arrays,
        validation: Arrays | None = None,
        test: Arrays | None = None,
        class_names: Sequence[str] = (),
    ) -> Source:
        """A source of arrays that are already there.

        Args:
            name: the dataset's name, for messages and the record of a run.
            classes: the number of classes; labels are 0 to `classes - 1`.
            train: x `[N, ...]`, numbers scaled as the model shall see them, and y `[N]`, integers.
            validation: the same, or None.
            test: the same, or None.
            class_names: one name a class, or none.
        """
        given = {"train": train, "validation": validation, "test": test}
        splits = {split: (np.asarray(pair[0]), np.asarray(pair[1])) for split, pair in given.items() if pair}
        counts = {split: len(x) for split, (x, _) in splits.items()}
        shape = splits["train"][0].shape[1:]
        spec = DataSpec(name, "classification", shape, classes, counts, tuple(class_names))
        return cls(spec, lambda split, count: (splits[split][0][:count], splits[split][1][:count]))

    def arrays(self, split: str) -> Arrays:
        """All examples of "train", "validation" or "test", read once and then kept; do not write into them.

        Returns:
            x, float32 `[N, *spec.input_shape]`, pixels in [0, 1], and y, int32 `[N]`; both C-contiguous.

        Raises:
            UnknownNameError: no such split.
            DataError: the split has no examples, or they do not fit the spec.
        """
        if split not in SPLITS:
            raise UnknownNameError("split", split, SPLITS)
        if split not in self._arrays:
            self._arrays[split] = self._read_checked(split)
        return self._arrays[split]

    def limit(self, examples: int) -> Source:
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
        counts = {**self.spec.examples, "train": examples}
        return Source(dataclasses.replace(self.spec, examples=counts), self._read)

    def pipeline(
        self,
        split: str,
        global_batch_size: int,
        *,
        world: World = World(),  # noqa: B008 - frozen
        seed: int = 0,
        epoch: int = 0,
        shuffle: bool | None = None,
    ) -> tf.data.Dataset:
        """One epoch of a split, as this rank's part of each global batch.

        Joined in the order of the ranks, the parts of batch k are the same global batch for any number of
        ranks; each example comes once. The last batch holds the remainder. Every rank gets the same number of
        batches, so a part is empty where a batch has fewer examples than there are ranks.

        Args:
            split: "train", "validation" or "test".
            global_batch_size: examples a step, over all ranks.
            world: this process' place; alone by default.
            seed: with `epoch`, all that the order depends on.
            epoch: which epoch, from 0.
            shuffle: whether to shuffle; None shuffles "train" alone.

        Returns:
            A `tf.data.Dataset` of (x, y): float32 `[b, *spec.input_shape]` and int32 `[b]`, on the CPU.

        Raises:
            UsageError: a batch size below 1.
            UnknownNameError, DataError: as `arrays`.
        """
        from tfdist.data.pipeline import batches, to_tensors

        if global_batch_size < 1:
            raise UsageError(f"The global batch size is `{global_batch_size}`", "use 1 or more")
        x, y = self.arrays(split)
        if split not in self._tensors:
            # TensorFlow copies what it is given: once for all epochs, not once an epoch.
            self._tensors[split] = to_tensors(x, y)
        if shuffle is None:
            shuffle = split == "train"
        order = epoch_order(len(y), seed, epoch) if shuffle else np.arange(len(y), dtype=np.int32)
        return batches(*self._tensors[split], order, global_batch_size, world)

    def _read_checked(self, split: str) -> Arrays:
        count = self.spec.examples[split]
        if count == 0:
            raise DataError(
                f"Dataset `{self.spec.name}` has no examples in its split `{split}`, so no batches",
                f"use a dataset that has `{split}` examples",
            )
        x, y = self._read(split, count)
        self._check_shape(split, "x", np.shape(x), (count, *self.spec.input_shape))
        self._check_shape(split, "y", np.shape(y), (count,))
        check_labels(y, self.spec)
        return np.ascontiguousarray(x, np.float32), np.ascontiguousarray(y, np.int32)

    def _check_shape(self, split: str, what: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if found != expected:
            raise DataError(
                f"Dataset `{self.spec.name}` promises {what} of shape `{expected}` in its split `{split}`, "
                f"found `{found}`",
                "make the source's spec and what it reads agree",
            )


def check_labels(y: Any, spec: DataSpec) -> None:
    """Checks that labels are class numbers.

    Args:
        y: labels, integers `[N]`, each to be 0 to `spec.classes - 1`.
        spec: the dataset's facts.

    Raises:
        DataError: not integers, or a label outside the classes; names the first such index and its value.
    """
    y = np.asarray(y)
    if y.dtype.kind not in "iu":
        raise DataError(
            f"Labels of dataset `{spec.name}` are of type `{y.dtype}`",
            f"give class numbers, integers from 0 to {spec.classes - 1}",
        )
    # A comparison is a byte an example; the labels' own type is never widened.
    outside = np.flatnonzero((y < 0) | (y >= spec.classes))
    if len(outside):
        first = int(outside[0])
        raise DataError(
            f"Label {first} of dataset `{spec.name}` is `{y[first]}`, outside its {spec.classes} classes "
            f"({len(outside)} of {len(y)} labels are)",
            f"labels go from 0 to {spec.classes - 1}: renumber them, or give the source more classes",
        )
