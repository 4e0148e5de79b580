"""Data parallelism over the processes of a job: a copy of every variable in each, and gradients added in each step.

It is made of

    a process group       which `join` makes: MPI, Horovod, sockets, TensorFlow's collectives
    the state's place     whole in each process, or sharded over them (`tfdist.data_parallel.sharding`)
    stages                one in each process, or a pipeline on its devices (`tfdist.pipeline_parallel.local_stages`)
    a mesh                which exchanges what the partitioned step of one device needs
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import tensorflow as tf

from tfdist import spmd
from tfdist.data_parallel import sharding
from tfdist.data_parallel.sharding import ShardedState
from tfdist.errors import UnknownNameError, UsageError
from tfdist.groups.packing import Packing
from tfdist.groups.sockets import costs
from tfdist.interface import devices as device_choice
from tfdist.interface import gpus
from tfdist.interface.program import Program, Steps
from tfdist.interface.variables import Variables
from tfdist.jobs.world import World
from tfdist.options import Count
from tfdist.pipeline_parallel.local_stages import Stages
from tfdist.pipeline_parallel.pipeline_mesh import PipelineMesh, PipelinesMesh
from tfdist.pipeline_parallel.plan import Balance
from tfdist.pipeline_parallel.schedule import Synchronous
from tfdist.spmd.process_mesh import ProcessMesh
from tfdist.training.job_strategy import JobStrategy


class DataParallel(JobStrategy):
    """Trains on all processes of a job, and ends with the result of one device.

    Args:
        compression: the type in which gradients are sent: "none" is their own, "bf16" and "fp16" take half the bytes.
        buffer_bytes: gradients below this size are sent together, in buffers of this size; `None` is 1 MiB, and 128 KiB
            per process from nine processes on, since rings send each process' part of a buffer by itself.
        dense_below_bytes: sparse gradients of tables below this size are sent as dense tensors; not for adaptive
            optimizers, see `tfdist.groups.ProcessGroup`.
        shard: "optimizer" or "gradients" divides the state of optimizers over the processes, see
            `tfdist.data_parallel.sharding`; `None` leaves the whole state in each process.
        speeds: sizes of the replicas' parts of a global batch in proportion to each other, such as "3,1"; "auto"
            measures them; `None` makes them equal. See `tfdist.interface.speeds`.
        stages: the number of stages of a pipeline in each process, each on a device of the process; 1 trains without a
            pipeline.
        micro_batches: the parts of the batch of a process in a pipeline, 4 unless set.
        schedule: of a pipeline, see `tfdist.strategies.pipeline.PipelineStrategy`, "gpipe" unless set.
        balance: of a pipeline, see `tfdist.strategies.pipeline.PipelineStrategy`, "time" unless set.
        options: see `tfdist.training.job_strategy.JobStrategy`.
    """

    wire_dtypes: ClassVar[Mapping[str, tf.DType | None]] = {"none": None, "bf16": tf.bfloat16, "fp16": tf.float16}

    def __init__(
        self,
        *,
        compression: str = "none",
        buffer_bytes: int | None = None,
        dense_below_bytes: int = 0,
        shard: str | None = None,
        speeds: str | Sequence[int] | None = None,
        stages: Count = 1,
        micro_batches: Count | None = None,
        schedule: Synchronous | None = None,
        balance: Balance | None = None,
        job_settings: Mapping[str, str] | None = None,
        **options: Any,
    ):
        if compression not in self.wire_dtypes:
            raise UnknownNameError("compression", compression, self.wire_dtypes)
        if shard is not None and shard not in sharding.KINDS:
            raise UnknownNameError("shard", shard, sharding.KINDS)
        self.compression = compression
        self._buffer_bytes, self._dense_below_bytes = buffer_bytes, dense_below_bytes
        self._shard = shard
        self._count = stages
        self._pipeline = _pipeline(stages, {"micro_batches": micro_batches, "schedule": schedule, "balance": balance})
        self._stages: Stages | None = None
        self._state: ShardedState | None = None
        # Processes that sent buffers of different types or sizes would add up what does not belong together, or wait.
        alike = {
            "compression": compression,
            "buffer_bytes": buffer_bytes,
            "dense_below_bytes": dense_below_bytes,
            "shard": shard,
            "stages": stages,
            **self._pipeline,
        }
        super().__init__(
            job_settings=dict(job_settings or {}) | {name: str(value) for name, value in alike.items()}, **options
        )
        self.divide_by_speeds(speeds)
        if compression != "none":
            self.compare_first_step = False  # what is rounded on its way differs by choice

    @property
    def packing(self) -> Packing:
        """How gradients are packed to be sent."""
        chosen = costs.buffer_bytes(self.world.world_size) if self._buffer_bytes is None else self._buffer_bytes
        return Packing(chosen, self.wire_dtypes[self.compression])

    def choose_devices(self, wanted: int | str | Sequence[str] | None) -> list[str]:
        if not self.is_staged or wanted is not None:
            return super().choose_devices(wanted)
        own = gpus.of_process(World.detect(os.environ), os.environ)
        if 0 < len(own) < self._count:
            raise UsageError(
                f"`stages` is {self._count}, and a process of `{self.name}` has {len(own)} GPUs",
                f"use `stages={len(own)}`, or fewer processes on this machine",
            )
        return gpus.use_only(own[: self._count]) or device_choice.choose(self._count)

    def set_up(self) -> None:
        super().set_up()
        self.group.dense_below_bytes = self._dense_below_bytes
        if self.shard is None:
            return
        if not self.group.carries_tensors:
            raise UsageError(
                f"`shard` is `{self.shard}`, and the processes exchange tensors by TensorFlow's own collectives",
                'use `communication="sockets"`, with one device per process, or the strategy `horovod`',
            )
        if self._stages is not None:
            raise UsageError(
                f"`shard` is `{self.shard}` and `stages` is more than 1, and they cannot be used together yet",
                "leave one of them out",
            )
        self._state = ShardedState(self.shard, self.group, self)

    @property
    def shard(self) -> str | None:
        """What is divided over the processes; `None` where there is only one."""
        return self._shard if self.world.world_size > 1 else None

    def make_mesh(self) -> spmd.Mesh:
        if not self.is_staged:
            return ProcessMesh(self.group, self.devices[0], self.packing, self.shard)
        self.variables = Variables("CPU:0", in_parts=True)
        self._stages = Stages(self.devices, **self._pipeline)
        pipeline = self.devices, self._stages.micro_batches, self._stages.schedule
        several = self.world.world_size > 1
        return PipelinesMesh(*pipeline, self.group, self.packing) if several else PipelineMesh(*pipeline)

    @property
    def replica_devices(self) -> list[str]:
        return self._mesh.devices if isinstance(self._mesh, PipelineMesh) else super().replica_devices

    @property
    def alone(self) -> bool:
        return not self.is_staged and super().alone

    @property
    def is_staged(self) -> bool:
        """Whether each process trains with a pipeline of several stages."""
        return self._count > 1

    def check(self, model: Any) -> None:
        super().check(model)
        if self._stages is not None:
            self._stages.check(model)

    def program(self, steps: Steps) -> Program:
        if self._stages is not None:
            self._stages.place(steps, self.num_replicas)
        return super().program(steps)

    @contextlib.contextmanager
    def tracing(self, model: Any) -> Iterator[None]:
        with (
            super().tracing(model),
            contextlib.nullcontext() if self._state is None else self._state.tracing(model),
            contextlib.nullcontext() if self._stages is None else self._stages.tracing(),
        ):
            yield

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        with super().guard(), contextlib.nullcontext() if self._stages is None else self._stages.guard():
            yield

    def stages_of(self, model: Any) -> list[dict[str, Any]]:
        return [] if self._stages is None else self._stages.described(model)

    # The state of optimizers.

    def is_divided(self, optimizer: Any) -> bool:
        return sharding.sharded(optimizer) is not None

    def divide_optimizers(self, model: Any) -> None:
        if self._state is not None:
            self._state.divide_all(model, eager=self.runs_eagerly(model))

    def build_optimizer(self, model: Any, optimizer: Any, variables: Sequence[Any]) -> None:
        if self._state is None or self.runs_eagerly(model):
            super().build_optimizer(model, optimizer, variables)
        else:
            self._state.divide(model, optimizer, variables)

    def place_of_update(self, optimizer: Any) -> Callable[[tf.Variable], tf.Variable | None]:
        found = None if optimizer is None else sharding.sharded(optimizer)
        return super().place_of_update(optimizer) if found is None else found.place

    def variables_in_parts(self, model: Any) -> Mapping[int, spmd.Placed]:
        return {} if self._state is None else self._state.variables_in_parts(model)

    def keep_whole(self, model: Any, handles: Collection[int]) -> None:
        if self._state is not None:
            self._state.keep_whole(model, handles)

    def finalize_variables(self, model: Any) -> None:
        if self._state is None or self.mesh is None:
            super().finalize_variables(model)
        else:
            self._state.finalize(model, self.mesh)

    def whole_state(self, model: Any) -> contextlib.AbstractContextManager[Any]:
        return super().whole_state(model) if self._state is None else self._state.whole(model)

    def check_callbacks(self, callbacks: Iterable[Any]) -> None:
        if self._state is not None:
            self._state.check_callbacks(callbacks)

    def verify(self, model: Any, *arguments: Any, **named: Any) -> Any:
        self._refuse_verification()
        return super().verify(model, *arguments, **named)

    def prepare(self, model: Any, *, verify: bool = False) -> Any:
        if verify:
            self._refuse_verification()
        return super().prepare(model, verify=verify)

    def _refuse_verification(self) -> None:
        if self.shard is not None:
            raise UsageError(
                f"`shard` is `{self.shard}`, and a verification compares the whole state of optimizers",
                "verify the model with the same strategy without `shard`",
            )

    def options(self) -> dict[str, Any]:
        return super().options() | {
            "compression": self.compression,
            "buffer_bytes": self.packing.buffer_bytes,
            "dense_below_bytes": self._dense_below_bytes,
            "shard": self.shard,
            "stages": self._count,
            **(self._pipeline if self._stages is not None else {}),
        }


def _pipeline(stages: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the pipeline in each process.

    Raises:
        UsageError: options of a pipeline were `given` to a process that has one stage.
    """
    chosen = {name: value for name, value in given.items() if value is not None}
    for name, value in chosen.items() if stages == 1 else ():
        raise UsageError(
            f"`{name}` is `{value}`, and a process trains its whole model in one stage",
            f"set `stages` to the number of devices of a process, or leave `{name}` out",
        )
    return {"micro_batches": 4, "schedule": "gpipe", "balance": "time"} | chosen
