"""A pipeline on the devices of one process: its stages, and the micro-batches that they compute.

It is the strategy `pipeline`, and an option of other strategies. A micro-batch is a replica in time: this process's
part of the global batch is split into `micro_batches` parts, which share one copy of the variables and the devices, as
the replicas of `custom` do.

Each operation of the model is computed on the device of its stage, which its name in the traced step shows
(`schedule.task_of`). Other operations are computed on the device of the variable that they use, or else of their last
input.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist import spmd
from tfdist.errors import UsageError
from tfdist.groups import ProcessGroup
from tfdist.groups.packing import Packing
from tfdist.interface.program import Steps
from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_stages
from tfdist.pipeline_parallel import delayed, plan
from tfdist.pipeline_parallel.plan import Balance, Plan
from tfdist.pipeline_parallel.schedule import DELAYED, Schedule, order_tasks
from tfdist.profiling import stages as stage_names
from tfdist.spmd.process_mesh import ProcessMesh

# The number of examples in a micro-batch for measuring times if the batch size is unknown.
UNKNOWN_BATCH = 32


class Stages:
    """Divides models into stages, one on each of `devices`, and runs their steps.

    Args:
        devices: the devices of this process, one per stage.
        micro_batches: the number of micro-batches of this process.
        schedule: the order in which a stage computes them, see `tfdist.pipeline_parallel.schedule`.
        balance: what is balanced between the stages: "time", which is measured, or "memory".
        named: the name of the first layer of each stage after the first; `None` lets `balance` choose.

    Raises:
        UsageError: the numbers of named layers and devices do not match, or a device is named twice.
    """

    def __init__(
        self, devices: Sequence[str], micro_batches: int, schedule: Schedule, balance: Balance, named: Any = None
    ):
        plan.require_number_of_names(named, len(devices), "devices", "set `devices={}`")
        if len(set(devices)) < len(devices):
            raise UsageError(f"`devices` is {', '.join(devices)}, which repeats a device", "name each device once")
        if len({device.partition(":")[0] for device in devices}) > 1:
            raise UsageError(
                f"`devices` is {', '.join(devices)}, which are of two kinds",
                "use only GPUs, or only logical devices of the CPU",
            )
        self.devices, self.micro_batches, self.schedule = devices, micro_batches, schedule
        self._balance, self._named = balance, named
        self._plans: dict[int, Plan] = {}  # by the `id` of the plan's `functional`

    def check(self, model: Any) -> None:
        """Raises `UsageError` for a model that cannot be cut into these stages, or trained with the schedule."""
        if self.schedule == DELAYED:
            delayed.require_keras_step(model)
        if len(self.devices) > 1:
            plan.require_cuttable(model, len(self.devices))

    def place(self, steps: Steps, replicas: int) -> None:
        """Moves the variables of the model to the devices of their stages; a batch is split into `replicas` parts."""
        self.check(steps.model)
        if len(self.devices) > 1:
            require_examples(steps, replicas, self.micro_batches)
            for optimizer in keras_internals.optimizers(steps.model):
                if steps.kind == "train" and not optimizer.built:  # an eager step would create slots on the CPU
                    optimizer.build(steps.model.trainable_variables)
            plan.place(self._plan(steps, replicas), self.devices, steps.model)

    def plan_of(self, model: Any) -> Plan | None:
        """Returns the plan of `model`; `None` before it is first trained or used, and for one stage."""
        return self._plans.get(id(keras_stages.functional_of(model)))

    def _plan(self, steps: Steps, replicas: int) -> Plan:
        made = self.plan_of(steps.model)
        if made is None:
            part = examples_of_part(getattr(steps.batches, "batch_size", None), replicas)
            made = plan.make(steps.model, len(self.devices), self._named, self._balance, part, self.micro_batches)
            self._plans[id(made.functional)] = made
        return made

    def tracing(self) -> contextlib.AbstractContextManager[None]:
        """The context in which a step is traced, with operations on and named after their stages."""
        return plan.on_stages(self._plans, self.devices)

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """The context of all work, in which an error says which stage has run out of memory."""
        try:
            yield
        except tf.errors.ResourceExhaustedError as error:
            numbers = stage_names.stage_and_micro_batch(str(error))
            if numbers is None:
                raise
            stage = numbers[0]
            layers = next((made.layers_of(stage) for made in self._plans.values()), [])
            raise UsageError(
                f"Stage {stage} ({', '.join(layers)}) ran out of memory on {self.devices[stage]}",
                'use more micro-batches or more stages, `balance="memory"`, or a smaller batch',
            ) from None

    def described(self, model: Any) -> list[dict[str, Any]]:
        """Returns the device, layers and parameters of each stage of `model`; empty before it is cut."""
        made = self.plan_of(model)
        return [] if made is None else made.described(self.devices)


def examples_of_part(examples: int | None, replicas: int) -> int:
    """Returns the number of examples in each of `replicas` parts of a batch with `examples`, which may be unknown."""
    return UNKNOWN_BATCH if examples is None else max(1, examples // replicas)


def require_examples(steps: Steps, replicas: int, micro_batches: int) -> None:
    """Raises `UsageError` for training with fewer examples per batch than `replicas`."""
    examples = getattr(steps.batches, "batch_size", None)
    if steps.kind == "train" and examples is not None and examples < replicas:
        pipelines = replicas // micro_batches
        raise UsageError(
            f"`micro_batches` is {micro_batches}, and a batch has {examples} examples"
            + (f" for {pipelines} processes" if pipelines > 1 else ""),
            f"use at most {max(1, examples // pipelines)}, or a larger batch",
        )


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


def warn_of_gpipe(schedule: Schedule) -> None:
    """Warns that a step uses `gpipe`, because no micro-batch can finish before all have begun."""
    late = ", with its delayed gradients" if schedule == DELAYED else ""
    warnings.warn(
        "Micro-batches exchange values within a step, so that none can finish before all have begun: the schedule "
        f"`gpipe` is used in place of `{schedule}`{late}",
        stacklevel=2,
    )


def _reduced_in_turn(terms: Sequence[tf.Tensor], reduction: str) -> tf.Tensor:
    """Reduces terms one by one, so that each can be freed before the next one is computed."""
    with tf.device(terms[0].device or None):
        return functools.reduce(lambda total, term: spmd.reduced([total, term], reduction), terms)


def _device_of(inputs: Sequence[tf.Tensor]) -> str | None:
    """Returns the device of the variable that an operation uses, or else of its last input whose device is known."""
    placed = [tensor for tensor in inputs if tensor.device]
    variables = (tensor.device for tensor in placed if tensor.dtype == tf.resource)
    return next(variables, placed[-1].device if placed else None)
