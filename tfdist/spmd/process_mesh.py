"""The replicas of a partitioned step that are one per process, and exchange values by a process group."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist import spmd
from tfdist.groups import ProcessGroup, structures
from tfdist.groups import packing as gradient_reduction
from tfdist.groups.packing import Packing
from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.internals import tensorflow_variables
from tfdist.spmd.placements import Placed


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


# Of gradients, in memory at the same time: one is sent while the next one is filled.
BUFFERS = 2
# Along the first axis; of other types than numbers, as numbers.
REDUCTIONS: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "max": lambda values: tf.reduce_max(values, 0),
    "min": lambda values: tf.reduce_min(values, 0),
    "prod": lambda values: tf.reduce_prod(values, 0),
    "all": lambda values: tf.reduce_all(values, 0),
    "any": lambda values: tf.reduce_any(values, 0),
}


def _together(rows: Sequence[tf.Tensor]) -> tf.Tensor:
    return rows[0] if len(rows) == 1 else tf.concat(rows, 0)


class ProcessMesh(spmd.Mesh):
    """One replica in each process of a job, which has its own copy of the variables.

    Args:
        group: the processes of the job.
        device: of this process' replica.
        packing: of what is added up; `wire_dtype` holds for gradients alone.
        shard: see `tfdist.data_parallel.sharding`; with "optimizer" and "gradients" each process updates a part of each
            variable, and with "gradients" these are computed only as fast as they are sent, `BUFFERS` at a time.
    """

    def __init__(self, group: ProcessGroup, device: str, packing: Packing, shard: str | None = None):
        super().__init__([device])
        self.count, self.local = group.size, [group.rank]
        self._group = group
        self._packing = packing
        self._divides, self._bounded = shard is not None, shard == "gradients"
        self._exchanges = 0  # of a graph, so that names agree however often each process traces

    def compute(self) -> None:
        self._exchanges = 0

    @contextlib.contextmanager
    def trial(self) -> Iterator[None]:
        before = self._exchanges
        yield
        self._exchanges = before

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
        # Between steps the value of a metric is the sum over the processes.
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
        parts = [one[0] for one in values]
        shapes = [Placed(shard, [part], replica=self.local[0]).shape for part, shard in zip(parts, shards, strict=True)]
        found: list[Any] = [None] * len(parts)
        packed = [index for index, one in enumerate(shapes) if self._is_packed(one, shards[index], parts[index].dtype)]
        for members in self._buffers(
            [tf.TensorSpec(shapes[index], parts[index].dtype) for index in packed], packed, self._packing
        ):
            frame = Segments([shapes[index].as_list() for index in members], [shards[index] for index in members])
            mine = frame.packed_own([parts[index] for index in members], self.local[0])
            for index, whole in zip(members, frame.wholes(self._gather(mine)), strict=True):
                found[index] = [whole]
        return [
            spmd.joined_by_rows(own, shard, lambda rows: [self._gather(_together(rows))]) if whole is None else whole
            for own, shard, whole in zip(values, shards, found, strict=True)
        ]

    def _is_packed(self, shape: tf.TensorShape, shard: spmd.Shard, dtype: tf.DType) -> bool:
        """Whether parts of values of this shape are sent with others: those of variables that are updated in parts."""
        return shape.is_fully_defined() and dtype.is_floating and shard == self.parts(shape)

    def parts(self, shape: tf.TensorShape) -> spmd.Shard | None:
        if not self._divides or not shape.is_fully_defined():
            return None
        return spmd.Shard.evenly(shape.as_list(), self.count)

    def reduce_scatter(
        self, values: Sequence[Sequence[tf.Tensor]], shards: Sequence[spmd.Shard]
    ) -> list[list[tf.Tensor]]:
        terms = [parts[0] for parts in values]
        found: list[Any] = [None] * len(terms)
        received: list[tf.Tensor] = []
        for members in self._buffers(terms, range(len(terms)), self._packing):
            if self._bounded and len(received) >= BUFFERS:
                for index in members:
                    tensorflow_internals.compute_after(terms[index], received[-BUFFERS])
            frame = Segments([terms[index].shape.as_list() for index in members], [shards[index] for index in members])
            buffer = frame.packed([terms[index] for index in members])
            sent = gradient_reduction.to_wire(buffer, self._packing.wire_dtype)
            mine = self._group.reduce_scatter(sent, self._name())
            received.append(mine)
            own = frame.own(gradient_reduction.from_wire(mine, buffer.dtype), self.local[0])
            for index, part in zip(members, own, strict=True):
                found[index] = [part]
        return found

    @staticmethod
    def _buffers(tensors: Sequence[Any], numbers: Sequence[int], packing: Packing) -> list[list[int]]:
        """The `numbers` of tensors that are sent together."""
        groups = gradient_reduction.buffers(list(tensors), packing.buffer_bytes)
        return [[numbers[member] for member in members] for members in groups]

    def gathered(self, structure: Any) -> Any:
        return tf.nest.map_structure(lambda one: None if one is None else self._gather(one), structure)

    def once(self, compute: Callable[[], list[tf.Tensor]], like: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
        results = compute() if self._group.rank == 0 else [None] * len(like)
        return [
            spmd.of_one_process(result, one, lambda rows: [self._gather(rows)])
            for result, one in zip(results, like, strict=True)
        ]

    def _gather(self, rows: tf.Tensor) -> tf.Tensor:
        """The rows of all processes."""
        if rows.dtype == tf.bool:
            return tf.cast(self._gather(tf.cast(rows, tf.uint8)), tf.bool)
        return structures.gathered(rows, lambda part: self._group.all_gather(part, self._name()), self._group.rank)

    def _summed(self, tensors: Sequence[tf.Tensor], packing: Packing) -> list[tf.Tensor]:
        def add(sent: list[Any]) -> list[Any]:
            return self._group.all_reduce(sent, self._name())

        return gradient_reduction.packed(add, packing)(list(tensors)) if tensors else []

    def _name(self) -> str:
        self._exchanges += 1
        return f"step.{self._exchanges}"
