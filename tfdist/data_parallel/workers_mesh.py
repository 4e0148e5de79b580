"""TensorFlow's collective operations between the replicas of several processes: rings over gRPC, and NCCL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from tfdist import spmd
from tfdist.data_parallel.mirrored_mesh import MirroredMesh, copies_of_sum
from tfdist.groups import CARRIED_AS, structures
from tfdist.groups import packing as gradient_reduction
from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.jobs.world import World
from tfdist.spmd.process_mesh import REDUCTIONS


class WorkersMesh(MirroredMesh):
    """The replicas of several processes, which exchange values by TensorFlow's collective operations.

    Args:
        strategy: the `tf.distribute.Strategy`.
        devices: the devices of this process's replicas.
        world: the job.
        packing: how tensors are packed for an all-reduce; `wire_dtype` is used for gradients only.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        devices: Sequence[str],
        world: World,
        packing: gradient_reduction.Packing,
    ):
        super().__init__(strategy, devices)
        self.count = len(devices) * world.world_size
        self.local = range(len(devices) * world.rank, len(devices) * (world.rank + 1))
        self._is_chief = world.is_chief
        self._packing = packing

    def begin(self, variables: Sequence[Any]) -> None:
        for copies in filter(None, map(copies_of_sum, variables)):
            (totals,) = self.all_reduce([[copy.read_value() for copy in copies]], "sum")
            for copy, total in zip(copies, totals, strict=True):
                copy.assign(total)

    def end(self, variables: Sequence[Any]) -> None:
        for variable in variables:
            for copy in copies_of_sum(variable)[int(self._is_chief) :]:
                copy.assign(tf.zeros_like(copy))

    def terms(self, variable: Any) -> list[tf.Tensor] | None:
        return [copy.handle for copy in copies_of_sum(variable)] or None

    def all_reduce(
        self, values: Sequence[Sequence[tf.Tensor]], reduction: str, gradients: bool = False
    ) -> list[list[tf.Tensor]]:
        if reduction != "sum":
            rows = [[part[tf.newaxis] for part in parts] for parts in values]
            return [[REDUCTIONS[reduction](copy) for copy in self._gather(parts)] for parts in rows]
        packing = self._packing if gradients else replace(self._packing, wire_dtype=None)
        groups = gradient_reduction.buffers([parts[0] for parts in values], packing.buffer_bytes)
        sums: list[list[tf.Tensor]] = [[] for _ in values]
        for members in groups:
            buffers = [
                gradient_reduction.to_wire(
                    gradient_reduction.joined([values[index][position] for index in members]), packing.wire_dtype
                )
                for position in range(self.copies)
            ]
            (totals,) = super().all_reduce([buffers], "sum")
            like = [values[index][0] for index in members]
            for total in totals:
                pieces = gradient_reduction.split(gradient_reduction.from_wire(total, like[0].dtype), like)
                for index, piece in zip(members, pieces, strict=True):
                    sums[index].append(piece)
        return sums

    def all_gather(self, values: Sequence[Sequence[tf.Tensor]], shards: Sequence[spmd.Shard]) -> list[list[tf.Tensor]]:
        return [spmd.gathered_by_rows(parts, shard, self._gather) for parts, shard in zip(values, shards, strict=True)]

    def gathered(self, structure: Any) -> Any:
        rank = self.local[0] // self.copies
        return structures.gathered(structure, lambda rows: self._gather_from_first_replicas(rows)[0], rank)

    def once(self, compute: Callable[[], list[tf.Tensor]], like: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
        with self.on_copy(0):
            results = compute() if self._is_chief else [None] * len(like)
        return [
            spmd.broadcast_by_gathering(result, tensor, self._gather_from_first_replicas)
            for result, tensor in zip(results, like, strict=True)
        ]

    def _gather_from_first_replicas(self, rows: tf.Tensor) -> list[tf.Tensor]:
        """The rows from the first replica of each process, concatenated, on each copy."""
        return self._gather([rows, *[rows[:0]] * (self.copies - 1)])

    def _gather(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The rows of all replicas of the job, concatenated, on each copy."""
        dtype = parts[0].dtype
        sent = [tf.identity(_as_gathered(part)) for part in parts]
        with self._strategy.scope():
            gathered = self._strategy.gather(tensorflow_internals.per_replica(sent), axis=0)
        rows = tf.bitcast(gathered, dtype) if _is_bitcast(parts[0]) else tf.cast(gathered, dtype)
        return self._on_each_copy(tf.identity, rows)


def _as_gathered(tensor: tf.Tensor) -> tf.Tensor:
    """`tensor` in a dtype that collectives can gather, without loss."""
    if _is_bitcast(tensor):
        return tf.bitcast(tensor, CARRIED_AS[tensor.dtype])
    if tensor.dtype in (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64):
        return tensor
    return tf.cast(tensor, tf.float32 if tensor.dtype.is_floating else tf.int32)


def _is_bitcast(tensor: tf.Tensor) -> bool:
    return tensor.dtype != tf.bfloat16 and tensor.dtype in CARRIED_AS
