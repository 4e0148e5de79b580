"""The stages of one process, and the micro-batches that they compute: `pipeline`, and an option of other strategies.

A micro-batch is a replica in time: this process's part of the global batch is split into `micro_batches` parts, which
share one copy of the variables, as the replicas of `custom` do (`tfdist.pipeline_parallel.pipeline_mesh`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_stages
from tfdist.pipeline_parallel import delayed, plan
from tfdist.pipeline_parallel.plan import Balance, Plan
from tfdist.pipeline_parallel.schedule import DELAYED, Schedule
from tfdist.profiling import stages as stage_names

if TYPE_CHECKING:
    from tfdist.interface.program import Steps

# The number of examples in a micro-batch for measuring times if the batch size is unknown.
UNKNOWN_BATCH = 32


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
