"""Data parallelism over the processes of a job: every process has the variables, and each step sums the gradients.

    process group       joins the processes: MPI, Horovod, sockets, or TensorFlow's collectives
    optimizer state     whole in each process, or sharded over the processes
    stages              one per process, or a pipeline on its devices
    mesh                exchanges what the partitioned step needs

See `tfdist.groups`, `tfdist.data_parallel.sharding`, `tfdist.pipeline_parallel.local_pipeline` and `tfdist.spmd`.
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
from tfdist.interface.program import Program, Steps
from tfdist.interface.variables import Variables
from tfdist.jobs.world import World
from tfdist.options import Count
from tfdist.pipeline_parallel.local_pipeline import PipelineMesh, PipelinesMesh, Stages
from tfdist.pipeline_parallel.plan import Balance
from tfdist.pipeline_parallel.schedule import Synchronous
from tfdist.spmd.process_mesh import ProcessMesh
from tfdist.training.job_strategy import JobStrategy


class DataParallel(JobStrategy):
    """Trains on all processes of a job, with the result of one device.

    Args:
        compression: the dtype in which gradients are sent: "none" is their own, "bf16" and "fp16" take half the bytes;
            `multiworker` does not have "fp16".
        buffer_bytes: gradients below this size are sent together, in buffers of this size; `None` is 1 MiB, or with
            more than eight processes 128 KiB per process, since rings send each process's part of a buffer separately.
        dense_below_bytes: sparse gradients of tables below this size are sent as dense tensors; not for adaptive
            optimizers, see `tfdist.groups.ProcessGroup`.
        shard: "optimizer" or "gradients" shards the state of optimizers over the processes, see
            docs/sharding.md; `None` keeps the whole state in each process.
        speeds: sizes of the replicas' parts of a global batch in proportion to each other, such as "3,1"; "auto"
            measures them; `None` makes them equal. See `tfdist.interface.speeds`.
        stages: the number of stages of a pipeline in each process, each on its own device; 1 trains without a pipeline.
        micro_batches: the number of parts of a process's batch in a pipeline; default: 4.
        schedule: the schedule of a pipeline, see `tfdist.strategies.pipeline.PipelineOptions`; default: "gpipe".
        balance: the balance of a pipeline, see `tfdist.strategies.pipeline.PipelineOptions`; default: "time".
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
        self._stage_count = stages
        self._pipeline = _pipeline_options(
            stages, {"micro_batches": micro_batches, "schedule": schedule, "balance": balance}
        )
        self._stages: Stages | None = None
        self._state: ShardedState | None = None
        # Processes that send buffers of different dtypes or sizes would add unrelated values, or wait forever.
        same_settings = {
            "compression": compression,
            "buffer_bytes": buffer_bytes,
            "dense_below_bytes": dense_below_bytes,
            "shard": shard,
            "stages": stages,
            **self._pipeline,
        }
        settings = dict(job_settings or {}) | {name: str(value) for name, value in same_settings.items()}
        super().__init__(job_settings=settings, **options)
        self.divide_by_speeds(speeds)
        if compression != "none":
            self.compare_first_step = False  # rounded gradients differ by design

    @property
    def packing(self) -> Packing:
        """How gradients are packed to be sent."""
        default = costs.buffer_bytes(self.world.world_size)
        buffer_bytes = default if self._buffer_bytes is None else self._buffer_bytes
        return Packing(buffer_bytes, self.wire_dtypes[self.compression])

    def choose_devices(self, wanted: int | str | Sequence[str] | None) -> list[str]:
        if not self.is_staged or wanted is not None:
            return super().choose_devices(wanted)
        process_gpus = device_choice.gpus_of_process(World.detect(os.environ), os.environ)
        if 0 < len(process_gpus) < self._stage_count:
            raise UsageError(
                f"`stages` is {self._stage_count}, and a process of `{self.name}` has {len(process_gpus)} GPUs",
                f"use `stages={len(process_gpus)}`, or fewer processes on this machine",
            )
        return device_choice.use_only_gpus(process_gpus[: self._stage_count]) or device_choice.choose(self._stage_count)

    def set_up(self) -> None:
        super().set_up()
        self.group.dense_below_bytes = self._dense_below_bytes
        if self.shard is None:
            return
        if not self.group.carries_tensors:
            raise UsageError(
                f"`shard` is `{self.shard}`, and the processes exchange tensors by TensorFlow's collectives",
                'use `communication="sockets"`, with one device per process, or the strategy `horovod`',
            )
        if self._stages is not None:
            raise UsageError(
                f"`shard` is `{self.shard}` and `stages` is more than 1, and they cannot be used together",
                "leave out one of them",
            )
        self._state = ShardedState(self.shard, self.group, self)

    @property
    def shard(self) -> str | None:
        """What is sharded over the processes; `None` for a single process."""
        return self._shard if self.world.world_size > 1 else None

    def make_mesh(self) -> spmd.Mesh:
        if not self.is_staged:
            return ProcessMesh(self.group, self.devices[0], self.packing, self.shard)
        self.variables = Variables("CPU:0", in_parts=True)
        self._stages = Stages(self.devices, **self._pipeline)
        pipeline = self.devices, self._stages.micro_batches, self._stages.schedule
        if self.world.world_size == 1:
            return PipelineMesh(*pipeline)
        return PipelinesMesh(*pipeline, self.group, self.packing)

    @property
    def replica_devices(self) -> list[str]:
        return self._mesh.devices if isinstance(self._mesh, PipelineMesh) else super().replica_devices

    @property
    def alone(self) -> bool:
        return not self.is_staged and super().alone

    @property
    def is_staged(self) -> bool:
        """Whether each process trains with a pipeline of several stages."""
        return self._stage_count > 1

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
        shards = None if optimizer is None else sharding.sharded(optimizer)
        return super().place_of_update(optimizer) if shards is None else shards.place

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
            "stages": self._stage_count,
            **(self._pipeline if self._stages is not None else {}),
        }


def _pipeline_options(stages: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the pipeline in each process, with their defaults in place of `None`.

    Raises:
        UsageError: an option of a pipeline is set, and there is only one stage.
    """
    is_set = {name: value for name, value in options.items() if value is not None}
    for name, value in is_set.items() if stages == 1 else ():
        raise UsageError(
            f"`{name}` is `{value}`, and a process trains its whole model in one stage",
            f"set `stages` to the number of devices of a process, or leave `{name}` out",
        )
    return {"micro_batches": 4, "schedule": "gpipe", "balance": "time"} | is_set
