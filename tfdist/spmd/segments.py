"""The buffers in which parts of values are exchanged: N segments of one length, of which segment r is for rank r."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist import spmd


class Segments:
    """How parts of several values lie in a buffer of N segments of one length, of which segment r is for rank r.

    Args:
        shapes: of the whole values.
        shards: how each of them is cut; one block each.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], shards: Sequence[spmd.Shard]):
        self._shapes, self._shards = [list(shape) for shape in shapes], shards
        self._ranks = range(len(shards[0].sizes))
        lengths = [shard.lengths(shape[shard.axis]) for shape, shard in zip(self._shapes, shards, strict=True)]
        self._lengths = lengths
        self._sizes = [
            [tf.TensorShape(self._part(value, rank)).num_elements() for value in range(len(shards))]
            for rank in self._ranks
        ]
        self._length = max(map(sum, self._sizes))

    def packed(self, wholes: Sequence[tf.Tensor]) -> tf.Tensor:
        """The buffer of whole values: `[N * length]`."""
        if self._is_as_it_lies:
            return tf.reshape(wholes[0], [-1])
        by_value = [
            tf.split(whole, lengths, shard.axis)
            for whole, lengths, shard in zip(wholes, self._lengths, self._shards, strict=True)
        ]
        return tf.concat([self.packed_own([one[rank] for one in by_value], rank) for rank in self._ranks], 0)

    def packed_own(self, parts: Sequence[tf.Tensor], rank: int) -> tf.Tensor:
        """The segment of one rank, `[length]`, from its parts."""
        flat = [tf.reshape(part, [-1]) for part in parts]
        rest = self._length - sum(self._sizes[rank])
        return flat[0] if len(flat) == 1 and not rest else tf.concat([*flat, tf.zeros([rest], flat[0].dtype)], 0)

    def own(self, segment: tf.Tensor, rank: int) -> list[tf.Tensor]:
        """The parts of one rank in its segment, in their shapes."""
        sizes = self._sizes[rank]
        pieces = tf.split(segment, [*sizes, self._length - sum(sizes)])
        return [tf.reshape(pieces[value], self._part(value, rank)) for value in range(len(sizes))]

    def wholes(self, buffer: tf.Tensor) -> list[tf.Tensor]:
        """The whole values, from the segments of all ranks, `[N * length]`."""
        if self._is_as_it_lies:
            return [tf.reshape(buffer, self._shapes[0])]
        segments = tf.split(tf.reshape(buffer, [len(self._ranks) * self._length]), len(self._ranks))
        by_rank = [self.own(segment, rank) for rank, segment in enumerate(segments)]
        return [
            tf.concat([of_rank[value] for of_rank in by_rank], shard.axis) for value, shard in enumerate(self._shards)
        ]

    @property
    def _is_as_it_lies(self) -> bool:
        """Whether the buffer is one value as it lies in memory."""
        return len(self._shards) == 1 and self._shards[0].axis == 0 and len(set(self._lengths[0])) == 1

    def _part(self, value: int, rank: int) -> list[int]:
        shape = list(self._shapes[value])
        shape[self._shards[value].axis] = self._lengths[value][rank]
        return shape
