"""How the examples of a global batch are divided among replicas: in equal parts, or in proportion to speeds.

Synopsis:

    >>> [Division(4).part(10, index) for index in range(4)]
    [(0, 3), (3, 5), (5, 8), (8, 10)]
    >>> [Division(2, (3, 1)).part(8, index) for index in range(2)]
    [(0, 6), (6, 8)]
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

from tfdist.jobs.world import World


@dataclass(frozen=True)
class Division:
    """The parts of `count` replicas.

    Attributes:
        count: the number of parts.
        speeds: the size of each part in proportion to the others; `None` makes them equal.
    """

    count: int
    speeds: tuple[int, ...] | None = None

    @classmethod
    def among_processes(cls, world: World) -> Division:
        """The parts of the processes of a job."""
        return cls(world.world_size, world.speeds)

    def part(self, examples: Any, index: Any) -> tuple[Any, Any]:
        """The half-open range of a batch of `examples` that part `index` takes.

        Parts are contiguous and in order, so that joining them returns the batch. Each differs by less than one example
        from its proportion, and part 0 of a batch with examples is never empty. The method works on Python integers
        and on TensorFlow's integer tensors.
        """
        begin, end, total = self._before(index), self._before(index + 1), self._before(self.count)
        return (examples * begin + total - 1) // total, (examples * end + total - 1) // total

    def even_length(self, examples: int) -> int | None:
        """The number of examples in every part of a batch of `examples`; `None` where the parts differ."""
        return examples // self.count if self.speeds is None and examples % self.count == 0 else None

    def _before(self, index: Any) -> Any:
        """The sum of the speeds of the parts before part `index`."""
        if self.speeds is None:
            return index
        if isinstance(index, int):
            return self._sums[index]
        import tensorflow as tf  # commands divide batches before they start TensorFlow

        return tf.gather(tf.constant(self._sums, index.dtype), index)

    @functools.cached_property
    def _sums(self) -> list[int]:
        return list(itertools.accumulate(self.speeds or (), initial=0))


WHOLE = Division(1)
