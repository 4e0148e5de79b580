"""The option `stages` of a strategy of several processes: a pipeline in each process, and gradients added over all.

    micro-batches of all processes    the parts of a global batch: those of rank 0, then those of rank 1, ...
    within a process                  added on the device of their stage, see `tfdist.pipeline_parallel.local_stages`
    between processes                 packed, and added by the process group

Every process has the whole model, on its own devices.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfdist import spmd
from tfdist.data_parallel import sharding
from tfdist.errors import UsageError
from tfdist.interface import devices as device_choice
from tfdist.interface import gpus as _gpus
from tfdist.jobs.world import World
from tfdist.options import Count
from tfdist.pipeline_parallel.local_stages import Stages
from tfdist.pipeline_parallel.pipeline_mesh import PipelineMesh, PipelinesMesh
from tfdist.pipeline_parallel.plan import Balance
from tfdist.pipeline_parallel.schedule import Synchronous
from tfdist.spmd.process_mesh import ProcessMesh
from tfdist.training import job_strategy as collective

if TYPE_CHECKING:
    from tfdist.interface.program import Program, Steps


def require_nothing_of_stages(given: Mapping[str, Any]) -> None:
    """Raises `UsageError` if options of a pipeline were `given` to a process that has none."""
    for name, value in given.items():
        raise UsageError(
            f"`{name}` is `{value}`, and a process trains its whole model in one stage",
            f"set `stages` to the number of devices of a process, or leave `{name}` out",
        )


class StagingStrategy(sharding.ShardingStrategy, collective.MultiProcessStrategy):
    """A strategy of several processes, each of which can train with a pipeline on devices of its own.

    Args:
        stages: the number of stages, each on a device of the process; 1 trains without a pipeline.
        micro_batches: the parts of the batch of a process, 4 unless set.
        schedule: see `tfdist.strategies.pipeline.PipelineStrategy`, "gpipe" unless set.
        balance: see `tfdist.strategies.pipeline.PipelineStrategy`, "time" unless set.
        options: see `tfdist.data_parallel.sharding.ShardingStrategy` and
            `tfdist.training.job_strategy.MultiProcessStrategy`.
    """

    def __init__(
        self,
        *,
        stages: Count = 1,
        micro_batches: Count | None = None,
        schedule: Synchronous | None = None,
        balance: Balance | None = None,
        job_settings: Mapping[str, str] | None = None,
        **options: Any,
    ):
        given = {"micro_batches": micro_batches, "schedule": schedule, "balance": balance}
        given = {name: value for name, value in given.items() if value is not None}
        if stages == 1:
            require_nothing_of_stages(given)
        self._count = stages
        self._how: dict[str, Any] = {"micro_batches": 4, "schedule": "gpipe", "balance": "time"} | given
        self._stages: Stages | None = None
        alike = {name: str(value) for name, value in ({"stages": stages} | self._how).items()}
        super().__init__(job_settings=dict(job_settings or {}) | alike, **options)
        if self.shard is not None and self.is_staged:
            raise UsageError(
                f"`shard` is `{self.shard}` and `stages` is more than 1, and they cannot be used together yet",
                "leave one of them out",
            )

    def choose_devices(self, wanted: int | str | Sequence[str] | None) -> list[str]:
        if self._count == 1 or wanted is not None:
            return super().choose_devices(wanted)
        own = _gpus.of_process(World.detect(os.environ), os.environ)
        if 0 < len(own) < self._count:
            raise UsageError(
                f"`stages` is {self._count}, and a process of `{self.name}` has {len(own)} GPUs",
                f"use `stages={len(own)}`, or fewer processes on this machine",
            )
        return _gpus.use_only(own[: self._count]) or device_choice.choose(self._count)

    def make_mesh(self) -> spmd.Mesh:
        if self._count == 1:
            return ProcessMesh(self.group, self.devices[0], self.packing, self.shard)
        self._stages = Stages(self.devices, **self._how)
        pipeline = self.devices, self._stages.micro_batches, self._stages.schedule
        several = self.world.world_size > 1
        return PipelinesMesh(*pipeline, self.group, self.packing) if several else PipelineMesh(*pipeline)

    @property
    def is_staged(self) -> bool:
        """Whether each process has several stages."""
        return self._stages is not None

    @contextlib.contextmanager
    def tracing(self, model: Any) -> Iterator[None]:
        with super().tracing(model), contextlib.nullcontext() if self._stages is None else self._stages.tracing():
            yield

    @property
    def replica_devices(self) -> list[str]:
        return self._mesh.devices if isinstance(self._mesh, PipelineMesh) else super().replica_devices

    @property
    def alone(self) -> bool:
        return self._stages is None and super().alone

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        return super().scope() if self._stages is None else tf.device("CPU:0")

    def check(self, model: Any) -> None:
        super().check(model)
        if self._stages is not None:
            self._stages.check(model)

    def program(self, steps: Steps) -> Program:
        if self._stages is not None:
            self._stages.place(steps, self.num_replicas)
        return super().program(steps)

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        with super().guard(), contextlib.nullcontext() if self._stages is None else self._stages.guard():
            yield

    def stages_of(self, model: Any) -> list[dict[str, Any]]:
        return [] if self._stages is None else self._stages.described(model)

    def options(self) -> dict[str, Any]:
        return super().options() | {"stages": self._count} | (self._how if self._stages is not None else {})
