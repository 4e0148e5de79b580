"""Placements: how the values of a partitioned step are laid out over the replicas.

A value is replicated, sharded along an axis, or a partial result that the replicas still have to reduce. These are the
three placements of DTensor (`torch.distributed.tensor`) and of GSPMD (Xu et al., arXiv 2105.04663), except that the
shards of an axis may differ in length.

A step for sequences of unknown length computes shapes such as `[batch * length, features]`. The first axis of such a
shape can be sharded as the batch is if it is known to be a multiple of the batch size. So a length is an integer times
lengths that are unknown while the graph is built.

Synopsis:

    >>> Shard(0, (4, 3)).lengths(14)
    [8, 6]
    >>> Shard(0, (4, 3)).divides(12)
    False
    >>> batch, length = Monomial(8), Monomial(1, ("length",))
    >>> (batch * length).multiple_of(4)
    True
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

# From this many rows per replica on, one row more or less hardly unbalances the replicas.
_BALANCED_ROWS = 16


@dataclass(frozen=True)
class Replicate:
    """Every replica has the whole value."""


@dataclass(frozen=True)
class Shard:
    """Replica i has a shard of `axis` whose length is in proportion to `sizes[i]`; the other axes are not divided.

    With `blocks` above 1 the axis consists of that many blocks of equal length, and a replica has its shard of each
    block, one after the other. Concatenating two sharded tensors along the sharded axis has this result.

    Attributes:
        axis: counted from 0.
        sizes: one positive integer per replica of the job, without a common divisor.
        blocks: the number of blocks of the axis.
    """

    axis: int
    sizes: tuple[int, ...]
    blocks: int = 1

    @classmethod
    def of_rows(cls, rows: Sequence[int], axis: int = 0) -> Shard:
        """The placement of an axis of which replica i has `rows[i]` entries."""
        return cls(axis, tuple(number // math.gcd(*rows) for number in rows))

    @classmethod
    def evenly(cls, shape: Sequence[int], replicas: int) -> Shard | None:
        """Shards a value about evenly; `None` if no axis has an entry for every replica.

        The first axis is preferred, because its shards are contiguous in memory, unless the longest axis divides more
        evenly.
        """
        lengths = list(shape)
        if not lengths:
            return None
        axis = 0 if lengths[0] >= _BALANCED_ROWS * replicas else lengths.index(max(lengths))
        rows, remainder = divmod(lengths[axis], replicas)
        return cls.of_rows([rows + (replica < remainder) for replica in range(replicas)], axis) if rows else None

    @property
    def total(self) -> int:
        """The sum of the sizes; the length of a block is a multiple of it."""
        return sum(self.sizes)

    def divides(self, length: int | None) -> bool:
        """Whether an axis of this length can be divided in these proportions."""
        return length is not None and length % (self.total * self.blocks) == 0

    def lengths(self, length: int) -> list[int]:
        """The length of each replica's shard of an axis of `length`."""
        return [length // self.total * size for size in self.sizes]

    def part(self, length: Any, replica: int) -> Any:
        """The length of one replica's shard of an axis of `length`: an integer or an integer tensor."""
        return length // self.total * self.sizes[replica]

    def whole_length(self, part: Any, replica: int) -> Any:
        """The length of an axis of which one replica's shard has the length `part`."""
        return part // self.sizes[replica] * self.total

    def moved(self, axis: int, blocks: int | None = None) -> Shard:
        """The same proportions on another axis."""
        return Shard(axis, self.sizes, self.blocks if blocks is None else blocks)


@dataclass(frozen=True)
class Partial:
    """Each replica has a partial result of the global shape; reducing them over the replicas gives the value.

    Attributes:
        reduction: "sum", "max", "min", "prod", "all" or "any".
        dtype: the dtype of the value, if partial sums are kept in float32 until they are added.
    """

    reduction: str = "sum"
    dtype: tf.DType | None = None


Placement = Replicate | Shard | Partial
REPLICATE = Replicate()
_numbers = itertools.count()


class Placed:
    """A value of the one-device step, with its placement in the partitioned step.

    Attributes:
        number: identifies the value.
        placement: of `tensors`.
        tensors: one per copy in this process for a replicated value, else one per replica of this process.
        constant: the value, if it is known when the graph is built.
        shape: the global shape, as far as it is known.
        axes: what is known of the lengths of the axes beyond `shape`; `None` if nothing is.
        lengths: for a length or a vector of lengths, what is known of each entry; `None` if nothing is.
        repeated: each replica computes the whole value redundantly, from gathered values.
        included: for a vector of axes that is not constant, the axes that it surely contains.
        excluded: for a vector of axes that is not constant, the axes that it surely does not contain.
        is_gradient: a gradient tape has computed it.
        is_accumulated: it was read from a variable that is the sum of one variable per replica.
        element_dtype: the dtype of the elements of a TensorList.
    """

    def __init__(
        self,
        placement: Placement,
        tensors: Sequence[tf.Tensor] = (),
        constant: np.ndarray | None = None,
        repeated: bool = False,
        element_dtype: tf.DType | None = None,
        replica: int = 0,
    ):
        self.number = next(_numbers)
        self.placement = placement
        self.tensors = list(tensors)
        self.constant = constant
        self.repeated = repeated
        self.is_gradient = False
        self.is_accumulated = False
        self.included: frozenset[int] = frozenset()
        self.excluded: frozenset[int] = frozenset()
        self.element_dtype = element_dtype
        self.shape = _global_shape(placement, self.tensors, constant, replica)
        self.axes: Lengths | None = None
        self.lengths: Lengths | None = None
        if constant is not None and constant.ndim < 2 and constant.dtype.kind in "iu" and constant.size < 64:
            self.lengths = [Monomial(int(number)) if number > 0 else None for number in constant.ravel()]
        self._conversions: list[tuple[tf.Graph, Placed]] = []

    def converted(self, placement: Placement) -> Placed | None:
        """This value in another placement, if a graph that the current graph can read has converted it."""
        if self.placement == placement:
            return self
        return next((value for value in self._readable_conversions() if value.placement == placement), None)

    def in_parts(self) -> Placed | None:
        """The reduce-scattered shards of this partial sum, if a graph that the current graph can read has them."""
        return next((value for value in self._readable_conversions() if isinstance(value.placement, Shard)), None)

    def converted_in(self, graph: tf.Graph, placement: Placement) -> bool:
        """Whether this value was converted in this graph."""
        return any(other is graph and value.placement == placement for other, value in self._conversions)

    def keep(self, value: Placed) -> Placed:
        """Records `value` as this value in another placement, and returns it."""
        graph = tf.compat.v1.get_default_graph()
        self._conversions.append((graph, value))
        value._conversions.append((graph, self))
        return value

    def _readable_conversions(self) -> Iterator[Placed]:
        graphs: list[Any] = [tf.compat.v1.get_default_graph()]
        while (outer := getattr(graphs[-1], "outer_graph", None)) is not None:
            graphs.append(outer)
        return (value for graph, value in self._conversions if graph in graphs)


@dataclass(frozen=True)
class Monomial:
    """`factor` times unknown lengths, each named by a symbol.

    Attributes:
        factor: a non-negative integer.
        symbols: sorted.
    """

    factor: int
    symbols: tuple[str, ...] = ()

    def __mul__(self, other: Monomial) -> Monomial:
        return Monomial(self.factor * other.factor, tuple(sorted(self.symbols + other.symbols)))

    def divided_by(self, other: Monomial) -> Monomial | None:
        """The quotient; `None` if it is not known to be an integer."""
        symbols = Counter(self.symbols)
        if not Counter(other.symbols) <= symbols or other.factor == 0 or self.factor % other.factor:
            return None
        return Monomial(self.factor // other.factor, tuple((symbols - Counter(other.symbols)).elements()))

    def multiple_of(self, divisor: int) -> bool:
        """Whether the length is a multiple of `divisor`, whatever the unknown lengths are."""
        return self.factor % divisor == 0


ONE = Monomial(1)

# What is known of each entry of a vector of lengths, or of one length.
Lengths = list[Monomial | None]


def product(lengths: Sequence[Monomial | None]) -> Monomial | None:
    """The product of lengths; `None` if nothing is known of one of them."""
    known = [length for length in lengths if length is not None]
    return math.prod(known, start=ONE) if len(known) == len(lengths) else None


def dimensions(value: Placed) -> list[Monomial] | None:
    """The lengths of the axes of the global value; an unknown length is a symbol of the value."""
    if value.shape.rank is None:
        return None
    return [
        Monomial(1, (f"{value.number}.{axis}",)) if n is None else Monomial(n) for axis, n in enumerate(value.shape)
    ]


def part_shape(shape: tf.TensorShape, placement: Placement, replica: int) -> tf.TensorShape:
    """The local shape, on one replica, of a value with this global shape."""
    return _with_length(shape, placement, lambda shard, length: shard.part(length, replica))


def _global_shape(
    placement: Placement, tensors: Sequence[tf.Tensor], constant: np.ndarray | None, replica: int
) -> tf.TensorShape:
    """The global shape of a value, from the tensor of `replica`, which is the first of this process."""
    if constant is not None:
        return tf.TensorShape(constant.shape)
    if not tensors or tensors[0].dtype in (tf.resource, tf.variant):
        return tf.TensorShape(None)
    return _with_length(tensors[0].shape, placement, lambda shard, length: shard.whole_length(length, replica))


def _with_length(shape: tf.TensorShape, placement: Placement, convert: Callable[[Shard, int], int]) -> tf.TensorShape:
    """`shape` with the length of the sharded axis converted, if there is one and its length is known."""
    if not isinstance(placement, Shard) or shape.rank is None:
        return shape
    lengths = shape.as_list()
    length = lengths[placement.axis]
    lengths[placement.axis] = None if length is None else convert(placement, length)
    return tf.TensorShape(lengths)
