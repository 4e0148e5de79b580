"""The buffers in which parts of variables are exchanged: N segments of one length, of which segment r is for rank r."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist.communicators.parts import Part


class Segments:
    """How parts of several variables lie in a buffer of N segments of one length, of which segment r is for rank r.

    Args:
        held: the part of each variable.
    """

    def __init__(self, held: Sequence[Part]):
        self._held = held
        self._ranks = range(len(held[0].ends))
        self._filled = [sum(part.sizes[rank] for part in held) for rank in self._ranks]
        self._length = max(self._filled)

    def packed(self, flat: Sequence[tf.Tensor]) -> tf.Tensor:
        """The buffer of the whole variables: `[N * length]`."""
        if len(flat) == 1 and len(set(self._filled)) == 1:
            return flat[0]
        by_variable = [tf.split(one, part.sizes) for one, part in zip(flat, self._held, strict=True)]
        pieces: list[tf.Tensor] = []
        for rank in self._ranks:
            pieces += [of_rank[rank] for of_rank in by_variable]
            pieces.append(tf.zeros([self._length - self._filled[rank]], flat[0].dtype))
        return tf.concat(pieces, 0)

    def own(self, segment: tf.Tensor, rank: int) -> list[tf.Tensor]:
        """The parts of `rank` in its segment, in their shapes."""
        pieces = tf.split(segment, [*(p.sizes[rank] for p in self._held), self._length - self._filled[rank]])
        return [tf.reshape(piece, part.shape) for piece, part in zip(pieces, self._held, strict=False)]

    def packed_own(self, flat: Sequence[tf.Tensor], dtype: tf.DType) -> tf.Tensor:
        """The segment of this process: `[length]`, from its parts that have elements."""
        rest = self._length - self._filled[self._held[0].rank]
        if len(flat) == 1 and not rest:
            return flat[0]
        return tf.concat([*flat, tf.zeros([rest], dtype)], 0)

    def wholes(self, buffer: tf.Tensor) -> list[tf.Tensor]:
        """The whole variables, from the segments of all processes, `[N * length]`."""
        if len(self._held) == 1 and len(set(self._filled)) == 1:
            return [tf.reshape(buffer, self._held[0].whole_shape)]
        sizes = [
            size
            for rank in self._ranks
            for size in (*(p.sizes[rank] for p in self._held), self._length - self._filled[rank])
        ]
        pieces = tf.split(tf.reshape(buffer, [sum(sizes)]), sizes)
        each = len(self._held) + 1  # the last piece of a segment fills it up
        return [
            tf.reshape(tf.concat(pieces[number::each], 0), part.whole_shape) for number, part in enumerate(self._held)
        ]
