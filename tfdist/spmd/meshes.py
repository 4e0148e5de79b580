"""Device meshes: where the replicas of a partitioned step compute, and how they exchange values.

A mesh says which replicas this process computes, on which devices, and how many copies of a replicated value it holds:
one that all of its replicas read, or one per device. The partitioner builds all computation, and asks the mesh for
collectives only.
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
        devices: the devices of these replicas.
        copies: how many copies of a replicated value this process has: 1, or one per device.
        home: a device on which the whole step could be computed; `None` if the step needs several devices.
    """

    def __init__(self, devices: Sequence[str]):
        self.count = len(devices)
        self.local: Sequence[int] = range(len(devices))
        self.devices = list(devices)
        self.copies = 1
        self.home: str | None = self.devices[0]

    def on_replica(self, position: int) -> contextlib.AbstractContextManager[Any]:
        """The context for the computation of the replica at this position of `local`."""
        return tf.device(self.devices[position])

    def on_copy(self, position: int) -> contextlib.AbstractContextManager[Any]:
        """The context for the computation of this copy of replicated values."""
        return tf.device(self.devices[position])

    def copy_of_replica(self, position: int) -> int:
        """The copy of replicated values that the replica at this position of `local` reads."""
        return position if self.copies > 1 else 0

    def tensors(self, value: Placed) -> list[tf.Tensor]:
        """The tensors of a placed value; those of a constant are made in the current graph."""
        if value.tensors or value.constant is None:
            return value.tensors
        return [tf.constant(value.constant)] * self.copies

    def read(self, value: Placed, position: int) -> tf.Tensor:
        """The tensor that the replica at this position of `local` reads of a value."""
        tensors = self.tensors(value)
        return tensors[self.copy_of_replica(position) if isinstance(value.placement, Replicate) else position]

    def begin(self, variables: Sequence[Any]) -> None:
        """Sets each copy of the variables of metrics to their global value; called before the steps of a graph."""

    def end(self, variables: Sequence[Any]) -> None:
        """Sets the variables of metrics to what they hold between calls; called after the steps of a graph."""

    def compute(self) -> None:
        """Called before a graph is built; all processes of the job build the same graphs in the same order."""

    def computed(self) -> None:
        """Called when a graph has been built."""

    def written(self, write: Callable[[], Any]) -> Any:
        """The results of `write`, which builds steps in the current graph."""
        return write()

    def computing(self, operation: tf.Operation, inputs: Sequence[tf.Tensor]) -> contextlib.AbstractContextManager[Any]:
        """The context in which an operation of the one-device step is computed.

        Args:
            operation: of the one-device step.
            inputs: the first tensor of each of its inputs in the partitioned step.
        """
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def branches(self) -> Iterator[Callable[[tf.Tensor], None]]:
        """The context of a loop or a condition in which replicas may exchange values.

        Yields a function to call with a result of the loop or condition that depends on all of these exchanges.
        """
        yield lambda result: None

    def terms(self, variable: Any) -> list[tf.Tensor] | None:
        """The handles of the replicas' variables whose sum is the metric variable `variable`; `None` if it has none."""
        return None

    def captured(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        """The copies of a tensor from outside of the step, such as the handle of a variable."""
        return [tensor] * self.copies

    def is_common(self, handle: tf.Tensor) -> bool:
        """Whether all processes of the job have the variable with this handle, with the same value."""
        return True

    def all_reduce(
        self, values: Sequence[Sequence[tf.Tensor]], reduction: str, gradients: bool = False
    ) -> list[list[tf.Tensor]]:
        """Reduces partial values over the replicas.

        Args:
            values: for each value, the terms of the replicas of this process.
            reduction: "sum", "max", "min", "prod", "all" or "any".
            gradients: whether the values are gradients, which may be sent in a shorter dtype.

        Returns:
            The copies of each reduced value.
        """
        with self.on_copy(0):
            return [[reduced(terms, reduction)] for terms in values]

    def all_gather(self, values: Sequence[Sequence[tf.Tensor]], shards: Sequence[Shard]) -> list[list[tf.Tensor]]:
        """Gathers sharded values, given as the shards of the replicas of this process; returns the copies of each."""
        with self.on_copy(0):
            return [[joined(parts, shard)] for parts, shard in zip(values, shards, strict=True)]

    def parts(self, shape: tf.TensorShape) -> Shard | None:
        """How updates of a variable of this shape are sharded; `None` if every replica updates the whole variable."""
        return None

    def reduce_scatter(self, values: Sequence[Sequence[tf.Tensor]], shards: Sequence[Shard]) -> list[list[tf.Tensor]]:
        """Sums gradients and returns each replica's shards; called only for shapes that `parts` shards.

        Args:
            values: for each gradient, the terms of the replicas of this process.
            shards: the placement of each sum.
        """
        raise NotImplementedError

    def exchanging(self) -> contextlib.AbstractContextManager[Any]:
        """The context of collectives that are issued together."""
        return contextlib.nullcontext()

    def trial(self) -> contextlib.AbstractContextManager[Any]:
        """The context of collectives in a graph that is discarded."""
        return contextlib.nullcontext()

    def gathered(self, structure: Any) -> Any:
        """The examples of all processes, from a structure of this process's dense, ragged or sparse tensors."""
        return structure

    def once(self, compute: Callable[[], list[tf.Tensor]], like: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
        """The copies of the results of `compute`, which runs once in the job.

        Args:
            compute: builds the operation in the current graph.
            like: tensors with the dtypes, ranks and known lengths of the results.
        """
        with self.on_copy(0):
            return [[tensor] for tensor in compute()]


def reduced(terms: Sequence[tf.Tensor], reduction: str) -> tf.Tensor:
    """The reduction of the terms of all replicas."""
    if reduction == "sum" and len(terms) > 2:
        return tf.add_n(list(terms))
    return functools.reduce(REDUCTIONS[reduction], terms)


def joined(parts: Sequence[tf.Tensor], shard: Shard) -> tf.Tensor:
    """The global value of the shards of all replicas."""
    if shard.blocks == 1:
        return tf.concat(parts, shard.axis)
    return _merge_blocks(tf.concat([_split_blocks(part, shard) for part in parts], shard.axis + 1), shard.axis)


def gathered_by_rows(
    parts: Sequence[tf.Tensor], shard: Shard, gather: Callable[[Sequence[tf.Tensor]], list[tf.Tensor]]
) -> list[tf.Tensor]:
    """Gathers shards of any axis by a function that gathers along the first axis; returns the copies of the value.

    Args:
        parts: the shards of the replicas of this process; their rank may be unknown if the first axis is sharded.
        shard: their placement.
        gather: gathers the rows of all replicas along the first axis, and returns the copies of the result.
    """
    if parts[0].shape.rank is None:
        shape = tf.concat([[-1], tf.shape(parts[0])[1:]], 0)
        rows = [tf.reshape(part, [tf.shape(part)[0], -1]) for part in parts]
        return [tf.reshape(copy, shape) for copy in gather(rows)]
    order = [shard.axis, *(axis for axis in range(parts[0].shape.rank) if axis != shard.axis)]
    inverse = [order.index(axis) for axis in range(len(order))]
    copies = gather([tf.transpose(part, order) if shard.axis else part for part in parts])
    if shard.blocks > 1:
        copies = [joined(_split_replicas(rows, shard), shard.moved(0)) for rows in copies]
    return [tf.transpose(rows, inverse) if shard.axis else rows for rows in copies]


def broadcast_by_gathering(
    result: tf.Tensor | None, like: tf.Tensor, gather: Callable[[tf.Tensor], list[tf.Tensor]]
) -> list[tf.Tensor]:
    """Broadcasts a tensor from one process of a job to all, which may not know its shape; returns its copies.

    Args:
        result: the tensor in the process that has it; `None` in the others.
        like: a tensor with its dtype, rank and known lengths.
        gather: gathers the rows of all processes, and returns the copies of the result.
    """
    values = gather(tf.zeros([0], like.dtype) if result is None else tf.reshape(result, [-1]))
    if like.shape.is_fully_defined():
        return [tf.reshape(value, like.shape) for value in values]
    shapes = gather(tf.zeros([0], tf.int32) if result is None else tf.shape(result))
    return [tf.ensure_shape(tf.reshape(value, shape), like.shape) for value, shape in zip(values, shapes, strict=True)]


def _split_replicas(rows: tf.Tensor, shard: Shard) -> list[tf.Tensor]:
    """The replicas' shards, from their concatenation along the first axis."""
    lengths = [size * shard.blocks for size in shard.sizes]
    unit = tf.shape(rows)[0] // sum(lengths)
    return tf.split(rows, [unit * length for length in lengths], num=len(lengths))


def _split_blocks(part: tf.Tensor, shard: Shard) -> tf.Tensor:
    """Splits the sharded axis into two: the blocks, and the entries of a block."""
    lengths = tf.unstack(tf.shape(part), num=part.shape.rank)
    axis = shard.axis
    return tf.reshape(part, [*lengths[:axis], shard.blocks, lengths[axis] // shard.blocks, *lengths[axis + 1 :]])


def _merge_blocks(value: tf.Tensor, axis: int) -> tf.Tensor:
    """Merges `axis` and the axis after it: the inverse of `_split_blocks`."""
    lengths = tf.unstack(tf.shape(value), num=value.shape.rank)
    return tf.reshape(value, [*lengths[:axis], lengths[axis] * lengths[axis + 1], *lengths[axis + 2 :]])


def part_of(value: tf.Tensor, shard: Shard, replica: int) -> tf.Tensor:
    """One replica's shard of a global value."""
    axis, sizes = shard.axis, shard.sizes
    if shard.blocks > 1:
        return _merge_blocks(part_of(_split_blocks(value, shard), Shard(axis + 1, sizes), replica), axis)
    length = value.shape[axis]
    length = tf.shape(value)[axis] if length is None else length
    unit = length // shard.total
    begins: list[Any] = [0] * value.shape.rank
    lengths: list[Any] = [-1] * value.shape.rank
    begins[axis], lengths[axis] = unit * sum(sizes[:replica]), unit * sizes[replica]
    part = tf.slice(value, begins, lengths)
    if value.shape[axis] is not None:
        part.set_shape([lengths[axis] if n == axis else known for n, known in enumerate(value.shape)])
    return part


def local_lengths(tensor: tf.Tensor, value: Placed, entry: int, shard: Shard, replica: int) -> tf.Tensor:
    """A length, or a vector of lengths, with the global length at `entry` replaced by the local one; -1 stays."""
    if value.constant is not None:
        lengths = value.constant.copy()
        place = () if lengths.ndim == 0 else (entry,)
        if lengths[place] > 0:
            lengths[place] = shard.part(lengths[place], replica)
        return tf.constant(lengths)
    length = tensor if tensor.shape.rank == 0 else tensor[entry]
    part = tf.where(length > 0, shard.part(length, replica), length)
    return part if tensor.shape.rank == 0 else tf.tensor_scatter_nd_update(tensor, [[entry]], [part])
