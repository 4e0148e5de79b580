"""The micro-batches of a pipeline as replicas of a partitioned step: replicas in time that share the devices.

Each operation of the model is computed on the device of its stage, which its name in the traced step shows
(`schedule.task_of`). Other operations are computed on the device of the variable that they use, or
else of their last input.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfdist import spmd
from tfdist.groups import ProcessGroup
from tfdist.groups.packing import Packing
from tfdist.pipeline_parallel.schedule import DELAYED, Schedule, order_tasks
from tfdist.profiling import stages as stage_names
from tfdist.spmd.process_mesh import ProcessMesh


class PipelineMesh(spmd.Mesh):
    """The micro-batches of one process, whose stages are on `devices`.

    Args:
        devices: the device of each stage.
        micro_batches: the number of micro-batches of the process.
        schedule: the order in which a stage computes them.
    """

    def __init__(self, devices: Sequence[str], micro_batches: int, schedule: Schedule):
        spmd.Mesh.__init__(self, [devices[-1]] * micro_batches)  # the device on which the loss is computed
        self.home = None
        self.stage_devices, self._schedule = devices, schedule
        self._stage: int | None = None
        self._device: str | None = None

    @contextlib.contextmanager
    def computing(self, operation: tf.Operation, inputs: Sequence[tf.Tensor]) -> Iterator[None]:
        previous = self._stage, self._device
        numbers = stage_names.stage_and_micro_batch(operation.name)
        if numbers is not None:
            self._stage, self._device = numbers[0], self.stage_devices[numbers[0]]
        elif self._stage is None:
            self._device = _device_of(inputs)
        try:
            yield
        finally:
            self._stage, self._device = previous

    @contextlib.contextmanager
    def on_replica(self, position: int) -> Iterator[None]:
        with tf.device(self._device or self.devices[position]), contextlib.ExitStack() as stack:
            if self._stage is not None:
                scope = tf.get_current_name_scope()
                name = stage_names.scope(self._stage, self.number(position))
                stack.enter_context(tf.name_scope(f"{scope}/{name}/" if scope else f"{name}/"))
            yield

    def number(self, position: int) -> int:
        """Returns the number of a micro-batch in the schedule."""
        return position

    def on_copy(self, position: int) -> contextlib.AbstractContextManager[None]:
        if len(self.local) == 1:  # nothing is split, so a copy is computed like the replica
            return self.on_replica(position)
        return tf.device(self._device)

    def all_reduce(
        self, values: Sequence[Sequence[tf.Tensor]], reduction: str, gradients: bool = False
    ) -> list[list[tf.Tensor]]:
        del gradients
        return [[_reduced_in_turn(terms, reduction)] for terms in values]

    def all_gather(self, values: Sequence[Sequence[tf.Tensor]], shards: Sequence[spmd.Shard]) -> list[list[tf.Tensor]]:
        results = []
        for parts, shard in zip(values, shards, strict=True):
            with tf.device(parts[-1].device or None):
                results.append([spmd.joined(parts, shard)])
        return results

    def computed(self) -> None:
        if len(self.stage_devices) == 1 or len(self.local) == 1 or tf.executing_eagerly():
            return
        graph = tf.compat.v1.get_default_graph()
        possible = order_tasks(graph, self._schedule, self.stage_devices, len(self.local))
        if not possible and self._schedule != "gpipe":
            warn_of_gpipe(self._schedule)


def warn_of_gpipe(schedule: Schedule) -> None:
    """Warns that a step uses `gpipe`, because no micro-batch can finish before all have begun."""
    late = ", with its delayed gradients" if schedule == DELAYED else ""
    warnings.warn(
        "Micro-batches exchange values within a step, so that none can finish before all have begun: the schedule "
        f"`gpipe` is used in place of `{schedule}`{late}",
        stacklevel=2,
    )


class PipelinesMesh(PipelineMesh, ProcessMesh):
    """The micro-batches of all processes of a job, each of which has its own pipeline.

    Args:
        devices: the devices of this process, one per stage.
        micro_batches: the number of micro-batches of each process.
        schedule: the order in which a stage computes them.
        group: the processes of the job.
        packing: how all-reduces are packed into messages.
    """

    def __init__(
        self,
        devices: Sequence[str],
        micro_batches: int,
        schedule: Schedule,
        group: ProcessGroup,
        packing: Packing,
    ):
        ProcessMesh.__init__(self, group, devices[-1], packing)
        PipelineMesh.__init__(self, devices, micro_batches, schedule)
        first = group.rank * micro_batches
        self.count, self.local = group.size * micro_batches, range(first, first + micro_batches)

    def all_reduce(
        self, values: Sequence[Sequence[tf.Tensor]], reduction: str, gradients: bool = False
    ) -> list[list[tf.Tensor]]:
        totals = [[_reduced_in_turn(terms, reduction)] for terms in values]
        return ProcessMesh.all_reduce(self, totals, reduction, gradients)

    def all_gather(self, values: Sequence[Sequence[tf.Tensor]], shards: Sequence[spmd.Shard]) -> list[list[tf.Tensor]]:
        return ProcessMesh.all_gather(self, values, shards)

    def terms(self, variable: object) -> None:
        """Returns `None`, because the micro-batches of a process share its variables."""
        del variable


def _reduced_in_turn(terms: Sequence[tf.Tensor], reduction: str) -> tf.Tensor:
    """Reduces terms one by one, so that each can be freed before the next one is computed."""
    with tf.device(terms[0].device or None):
        return functools.reduce(lambda total, term: spmd.reduced([total, term], reduction), terms)


def _device_of(inputs: Sequence[tf.Tensor]) -> str | None:
    """Returns the device of the variable that an operation uses, or else of its last input whose device is known."""
    placed = [tensor for tensor in inputs if tensor.device]
    variables = (tensor.device for tensor in placed if tensor.dtype == tf.resource)
    return next(variables, placed[-1].device if placed else None)
