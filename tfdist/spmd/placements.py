"""Where the values of a partitioned step are: whole on every replica, cut along an axis, or a term of a sum.

The three placements are those of DTensor (`torch.distributed.tensor`) and of GSPMD (Xu et al., arXiv 2105.04663),
except that the parts of an axis may differ in length.

Synopsis:

    >>> Shard(0, (4, 3)).lengths(14)
    [8, 6]
    >>> Shard(0, (4, 3)).divides(12)
    False
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.spmd.lengths import Lengths, Monomial

# With so many rows of each replica, one row more or less makes no difference.
_ROWS_OF_EACH = 16


@dataclass(frozen=True)
class Replicate:
    """The whole value, the same on every replica."""


@dataclass(frozen=True)
class Shard:
    """Replica i has a part of `axis`, in proportion to `sizes[i]`; the other axes are whole.

    With `blocks` above 1 the axis consists of that many blocks of equal length, and a replica has its part of each
    block, one after the other: as after concatenating two sharded tensors along the sharded axis.

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
        """The placement of an axis of which replica i has `rows[i]`."""
        return cls(axis, tuple(number // math.gcd(*rows) for number in rows))

    @classmethod
    def evenly(cls, shape: Sequence[int], replicas: int) -> Shard | None:
        """The placement that gives each replica about the same of a value; `None` if it has too few elements.

        That is along the first axis, which divides memory into pieces, unless another one divides more evenly.
        """
        lengths = list(shape)
        if not lengths:
            return None
        axis = 0 if lengths[0] >= _ROWS_OF_EACH * replicas else lengths.index(max(lengths))
        each, more = divmod(lengths[axis], replicas)
        return cls.of_rows([each + (replica < more) for replica in range(replicas)], axis) if each else None

    def whole_length(self, part: Any, replica: int) -> Any:
        """The length of an axis of which one replica's part has the length `part`."""
        return part // self.sizes[replica] * self.total

    @property
    def total(self) -> int:
        """The sum of the sizes; the length of a block is a multiple of it."""
        return sum(self.sizes)

    def divides(self, length: int | None) -> bool:
        """Whether an axis of this length can be cut in these proportions."""
        return length is not None and length % (self.total * self.blocks) == 0

    def lengths(self, length: int) -> list[int]:
        """The length of each replica's part of an axis of `length`."""
        return [length // self.total * size for size in self.sizes]

    def part(self, length: Any, replica: int) -> Any:
        """The length of one replica's part of an axis of `length`: an integer or an integer tensor."""
        return length // self.total * self.sizes[replica]

    def moved(self, axis: int, blocks: int | None = None) -> Shard:
        """The same parts on another axis."""
        return Shard(axis, self.sizes, self.blocks if blocks is None else blocks)


@dataclass(frozen=True)
class Partial:
    """Each replica has a value of the global shape; the whole value is their reduction.

    Attributes:
        reduction: "sum", "max", "min", "prod", "all" or "any".
        dtype: of the whole value, where the parts of a sum are kept in float32 until they are added.
    """

    reduction: str = "sum"
    dtype: tf.DType | None = None


Placement = Replicate | Shard | Partial
REPLICATE = Replicate()


_numbers = itertools.count()


class Placed:
    """A value of the one-device step, and where it is in the partitioned one.

    Attributes:
        number: tells it from other values.
        placement: of `tensors`.
        tensors: one for each copy of a replicated value in this process, else one for each replica of this process.
        constant: the value, where it is known while the graph is made.
        shape: of the whole value, as far as it is known.
        axes: what is known of the lengths of its axes beyond that; `None` if nothing is.
        lengths: for a vector of lengths, or one length, what is known of each entry; `None` if nothing is.
        repeated: it is computed whole from sharded values, so that each replica repeats the computation.
        included: of a vector of axes, those that are surely in it, where it is not known.
        excluded: of a vector of axes, those that are surely not in it, where it is not known.
        is_gradient: a tape has computed it.
        is_accumulated: it is what the replicas' terms of a variable hold, of which the value is their sum.
        element_dtype: of the elements of a list of tensors (TensorList).
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
        self.shape = _whole_shape(placement, self.tensors, constant, replica)
        self.axes: Lengths | None = None
        self.lengths: Lengths | None = None
        if constant is not None and constant.ndim < 2 and constant.dtype.kind in "iu" and constant.size < 64:
            self.lengths = [Monomial(int(number)) if number > 0 else None for number in constant.ravel()]
        self._converted: dict[Placement, list[tuple[tf.Graph, Placed]]] = {}

    def converted(self, placement: Placement) -> Placed | None:
        """This value in another placement, if it was converted in a graph that the present one can read."""
        if self.placement == placement:
            return self
        graphs = _enclosing(tf.compat.v1.get_default_graph())
        return next((value for graph, value in self._converted.get(placement, ()) if graph in graphs), None)

    def in_parts(self) -> Placed | None:
        """The parts of the sum of these terms, if they were made in a graph that the present one can read."""
        graphs = _enclosing(tf.compat.v1.get_default_graph())
        return next(
            (
                value
                for placement, made in self._converted.items()
                if isinstance(placement, Shard)
                for graph, value in made
                if graph in graphs
            ),
            None,
        )

    def converted_in(self, graph: tf.Graph, placement: Placement) -> bool:
        """Whether this value was converted in this graph."""
        return any(one is graph for one, _ in self._converted.get(placement, ()))

    def keep(self, value: Placed) -> Placed:
        """Keeps the same value in another placement; returns it."""
        graph = tf.compat.v1.get_default_graph()
        self._converted.setdefault(value.placement, []).append((graph, value))
        value._converted.setdefault(self.placement, []).append((graph, self))
        return value


def dimensions(value: Placed) -> list[Monomial] | None:
    """The lengths of the axes of the whole value; an unknown length is a symbol of the value."""
    if value.shape.rank is None:
        return None
    return [
        Monomial(1, (f"{value.number}.{axis}",)) if n is None else Monomial(n) for axis, n in enumerate(value.shape)
    ]


def _whole_shape(
    placement: Placement, tensors: Sequence[tf.Tensor], constant: np.ndarray | None, replica: int
) -> tf.TensorShape:
    """The shape of a whole value, from that of the part of `replica`, the first of this process."""
    if constant is not None:
        return tf.TensorShape(constant.shape)
    if not tensors or tensors[0].dtype in (tf.resource, tf.variant):
        return tf.TensorShape(None)
    return with_length(tensors[0].shape, placement, lambda cut, part: cut.whole_length(part, replica))


def with_length(shape: tf.TensorShape, placement: Placement, other: Callable[[Shard, int], int]) -> tf.TensorShape:
    """`shape` with the `other` length in place of that along the axis that is cut, if one is and it is known."""
    if not isinstance(placement, Shard) or shape.rank is None:
        return shape
    lengths = shape.as_list()
    length = lengths[placement.axis]
    lengths[placement.axis] = None if length is None else other(placement, length)
    return tf.TensorShape(lengths)


def _enclosing(graph: Any) -> list[Any]:
    found = [graph]
    while (graph := getattr(graph, "outer_graph", None)) is not None:
        found.append(graph)
    return found
