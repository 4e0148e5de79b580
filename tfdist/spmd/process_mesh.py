"""The mesh of a job with one replica per process, which exchange values through a process group."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist import spmd
from tfdist.groups import ProcessGroup, structures
from tfdist.groups.packing import Packing, buffers, from_wire, packed, to_wire
from tfdist.internals import tensorflow_graphs, tensorflow_variables
from tfdist.spmd.placements import Placed


class Segments:
    """The layout of several sharded values in a buffer of N segments of equal length, one segment per rank.

    Args:
        shapes: the global shapes of the values.
        shards: their placements, each with one block.
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

    def packed(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        """The buffer that holds global values: `[N * length]`."""
        if self._is_contiguous:
            return tf.reshape(values[0], [-1])
        parts_by_value = [
            tf.split(value, lengths, shard.axis)
            for value, lengths, shard in zip(values, self._lengths, self._shards, strict=True)
        ]
        return tf.concat(
            [self.packed_parts([parts[rank] for parts in parts_by_value], rank) for rank in self._ranks], 0
        )

    def packed_parts(self, parts: Sequence[tf.Tensor], rank: int) -> tf.Tensor:
        """The segment of one rank, `[length]`, from its shards."""
        flat = [tf.reshape(part, [-1]) for part in parts]
        padding = self._length - sum(self._sizes[rank])
        return flat[0] if len(flat) == 1 and not padding else tf.concat([*flat, tf.zeros([padding], flat[0].dtype)], 0)

    def parts(self, segment: tf.Tensor, rank: int) -> list[tf.Tensor]:
        """The shards of one rank, from its segment."""
        sizes = self._sizes[rank]
        pieces = tf.split(segment, [*sizes, self._length - sum(sizes)])
        return [tf.reshape(pieces[value], self._part(value, rank)) for value in range(len(sizes))]

    def values(self, buffer: tf.Tensor) -> list[tf.Tensor]:
        """The global values, from the segments of all ranks, `[N * length]`."""
        if self._is_contiguous:
            return [tf.reshape(buffer, self._shapes[0])]
        segments = tf.split(tf.reshape(buffer, [len(self._ranks) * self._length]), len(self._ranks))
        parts_by_rank = [self.parts(segment, rank) for rank, segment in enumerate(segments)]
        return [
            tf.concat([parts[value] for parts in parts_by_rank], shard.axis) for value, shard in enumerate(self._shards)
        ]

    @property
    def _is_contiguous(self) -> bool:
        """Whether the buffer is a single value, whose shards are contiguous in memory."""
        return len(self._shards) == 1 and self._shards[0].axis == 0 and len(set(self._lengths[0])) == 1

    def _part(self, value: int, rank: int) -> list[int]:
        shape = list(self._shapes[value])
        shape[self._shards[value].axis] = self._lengths[value][rank]
        return shape


# The number of gradient buffers in memory at the same time: one is sent while the next one is filled.
_BUFFERS = 2
# Reductions along the first axis.
REDUCTIONS: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "max": lambda values: tf.reduce_max(values, 0),
    "min": lambda values: tf.reduce_min(values, 0),
    "prod": lambda values: tf.reduce_prod(values, 0),
    "all": lambda values: tf.reduce_all(values, 0),
    "any": lambda values: tf.reduce_any(values, 0),
}


class ProcessMesh(spmd.Mesh):
    """One replica per process of a job; each process has its own copy of the variables.

    Args:
        group: the process group of the job.
        device: the device of this process's replica.
        packing: how values are packed for an all-reduce; `wire_dtype` applies to gradients only.
        shard: `None`, "optimizer" or "gradients", see `tfdist.data_parallel.sharding`. With a value, each process
            updates a shard of each variable; with "gradients", at most two gradient buffers are in memory.
    """

    def __init__(self, group: ProcessGroup, device: str, packing: Packing, shard: str | None = None):
        super().__init__([device])
        self.count, self.local = group.size, [group.rank]
        self._group = group
        self._packing = packing
        self._shards_updates, self._bounds_buffers = shard is not None, shard == "gradients"
        self._exchanges = 0  # per graph, so that names agree however often each process traces

    def compute(self) -> None:
        self._exchanges = 0

    @contextlib.contextmanager
    def trial(self) -> Iterator[None]:
        exchanges = self._exchanges
        yield
        self._exchanges = exchanges

    @contextlib.contextmanager
    def branches(self) -> Iterator[Callable[[tf.Tensor], None]]:
        with self._group.around_branches():
            yield self._group.note_branches

    def begin(self, variables: Sequence[Any]) -> None:
        copies = [tensorflow_variables.copies(variable)[0] for variable in variables]
        for copy, total in zip(
            copies, self._summed([copy.read_value() for copy in copies], Packing(None)), strict=True
        ):
            copy.assign(total)

    def end(self, variables: Sequence[Any]) -> None:
        # Between calls the value of a metric is the sum over the processes, so all but one of them hold zero.
        for variable in variables if self._group.rank else ():
            copy = tensorflow_variables.copies(variable)[0]
            copy.assign(tf.zeros_like(copy))

    def terms(self, variable: Any) -> list[tf.Tensor] | None:
        return [copy.handle for copy in tensorflow_variables.copies(variable)]

    def all_reduce(
        self, values: Sequence[Sequence[tf.Tensor]], reduction: str, gradients: bool = False
    ) -> list[list[tf.Tensor]]:
        terms = [parts[0] for parts in values]
        if reduction != "sum":
            return [[REDUCTIONS[reduction](self._gather(term[tf.newaxis]))] for term in terms]
        packing = self._packing if gradients else Packing(self._packing.buffer_bytes)
        return [[total] for total in self._summed(terms, packing)]

    def all_gather(self, values: Sequence[Sequence[tf.Tensor]], shards: Sequence[spmd.Shard]) -> list[list[tf.Tensor]]:
        parts = [of_replicas[0] for of_replicas in values]
        shapes = [Placed(shard, [part], replica=self.local[0]).shape for part, shard in zip(parts, shards, strict=True)]
        results: list[Any] = [None] * len(parts)
        packable = [n for n, shape in enumerate(shapes) if self._is_packed(shape, shards[n], parts[n].dtype)]
        specs = [tf.TensorSpec(shapes[n], parts[n].dtype) for n in packable]
        for members in self._buffers(specs, packable):
            layout = Segments([shapes[n].as_list() for n in members], [shards[n] for n in members])
            segment = layout.packed_parts([parts[n] for n in members], self.local[0])
            for n, value in zip(members, layout.values(self._gather(segment)), strict=True):
                results[n] = [value]

        def gather(rows: Sequence[tf.Tensor]) -> list[tf.Tensor]:  # of one replica, or of several micro-batches
            return [self._gather(rows[0] if len(rows) == 1 else tf.concat(rows, 0))]

        return [
            spmd.gathered_by_rows(of_replicas, shard, gather) if result is None else result
            for of_replicas, shard, result in zip(values, shards, results, strict=True)
        ]

    def _is_packed(self, shape: tf.TensorShape, shard: spmd.Shard, dtype: tf.DType) -> bool:
        """Whether shards of this global shape share a buffer with others: those of variables with sharded updates."""
        return shape.is_fully_defined() and dtype.is_floating and shard == self.parts(shape)

    def parts(self, shape: tf.TensorShape) -> spmd.Shard | None:
        if not self._shards_updates or not shape.is_fully_defined():
            return None
        return spmd.Shard.evenly(shape.as_list(), self.count)

    def reduce_scatter(
        self, values: Sequence[Sequence[tf.Tensor]], shards: Sequence[spmd.Shard]
    ) -> list[list[tf.Tensor]]:
        terms = [of_replicas[0] for of_replicas in values]
        results: list[Any] = [None] * len(terms)
        received: list[tf.Tensor] = []
        for members in self._buffers(terms, range(len(terms))):
            if self._bounds_buffers and len(received) >= _BUFFERS:
                for n in members:
                    tensorflow_graphs.compute_after(terms[n], received[-_BUFFERS])
            layout = Segments([terms[n].shape.as_list() for n in members], [shards[n] for n in members])
            buffer = layout.packed([terms[n] for n in members])
            segment = self._group.reduce_scatter(to_wire(buffer, self._packing.wire_dtype), self._name())
            received.append(segment)
            parts = layout.parts(from_wire(segment, buffer.dtype), self.local[0])
            for n, part in zip(members, parts, strict=True):
                results[n] = [part]
        return results

    def _buffers(self, tensors: Sequence[Any], numbers: Sequence[int]) -> list[list[int]]:
        """Groups the `numbers` of tensors by the buffer in which the tensors are sent."""
        groups = buffers(list(tensors), self._packing.buffer_bytes)
        return [[numbers[member] for member in members] for members in groups]

    def gathered(self, structure: Any) -> Any:
        return tf.nest.map_structure(lambda rows: None if rows is None else self._gather(rows), structure)

    def once(self, compute: Callable[[], list[tf.Tensor]], like: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
        results = compute() if self._group.rank == 0 else [None] * len(like)
        return [
            spmd.broadcast_by_gathering(result, tensor, lambda rows: [self._gather(rows)])
            for result, tensor in zip(results, like, strict=True)
        ]

    def _gather(self, rows: tf.Tensor) -> tf.Tensor:
        if rows.dtype == tf.bool:
            return tf.cast(self._gather(tf.cast(rows, tf.uint8)), tf.bool)
        return structures.gathered(rows, lambda part: self._group.all_gather(part, self._name()), self._group.rank)

    def _summed(self, tensors: Sequence[tf.Tensor], packing: Packing) -> list[tf.Tensor]:
        def all_reduce(tensors: list[Any]) -> list[Any]:
            return self._group.all_reduce(tensors, self._name())

        return packed(all_reduce, packing)(list(tensors)) if tensors else []

    def _name(self) -> str:
        self._exchanges += 1
        return f"step.{self._exchanges}"
