"""The option `stages` of a strategy of several processes: a pipeline in each process, and gradients added over all.

    micro-batches of all processes    the parts of a global batch: those of rank 0, then those of rank 1, ...
    within a process                  added on the device of their stage, see `tfdist.strategies._stages`
    between processes                 packed, and added by the communicator

Every process has the whole model, on its own devices.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfdist.cluster.world import World
from tfdist.communicators import Communicator, opaque, structures
from tfdist.core import gradient_reduction
from tfdist.errors import UsageError
from tfdist.internals.keras import tf_variable
from tfdist.options import Count
from tfdist.stages.plan import Balance
from tfdist.stages.schedule import Synchronous
from tfdist.strategies import _collective as collective
from tfdist.strategies import _devices as device_choice
from tfdist.strategies import _gpus, base
from tfdist.strategies import _sharding as sharding
from tfdist.strategies._process_mesh import ProcessMesh
from tfdist.strategies._stages import MicroBatch, Stages
from tfdist.strategies._towers import meet

if TYPE_CHECKING:
    from tfdist.core.inner_loop import Program, Steps


class MicroBatchOfJob(MicroBatch):
    """A micro-batch of one of several processes; `names` gives a name to each exchange of the step."""

    def __init__(
        self,
        index: int,
        stages: Stages,
        communicator: Communicator,
        packing: gradient_reduction.Packing,
        names: Iterator[str],
    ):
        first, count = communicator.rank * stages.micro_batches, communicator.size * stages.micro_batches
        super().__init__(first + index, count, stages.home)
        self.packing = packing
        self._communicator, self._names = communicator, names

    def of_all_processes(self, sums: list[Any], packing: gradient_reduction.Packing | None) -> list[Any]:
        def send(tensors: list[Any]) -> list[Any]:
            return self._communicator.all_reduce(tensors, next(self._names)) if tensors else []

        return send(sums) if packing is None else gradient_reduction.packed(send, packing)(sums)

    def all_gather(self, structure: Any) -> Any:
        def gather(part: tf.Tensor) -> tf.Tensor:
            return self._communicator.all_gather(part, next(self._names))

        def join(strategy: tf.distribute.Strategy, *parts: Any) -> list[Any]:
            with tf.device(self._home):
                joined = base.joined_parts(strategy, *parts)
                return [structures.gathered(one, gather, self._communicator.rank) for one in joined]

        flat = tf.nest.flatten(structure)
        return tf.nest.pack_sequence_as(structure, meet(join, flat) if flat else [])

    def read_metric(self, variables: Sequence[Any]) -> list[tf.Tensor]:
        # The micro-batches of a process share its part of the state.
        def add(strategy: tf.distribute.Strategy, *parts: Any) -> list[Any]:
            first = [strategy.experimental_local_results(part)[0] for part in parts]
            return self.of_all_processes(first, gradient_reduction.Packing(None))

        values = [tf.convert_to_tensor(tf_variable(variable)) for variable in variables]
        return meet(add, values) if values else []

    def write_metric(self, updates: list[tuple[Any, tf.Tensor]]) -> None:
        # With a constant rank TensorFlow would drop the value's computation, exchanges included, on a process.
        first = opaque(tf.constant(self._communicator.rank == 0))
        self.write([(variable, tf.where(first, value, tf.zeros_like(value))) for variable, value in updates])


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
        options: see `tfdist.strategies._sharding.ShardingStrategy` and
            `tfdist.strategies._collective.MultiProcessStrategy`.
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

    def set_up(self) -> None:
        super().set_up()
        divides, bounded = self.shard is not None, self.shard == "gradients"
        self._mesh = ProcessMesh(self.communicator, self.devices[0], self.packing, divides=divides, bounded=bounded)
        if self._count > 1:
            self._stages = Stages(self.devices, **self._how)

    @property
    def is_staged(self) -> bool:
        """Whether each process has several stages."""
        return self._stages is not None

    @property
    def mesh(self) -> ProcessMesh | None:
        return None if self.is_staged else self._mesh

    @property
    def replica_devices(self) -> list[str]:
        staged = self._stages
        return super().replica_devices if staged is None else [staged.home] * staged.micro_batches

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

    def run(self, step: base.Step) -> list[Any]:
        return super().run(step) if self._stages is None else self._stages.run(step, self._tower(self._stages))

    def _tower(self, stages: Stages) -> Callable[[int], MicroBatch]:
        names = (f"step.{number}" for number in itertools.count(1))
        if self.world.world_size == 1:
            return lambda index: MicroBatch(index, stages.micro_batches, stages.home)
        return lambda index: MicroBatchOfJob(index, stages, self.communicator, self.packing, names)

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        with super().guard(), contextlib.nullcontext() if self._stages is None else self._stages.guard():
            yield

    def stages_of(self, model: Any) -> list[dict[str, Any]]:
        return [] if self._stages is None else self._stages.described(model)

    def options(self) -> dict[str, Any]:
        return super().options() | {"stages": self._count} | (self._how if self._stages is not None else {})
