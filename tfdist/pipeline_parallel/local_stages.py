"""The stages of one process, and the micro-batches that go through them: what `pipeline` is, and an option of others.

A micro-batch is a replica in time: the part of the global batch that this process has is cut into `micro_batches`
parts, which share one copy of the variables, as the replicas of `custom` do (`tfdist.pipeline_parallel.pipeline_mesh`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_stages
from tfdist.pipeline_parallel import delayed, placement, plan
from tfdist.pipeline_parallel.plan import Balance, Plan
from tfdist.pipeline_parallel.schedule import Schedule
from tfdist.profiling import stages as stage_names

if TYPE_CHECKING:
    from tfdist.interface.program import Steps

# The examples of a micro-batch that times are measured with where the size of a batch is not known.
UNKNOWN_BATCH = 32


def examples_of_part(examples: int | None, replicas: int) -> int:
    """The examples of each of the `replicas` parts of a batch, which has `examples`, if that is known."""
    return UNKNOWN_BATCH if examples is None else max(1, examples // replicas)


def require_examples(steps: Steps, replicas: int, micro_batches: int) -> None:
    """Raises `UsageError` for training on batches of fewer examples than their `replicas` parts."""
    examples = getattr(steps.batches, "batch_size", None)
    if steps.kind == "train" and examples is not None and examples < replicas:
        pipelines = replicas // micro_batches
        raise UsageError(
            f"`micro_batches` is {micro_batches}, and a batch has {examples} examples"
            + (f" for {pipelines} processes" if pipelines > 1 else ""),
            f"use at most {max(1, examples // pipelines)}, or a larger batch",
        )


class Stages:
    """Cuts models into stages, one on each of `devices`, and runs their steps.

    Args:
        devices: of this process, one for each stage.
        micro_batches: the parts of a batch of this process.
        schedule: the order in which a stage computes them, see `tfdist.pipeline_parallel.schedule`.
        balance: what is made even between the stages: "time", measured, or "memory".
        named: the name of the first layer of each stage but the first; `None` lets `balance` choose.

    Raises:
        UsageError: another number of layers is named than there are devices, or a device is there twice.
    """

    def __init__(
        self, devices: Sequence[str], micro_batches: int, schedule: Schedule, balance: Balance, named: Any = None
    ):
        if named is not None and len(named) != len(devices) - 1:
            raise UsageError(
                f"`stages` names the first layer of {len(named)} stages after the first, and there are "
                f"{len(devices)} devices",
                f"name {len(devices) - 1} layers, or set `devices={len(named) + 1}`",
            )
        if len(set(devices)) < len(devices):
            raise UsageError(f"`devices` is {', '.join(devices)}, which has one twice", "name each device once")
        if len({device.partition(":")[0] for device in devices}) > 1:
            raise UsageError(
                f"`devices` is {', '.join(devices)}, which are of two kinds",
                "use GPUs alone, or the logical devices of the CPU",
            )
        self.devices, self.micro_batches = devices, micro_batches
        self._schedule, self._balance, self._named = schedule, balance, named
        self._plans: dict[int, Plan] = {}  # by the `id` of the graph that a plan holds

    def check(self, model: Any) -> None:
        """Raises `UsageError` for a model that cannot be cut into that many stages, or trained by the schedule."""
        if self._schedule == delayed.NAME:
            delayed.require_steps_of_keras(model)
        if len(self.devices) > 1:
            plan.require_cuttable(model, len(self.devices))

    def place(self, steps: Steps, replicas: int) -> None:
        """Puts the variables of the model of `steps` on the devices of their stages; a batch has `replicas` parts."""
        self.check(steps.model)
        if len(self.devices) > 1:
            require_examples(steps, replicas, self.micro_batches)
            for optimizer in keras_internals.optimizers(steps.model):
                if steps.kind == "train" and not optimizer.built:  # an eager step would make its slots in the scope
                    optimizer.build(steps.model.trainable_variables)
            placement.place(self._plan(steps, replicas), self.devices, steps.model)

    def plan_of(self, model: Any) -> Plan | None:
        """The stages of `model`, once it has been trained or used; `None` before, and for one stage."""
        return self._plans.get(id(keras_stages.functional_of(model)))

    def _plan(self, steps: Steps, replicas: int) -> Plan:
        found = self.plan_of(steps.model)
        if found is None:
            part = examples_of_part(getattr(steps.batches, "batch_size", None), replicas)
            found = plan.make(steps.model, len(self.devices), self._named, self._balance, part, self.micro_batches)
            self._plans[id(found.functional)] = found
        return found

    def tracing(self) -> contextlib.AbstractContextManager[None]:
        """The context in which a step is traced, whose operations are named by their stages."""
        return placement.on_stages(self._plans, self.devices)

    @property
    def schedule(self) -> Schedule:
        """The order in which a stage computes its micro-batches."""
        return self._schedule

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """The context of all work; its errors say which stage has run out of memory."""
        try:
            yield
        except tf.errors.ResourceExhaustedError as error:
            place = stage_names.found_in(str(error))
            if place is None:
                raise
            raise self._exhausted(place[0]) from None

    def _exhausted(self, stage: int) -> UsageError:
        layers = next(iter({tuple(found.layers_of(stage)) for found in self._plans.values()}), ())
        return UsageError(
            f"Stage {stage} ({', '.join(layers)}) ran out of memory on {self.devices[stage]}",
            'use more micro-batches or more stages, `balance="memory"`, or a smaller batch',
        )

    def described(self, model: Any) -> list[dict[str, Any]]:
        """The device, layers and parameters of each stage of `model`; empty before it is cut."""
        found = self.plan_of(model)
        if found is None:
            return []
        return [
            {"device": device, "layers": found.layers_of(stage), "parameters": found.parameters_of(stage)}
            for stage, device in enumerate(self.devices)
        ]
