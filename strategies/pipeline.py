"""`pipeline`: stages of one model on several devices of this machine.

A micro-batch is a replica in time: the global batch is cut into `micro_batches` parts, which share one copy of the
variables, as the towers of `custom` do. What makes uneven parts, masks, metrics and clipping exact for replicas on
several devices makes them exact here. The operations of the model are cut into contiguous stages; each stage, its
gradients, its variables and their slots are on its own device, and while one stage computes a micro-batch, the stage
before it computes the next one.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import tensorflow as tf
from pydantic import BeforeValidator

from tfdist.cluster.world import World
from tfdist.errors import UsageError
from tfdist.internals import keras_stages
from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.options import Count
from tfdist.stages import ordering, placement, plan
from tfdist.stages.plan import Balance, Plan
from tfdist.stages.schedule import Schedule
from tfdist.strategies import base
from tfdist.strategies._stages_of_processes import StagesOfProcesses
from tfdist.strategies._towers import Tower
from tfdist.strategies._traits import Traits

if TYPE_CHECKING:
    from tfdist.core.inner_loop import Program, Steps

# The examples of a micro-batch that times are measured with where the size of a batch is not known.
UNKNOWN_BATCH = 32

Names = Annotated[
    Sequence[str] | None, BeforeValidator(lambda given: given.split(",") if isinstance(given, str) else given)
]


class PipelineStrategy(base.Strategy):
    """Trains on all GPUs, or on two logical CPU devices, unless `devices` is set; one stage on each.

    Args:
        micro_batches: the parts of a global batch that go through the stages one after the other; 1 is layer-wise
            model parallelism, where one device computes at a time.
        schedule: the order in which a stage computes them: "gpipe" or "1f1b", see `tfdist.stages.schedule`.
        balance: what is made even between the stages: "time", measured, or "memory".
        stages: the name of the first layer of each stage but the first; `None` lets `balance` choose.
        options: see `tfdist.strategies.base.Strategy`.
    """

    name = "pipeline"
    default_cpus = 2

    def __new__(cls, **options: Any) -> Any:
        """In a job of several processes, the strategy with a stage in each of them."""
        if World.detect(os.environ).world_size > 1:
            return StagesOfProcesses(**options)
        return super().__new__(cls)

    def __init__(
        self,
        *,
        micro_batches: Count = 4,
        schedule: Schedule = "gpipe",
        balance: Balance = "time",
        stages: Names = None,
        **options: Any,
    ):
        self._micro_batches, self._schedule, self._balance, self._named = micro_batches, schedule, balance, stages
        self._plans: dict[int, Plan] = {}  # by the `id` of the graph that a plan holds
        super().__init__(**options)

    def set_up(self) -> None:
        if self._named is not None and len(self._named) != len(self.devices) - 1:
            raise UsageError(
                f"`stages` names the first layer of {len(self._named)} stages after the first, and there are "
                f"{len(self.devices)} devices",
                f"name {len(self.devices) - 1} layers, or set `devices={len(self._named) + 1}`",
            )
        if len(set(self.devices)) < len(self.devices):
            raise UsageError(f"`devices` is {', '.join(self.devices)}, which has one twice", "name each device once")
        # The towers begin and end where the loss is computed: on the device of the last stage.
        self._towers = tensorflow_internals.replicas_in_time(self.devices[-1], self._micro_batches)

    @property
    def replica_devices(self) -> list[str]:
        return [self.devices[-1]] * self._micro_batches

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        # A model may be too large for any one of the devices. Its variables move to them when it is cut.
        return tf.device("CPU:0")

    def check(self, model: Any) -> None:
        if len(self.devices) > 1:
            plan.require_cuttable(model, len(self.devices))

    def program(self, steps: Steps) -> Program:
        if len(self.devices) > 1:
            plan.require_cuttable(steps.model, len(self.devices))
            placement.place(self._plan(steps), self.devices, steps.model)
        return super().program(steps)

    def plan_of(self, model: Any) -> Plan | None:
        """The stages of `model`, once it has been trained or used; `None` before, and for one stage."""
        return self._plans.get(id(keras_stages.functional_of(model)))

    def _plan(self, steps: Steps) -> Plan:
        found = self.plan_of(steps.model)
        if found is None:
            examples = getattr(steps.batches, "batch_size", None)
            part = UNKNOWN_BATCH if examples is None else max(1, examples // self._micro_batches)
            found = plan.make(steps.model, len(self.devices), self._named, self._balance, part, self._micro_batches)
            self._plans[id(found.functional)] = found
        return found

    def run(self, step: base.Step) -> list[Any]:
        home = self.devices[-1]

        def on_tower() -> Any:
            index = base.current_index()
            with placement.on_stages(self._plans, self.devices, index):
                return step(Tower(index, self._micro_batches, home))

        results = base.local_results(self._towers, self._towers.run(on_tower))
        if len(self.devices) > 1 and not tf.executing_eagerly():
            self._order(tf.compat.v1.get_default_graph())
        return results

    def _order(self, graph: Any) -> None:
        possible = ordering.order(graph, self._schedule, self.devices, self._micro_batches)
        if not possible and self._schedule == "1f1b":
            warnings.warn(
                "Micro-batches meet in the middle of a step, so that none can finish before all have begun: the "
                "schedule `gpipe` is used in place of `1f1b`",
                stacklevel=2,
            )

    def stages_of(self, model: Any) -> list[dict[str, Any]]:
        found = self.plan_of(model)
        if found is None:
            return []
        return [
            {"device": device, "layers": found.layers_of(stage), "parameters": found.parameters_of(stage)}
            for stage, device in enumerate(self.devices)
        ]

    def options(self) -> dict[str, Any]:
        own = {"micro_batches": self._micro_batches, "schedule": self._schedule, "balance": self._balance}
        return super().options() | own | {"stages": self._named and list(self._named)}


STRATEGY = PipelineStrategy
TRAITS = Traits(processes=True)
