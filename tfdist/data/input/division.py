"""How data are divided: a global batch among replicas, and the data of a job among its processes.

The parts of a batch are equal, or proportional to the speeds of the replicas. Data of which each process reads its own
part are marked by the user:

    model.fit(tfdist.data.per_process((x, y)), batch_size=32)      # 32 examples of each process

    files = tfdist.data.shard(tf.data.Dataset.list_files("*.jpg", shuffle=False))
    dataset = files.map(decode).batch(32)
    model.fit(tfdist.data.per_process(dataset))                     # each process decodes only its own files

Synopsis:

    >>> [Division(4).part(10, index) for index in range(4)]
    [(0, 3), (3, 5), (5, 8), (8, 10)]
    >>> [Division(2, (3, 1)).part(8, index) for index in range(2)]
    [(0, 6), (6, 8)]
"""

from __future__ import annotations

import functools
import itertools
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tfdist.errors import UsageError
from tfdist.jobs.world import World

if TYPE_CHECKING:
    import tensorflow as tf


@dataclass(frozen=True)
class Division:
    """A division of batches into `count` contiguous parts.

    Attributes:
        count: the number of parts.
        speeds: the relative size of each part; `None` makes them equal.
    """

    count: int
    speeds: tuple[int, ...] | None = None

    @classmethod
    def among_processes(cls, world: World) -> Division:
        """The division among the processes of a job."""
        return cls(world.world_size, world.speeds)

    def part(self, examples: Any, index: Any) -> tuple[Any, Any]:
        """The half-open range of a batch of `examples` that part `index` takes.

        Parts are contiguous and in order, so that joining them returns the batch. The size of each part differs by less
        than one example from its exact proportion, and part 0 of a batch with examples is never empty. The arguments
        are Python integers or TensorFlow's integer tensors.
        """
        begin, end, total = self._before(index), self._before(index + 1), self._before(self.count)
        return (examples * begin + total - 1) // total, (examples * end + total - 1) // total

    def even_length(self, examples: int) -> int | None:
        """The number of examples in every part of a batch of `examples`; `None` if the parts have different sizes."""
        return examples // self.count if self.speeds is None and examples % self.count == 0 else None

    def _before(self, index: Any) -> Any:
        """The sum of the speeds of all parts before part `index`."""
        if self.speeds is None:
            return index
        if isinstance(index, int):
            return self._sums[index]
        import tensorflow as tf  # not at the top: commands use divisions without TensorFlow

        return tf.gather(tf.constant(self._sums, index.dtype), index)

    @functools.cached_property
    def _sums(self) -> list[int]:
        return list(itertools.accumulate(self.speeds or (), initial=0))


WHOLE = Division(1)


@dataclass(frozen=True)
class PerProcess:
    """The part of a job's data that this process reads, as `per_process` marks it."""

    data: Any


def per_process(data: Any) -> PerProcess:
    """Marks `data` as the part of this process, for `fit`, `evaluate`, `predict` and `validation_data`.

    A global batch consists of the batches of all processes, in the order of their ranks, and each batch is weighted by
    its number of examples, as on one device. An epoch ends when the data of all processes have ended; a process whose
    data end earlier takes part without examples. `batch_size` is the size of the batches of each process. `predict`
    returns to each process the predictions of its own part, without communication.

    In a job of one process, and under `parameter_server`, whose chief reads all data, the result is `data` itself.

    Args:
        data: any data that Keras accepts as `x`: a `tf.data.Dataset`, a `keras.utils.PyDataset`, a generator, data of
            Grain, `tfdist.data.examples`, or arrays; targets and sample weights of arrays in a tuple `(x, y)` or
            `(x, y, sample_weight)`.
    """
    return PerProcess(data)


def shard(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The elements of a `tf.data.Dataset` for this process: every N-th element for N processes, starting at its rank.

    Call it before the expensive part of a pipeline, which then runs only for the elements of this process. The elements
    must be in the same order in all processes. Pass the resulting dataset to `per_process`.

    Raises:
        UsageError: `dataset` is no `tf.data.Dataset`.
    """
    import tensorflow as tf

    if not isinstance(dataset, tf.data.Dataset):
        raise UsageError(
            f"`tfdist.data.shard` takes a `tf.data.Dataset`, and this is of type `{type(dataset).__name__}`",
            "make one with `tf.data.Dataset.from_tensor_slices`; `tfdist.data.per_process` takes other data",
        )
    world = World.detect(os.environ)
    if world.tasks_of("ps"):
        return dataset
    return dataset.shard(world.world_size, world.rank)
