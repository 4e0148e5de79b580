"""The replicas of a partitioned step: where they compute, and how they exchange values.

A mesh says which replicas this process computes, on which devices, and how many copies of a replicated value it holds:
one that all of its replicas read, or one on each device. The partitioner writes all computation itself, and asks the
mesh for exchanges only.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.spmd.placements import Placed, Replicate, Shard

REDUCTIONS: Mapping[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
    "sum": tf.add,
    "max": tf.maximum,
    "min": tf.minimum,
    "prod": tf.multiply,
    "all": tf.logical_and,
    "any": tf.logical_or,
}


class Mesh:
    """Replicas on devices of this process, which share one copy of each replicated value, on the first device.

    Attributes:
        count: the number of replicas of the job.
        local: the numbers of the replicas that this process computes.
        devices: of these replicas.
        copies: how many copies of a replicated value this process has, 1 or as many as devices.
        home: the device on which one of them could compute the whole step; `None` for several devices.
    """

    def __init__(self, devices: Sequence[str]):
        self.count = len(devices)
        self.local: Sequence[int] = range(len(devices))
        self.devices = list(devices)
        self.copies = 1
        self.home: str | None = self.devices[0]

    def on_replica(self, position: int) -> contextlib.AbstractContextManager[Any]:
        """The context of what the replica at this position of `local` computes."""
        return tf.device(self.devices[position])

    def on_copy(self, position: int) -> contextlib.AbstractContextManager[Any]:
        """The context of what is computed for this copy of replicated values."""
        return tf.device(self.devices[position])

    def copy_of_replica(self, position: int) -> int:
        """The copy of replicated values that the replica at this position of `local` reads."""
        return position if self.copies > 1 else 0

    def tensors(self, value: Placed) -> list[tf.Tensor]:
        """The tensors of a placed value; those of a constant are made in the present graph."""
        if value.tensors or value.constant is None:
            return value.tensors
        return [tf.constant(value.constant)] * self.copies

    def read(self, value: Placed, position: int) -> tf.Tensor:
        """What the replica at this position of `local` reads of a value."""
        tensors = self.tensors(value)
        return tensors[self.copy_of_replica(position) if isinstance(value.placement, Replicate) else position]

    def begin(self, variables: Sequence[Any]) -> None:
        """Has each copy of the variables of metrics hold the whole value; called before the steps of a graph."""

    def end(self, variables: Sequence[Any]) -> None:
        """Has the variables of metrics hold what they hold between steps; called after the steps of a graph."""

    def compute(self) -> None:
        """Called before a graph is computed, which all processes of the job compute alike."""

    def computed(self) -> None:
        """Called when a graph is computed."""

    def written(self, write: Callable[[], Any]) -> Any:
        """The results of `write`, which computes steps in the present graph."""
        return write()

    def computing(self, operation: tf.Operation, inputs: Sequence[tf.Tensor]) -> contextlib.AbstractContextManager[Any]:
        """The context in which an operation of the one-device step is computed, from values of which these are one."""
        del operation, inputs
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def branches(self) -> Iterator[Callable[[tf.Tensor], None]]:
        """The context of a loop or a condition in which replicas may exchange values.

        Yields a function to call with one of its results, before which all these exchanges are made.
        """
        yield lambda result: None

    def terms(self, variable: Any) -> list[tf.Tensor] | None:
        """The handles of the replicas' own variables, whose sum is the `variable` of a metric; `None` without them."""
        del variable
        return None

    def captured(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        """The copies of a tensor from outside of the step, such as the handle of a variable."""
        return [tensor] * self.copies

    def is_common(self, handle: tf.Tensor) -> bool:
        """Whether all processes of the job have the variable with this handle, and the same value of it."""
        del handle
        return True

    def all_reduce(
        self, values: Sequence[Sequence[tf.Tensor]], reduction: str, gradients: bool = False
    ) -> list[list[tf.Tensor]]:
        """Reduces values, each given as the terms of this process' replicas.

        Args:
            values: the terms of each value.
            reduction: "sum", "max", "min", "prod", "all" or "any".
            gradients: a tape has computed them; they may be sent in a shorter type.

        Returns:
            The copies of each value.
        """
        del gradients
        with self.on_copy(0):
            return [[reduced(terms, reduction)] for terms in values]

    def all_gather(self, values: Sequence[Sequence[tf.Tensor]], shards: Sequence[Shard]) -> list[list[tf.Tensor]]:
        """The copies of each value of which each replica of this process has a part."""
        with self.on_copy(0):
            return [[joined(parts, shard)] for parts, shard in zip(values, shards, strict=True)]

    def parts(self, shape: tf.TensorShape) -> Shard | None:
        """How variables of this shape are cut, of which each replica updates a part; `None` if each updates all."""
        del shape
        return None

    def reduce_scatter(self, values: Sequence[Sequence[tf.Tensor]], shards: Sequence[Shard]) -> list[list[tf.Tensor]]:
        """The parts of the sums of gradients; called if `parts` says that each replica updates a part.

        Args:
            values: the terms of each sum.
            shards: how each sum is cut.
        """
        raise NotImplementedError

    def exchanging(self) -> contextlib.AbstractContextManager[Any]:
        """The context of exchanges that are made together."""
        return contextlib.nullcontext()

    def trial(self) -> contextlib.AbstractContextManager[Any]:
        """The context of exchanges in a graph that is thrown away."""
        return contextlib.nullcontext()

    def gathered(self, structure: Any) -> Any:
        """The examples of all processes, of a structure of dense, ragged or sparse tensors of this process' own."""
        return structure

    def once(self, compute: Callable[[], list[tf.Tensor]], like: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
        """The copies of what `compute` returns, which runs once in the job.

        Args:
            compute: writes the operation into the present graph.
            like: tensors of the dtypes, ranks and known lengths of the results.
        """
        del like
        with self.on_copy(0):
            return [[tensor] for tensor in compute()]


def reduced(terms: Sequence[tf.Tensor], reduction: str) -> tf.Tensor:
    """The reduction of the terms of all replicas."""
    if reduction == "sum" and len(terms) > 2:
        return tf.add_n(list(terms))
    return functools.reduce(REDUCTIONS[reduction], terms)


def joined(parts: Sequence[tf.Tensor], shard: Shard) -> tf.Tensor:
    """The whole value of the parts of all replicas."""
    if shard.blocks == 1:
        return tf.concat(parts, shard.axis)
    whole = tf.concat([_split_blocks(part, shard) for part in parts], shard.axis + 1)
    lengths = tf.unstack(tf.shape(whole), num=whole.shape.rank)
    merged = lengths[shard.axis] * lengths[shard.axis + 1]
    return tf.reshape(whole, [*lengths[: shard.axis], merged, *lengths[shard.axis + 2 :]])


def joined_by_rows(
    parts: Sequence[tf.Tensor], shard: Shard, gather: Callable[[Sequence[tf.Tensor]], list[tf.Tensor]]
) -> list[tf.Tensor]:
    """The copies of the whole value of the parts of all replicas.

    Args:
        parts: of the replicas of this process; of unknown rank if the first axis is cut.
        shard: their placement.
        gather: returns, for each copy, the rows of all replicas along the first axis.
    """
    if parts[0].shape.rank is None:
        shape = tf.concat([[-1], tf.shape(parts[0])[1:]], 0)
        rows = [tf.reshape(part, [tf.shape(part)[0], -1]) for part in parts]
        return [tf.reshape(copy, shape) for copy in gather(rows)]
    order = [shard.axis, *(axis for axis in range(parts[0].shape.rank) if axis != shard.axis)]
    back = [order.index(axis) for axis in range(len(order))]
    copies = gather([tf.transpose(part, order) if shard.axis else part for part in parts])
    if shard.blocks > 1:
        copies = [joined(_split_replicas(rows, shard), shard.moved(0)) for rows in copies]
    return [tf.transpose(rows, back) if shard.axis else rows for rows in copies]


def of_one_process(
    result: tf.Tensor | None, like: tf.Tensor, gather: Callable[[tf.Tensor], list[tf.Tensor]]
) -> list[tf.Tensor]:
    """The copies of what one process of a job has computed, whose shape the others may not know.

    Args:
        result: of that process; `None` in the others.
        like: a tensor of its dtype, rank and known lengths.
        gather: returns, for each copy, the rows of all processes.
    """
    values = gather(tf.zeros([0], like.dtype) if result is None else tf.reshape(result, [-1]))
    if like.shape.is_fully_defined():
        return [tf.reshape(one, like.shape) for one in values]
    shapes = gather(tf.zeros([0], tf.int32) if result is None else tf.shape(result))
    return [tf.ensure_shape(tf.reshape(one, shape), like.shape) for one, shape in zip(values, shapes, strict=True)]


def _split_replicas(rows: tf.Tensor, shard: Shard) -> list[tf.Tensor]:
    """The replicas' parts of rows that were concatenated along the first axis."""
    lengths = [size * shard.blocks for size in shard.sizes]
    unit = tf.shape(rows)[0] // sum(lengths)
    return tf.split(rows, [unit * length for length in lengths], num=len(lengths))


def _split_blocks(part: tf.Tensor, shard: Shard) -> tf.Tensor:
    lengths = tf.unstack(tf.shape(part), num=part.shape.rank)
    axis = shard.axis
    return tf.reshape(part, [*lengths[:axis], shard.blocks, lengths[axis] // shard.blocks, *lengths[axis + 1 :]])


def cut(whole: tf.Tensor, shard: Shard, replica: int) -> tf.Tensor:
    """The part of one replica of a whole value."""
    axis, sizes = shard.axis, shard.sizes
    if shard.blocks > 1:
        blocks = _split_blocks(whole, shard)
        part = cut(blocks, Shard(axis + 1, sizes), replica)
        lengths = tf.unstack(tf.shape(part), num=part.shape.rank)
        merged = lengths[axis] * lengths[axis + 1]
        return tf.reshape(part, [*lengths[:axis], merged, *lengths[axis + 2 :]])
    length = whole.shape[axis]
    length = tf.shape(whole)[axis] if length is None else length
    unit = length // shard.total
    begin, size = unit * sum(sizes[:replica]), unit * sizes[replica]
    rank = whole.shape.rank
    part = tf.slice(
        whole,
        [begin if one == axis else 0 for one in range(rank)],
        [size if one == axis else -1 for one in range(rank)],
    )
    if whole.shape[axis] is not None:
        part.set_shape([size if one == axis else known for one, known in enumerate(whole.shape)])
    return part
