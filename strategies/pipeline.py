"""`pipeline`: stages of one model on several devices, or in several processes. For a model that does not fit on one
device.

The operations of the model are cut into contiguous stages. Each stage has its own device, with its gradients, variables
and slots; while a stage computes a micro-batch, the stage before it computes the next micro-batch. The step of a single
device is partitioned for the micro-batches as it is for replicas (`tfdist.spmd`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tfdist.interface.program import Program, Steps
from tfdist.interface.traits import Traits
from tfdist.jobs.world import World
from tfdist.options import Count
from tfdist.pipeline_parallel import delayed
from tfdist.pipeline_parallel.local_pipeline import PipelineMesh, Stages
from tfdist.pipeline_parallel.plan import Balance, LayerNames, Plan
from tfdist.pipeline_parallel.schedule import DELAYED, Schedule
from tfdist.pipeline_parallel.stages_of_processes import StagesOfProcesses
from tfdist.strategies import base


class PipelineOptions(base.Strategy):
    """The options of `pipeline`, whose stages are on the devices of one process or in the processes of a job.

    Args:
        micro_batches: the number of parts of a global batch, which go through the stages one after the other; 1 is
            layer-wise model parallelism, where only one device computes at a time.
        schedule: the order in which a stage computes micro-batches: "gpipe", "1f1b", or "2bw", which takes gradients at
            the weights from before the last update; see docs/pipeline.md.
        balance: what the stages have equal amounts of: "time", which is measured, or "memory".
        stages: the name of the first layer of each stage except the first; `None` chooses by `balance`.
        options: see `tfdist.strategies.base.Strategy`, and in a job `tfdist.training.job_strategy.JobStrategy`.
    """

    name = "pipeline"

    def __init__(
        self,
        *,
        micro_batches: Count = 4,
        schedule: Schedule = "gpipe",
        balance: Balance = "time",
        stages: LayerNames = None,
        **options: Any,
    ):
        self.micro_batches, self.schedule, self.balance, self.first_layers = micro_batches, schedule, balance, stages
        self.as_one_device = schedule != DELAYED
        super().__init__(**options)

    def options(self) -> dict[str, Any]:
        pipeline = {"micro_batches": self.micro_batches, "schedule": self.schedule, "balance": self.balance}
        return super().options() | pipeline | {"stages": self.first_layers and list(self.first_layers)}


class PipelineStrategy(PipelineOptions):
    """Trains with one stage per device: all GPUs, or two logical CPU devices, unless `devices` is set.

    In a job of several processes, each trains one stage. For the options see `PipelineOptions`.
    """

    default_cpus = 2

    @classmethod
    def of_job(cls, world: World) -> type[base.Strategy]:
        return PipelineOfProcesses if world.world_size > 1 else cls

    def set_up(self) -> None:
        self._stages = Stages(self.devices, self.micro_batches, self.schedule, self.balance, self.first_layers)
        self._mesh = PipelineMesh(self.devices, self.micro_batches, self.schedule)

    @property
    def mesh(self) -> PipelineMesh:
        return self._mesh

    def tracing(self, model: Any) -> contextlib.AbstractContextManager[None]:
        return self._stages.tracing()

    @property
    def replica_devices(self) -> list[str]:
        return self._mesh.devices

    @property
    def single_threaded(self) -> bool:
        return len(self.devices) == 1 and super().single_threaded

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        # A model may be too large for a single device; its variables move to the devices when it is cut into stages.
        return tf.device("CPU:0")

    def check(self, model: Any) -> None:
        self._stages.check(model)

    def program(self, steps: Steps) -> Program:
        self._stages.place(steps, self.num_replicas)
        is_delayed = delayed.is_delayed(self.schedule, steps.kind)
        return delayed.program(self, steps) if is_delayed else super().program(steps)

    def check_callbacks(self, callbacks: Iterable[Any]) -> None:
        super().check_callbacks(callbacks)
        if not self.as_one_device:
            delayed.refuse_backups_within_epochs(callbacks)

    def before_checkpoint(self, model: Any) -> None:
        delayed.before_checkpoint(model)

    def plan_of(self, model: Any) -> Plan | None:
        """The stages of `model`; `None` for a single stage, and before the model is first used."""
        return self._stages.plan_of(model)

    def guard(self) -> contextlib.AbstractContextManager[Any]:
        return self._stages.guard()

    def stages_of(self, model: Any) -> list[dict[str, Any]]:
        return self._stages.described(model)


class PipelineOfProcesses(PipelineOptions, StagesOfProcesses):
    """Trains one stage in each process of a job; for the options see `PipelineOptions`."""


STRATEGY = PipelineStrategy
TRAITS = Traits(processes=True)
