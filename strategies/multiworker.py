"""`multiworker`: `tf.distribute.MultiWorkerMirroredStrategy`, a copy of every variable in each process of a job.

Every process runs the same program on the same data and takes its part of each global batch. Sockets, or TensorFlow's
collectives, compute the all-reduce; the rest of Keras' step is local.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import spmd
from tfdist.data_parallel import distribute, sharding
from tfdist.data_parallel import workers_mesh as collectives
from tfdist.errors import ClusterError, DisagreementError, UnknownNameError, UsageError
from tfdist.groups import packing as gradient_reduction
from tfdist.groups.collective_counter import CollectiveCounter
from tfdist.groups.exchanged import Exchanged
from tfdist.groups.socket_group import SocketGroup
from tfdist.groups.sockets import costs
from tfdist.groups.sockets.connections import Exchange
from tfdist.interface import gpus as _gpus
from tfdist.interface.traits import Traits
from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.internals import tensorflow_patches
from tfdist.internals.keras import tf_variable
from tfdist.jobs import timeouts, watchdog
from tfdist.jobs.heartbeat import Heartbeat, Limits, gone
from tfdist.jobs.world import World
from tfdist.options import Count, checked_seconds
from tfdist.pipeline_parallel.plan import Balance
from tfdist.pipeline_parallel.schedule import Synchronous
from tfdist.pipeline_parallel.staged_workers import WIRE_DTYPES, StagedWorkers
from tfdist.pipeline_parallel.staging import require_nothing_of_stages
from tfdist.spmd.process_mesh import ProcessMesh
from tfdist.training import job_strategy as collective

SOCKETS = "sockets"
COMMUNICATIONS = {
    SOCKETS: tf.distribute.experimental.CommunicationImplementation.AUTO,  # for the first values of variables
    "auto": tf.distribute.experimental.CommunicationImplementation.AUTO,
    "ring": tf.distribute.experimental.CommunicationImplementation.RING,
    "nccl": tf.distribute.experimental.CommunicationImplementation.NCCL,
}
# Gradients in the buffers of NCCL and of TensorFlow's ring, which are sent while the next ones are computed.
BUFFER_BYTES = 32 << 20
# A firewall may drop the packets of a connection; then TensorFlow's ring is used.
SECONDS_TO_CONNECT = 10.0


class MultiWorkerStrategy(sharding.ShardingStrategy, distribute.DistributeStrategy):
    """Trains on all processes that TF_CONFIG, or Slurm, names: on all GPUs of each, or on its CPU as one device.

    Args:
        communication: how replicas exchange tensors. "ring" and "nccl" are TensorFlow's; "sockets" is faster than
            "ring" on CPUs; "auto" is NCCL where there are GPUs, else sockets if the processes can connect, else "ring".
        compression: "none", or "bf16", which sends gradients as bfloat16: half the bytes, rounded to 8 bits.
        timeout_seconds: how long a collective operation waits for processes that are silent.
        callback_timeout_seconds: how long a process may be busy, as in a callback, while others wait for it; `None`
            is without limit.
        start_timeout_seconds: how long the start waits for all processes; `None` is the launcher's setting, else 60.
        job_settings: settings that must be the same in all processes, as the versions of packages must; compared
            before TensorFlow starts.
        stages: the number of stages of a pipeline in each process; with more than 1, `micro_batches`, `schedule` and
            `balance` belong to it, see `tfdist.pipeline_parallel.staged_workers`.
        options: see `tfdist.strategies.base.Strategy`; `shard`, see `tfdist.data_parallel.sharding`.

    Raises:
        UsageError: TensorFlow has already started, the job has parameter servers, or an option is unknown.
        ClusterError: a process is missing, or has other versions or settings.
    """

    name = "multiworker"
    takes_speeds = True
    # Between calls the processes agree on the next one, and sum the metrics.
    seconds_per_call = 2.0

    def __new__(cls, *, stages: Count = 1, **options: Any) -> Any:
        """With several stages in each process, the strategy whose variables are on their devices."""
        return super().__new__(cls) if stages == 1 else StagedWorkers(stages=stages, **options)

    def __init__(
        self,
        *,
        stages: Count = 1,
        micro_batches: Count | None = None,
        schedule: Synchronous | None = None,
        balance: Balance | None = None,
        communication: str = "auto",
        compression: str = "none",
        timeout_seconds: float = 60.0,
        callback_timeout_seconds: float | None = None,
        start_timeout_seconds: float | None = None,
        job_settings: Mapping[str, str] | None = None,
        **options: Any,
    ):
        del stages  # is 1, see `__new__`
        given = {"micro_batches": micro_batches, "schedule": schedule, "balance": balance}
        require_nothing_of_stages({name: value for name, value in given.items() if value is not None})
        for kind, value, known in (
            ("communication", communication, COMMUNICATIONS),
            ("compression", compression, WIRE_DTYPES),
        ):
            if value not in known:
                raise UnknownNameError(kind, value, known)
        self.compression = compression
        self._communication = communication
        self._timeout_seconds = checked_seconds("timeout_seconds", timeout_seconds)
        self._callback_timeout_seconds = timeouts.callback_timeout_seconds(callback_timeout_seconds)
        self._start_timeout_seconds = timeouts.start_timeout_seconds(start_timeout_seconds)
        self._job_settings = dict(job_settings or {})
        super().__init__(**options)
        # The order of the examples follows from the seed, which must be the same everywhere.
        self.seed = int.from_bytes(self.exchange(self.seed.to_bytes(8, "big"))[0], "big")
        distribute.seed_tensorflow(self)

    def choose_devices(self, wanted: int | str | Sequence[str] | None) -> list[str]:
        # TensorFlow must know the cluster before it starts, so the devices are only counted here.
        own = _gpus.of_process(World.detect(os.environ), os.environ)
        available = len(own) or 1
        count = available if wanted is None else wanted
        if not isinstance(count, int) or not 1 <= count <= available:
            found = f"{available} GPU{'s' * (available > 1)}" if own else "one CPU"
            raise UsageError(
                f"`devices` is `{wanted}`, and a process of `multiworker` has {found}",
                "leave `devices` out; start more processes to use more of the machine",
            )
        return _gpus.use_only(own[:count]) or ["CPU:0"]

    def set_up(self) -> None:
        self.world = World.detect(os.environ)
        if self.world.tasks_of("ps"):
            raise UsageError(
                "`TF_CONFIG` has parameter servers, and `multiworker` has no use for them",
                "use the strategy `parameter_server`, or a cluster of workers alone",
            )
        self.world.require_addresses(self.name)
        alike = {"communication": self._communication, "compression": self.compression}
        self.tf_strategy, watch, self._collectives_counted = _join(
            self.world,
            self._collectives,
            self._timeout_seconds,
            self._start_timeout_seconds,
            tuple((self._job_settings | alike).items()),
        )
        self.group = self._connect()
        self._mesh = self._make_mesh()
        self._heartbeat = None
        if watch is not None:
            limits = Limits(self._timeout_seconds, self._callback_timeout_seconds)
            self._heartbeat = _heartbeat(self.world, self.tf_strategy, watch, self.group, limits)
        if self.group is not None:
            self.parallel_steps = 1  # sockets pair exchanges by their order

    @property
    def mesh(self) -> spmd.Mesh:
        return self._mesh

    def _make_mesh(self) -> spmd.Mesh:
        wire_dtype = WIRE_DTYPES[self.compression]
        if self.group is not None:
            packing = gradient_reduction.Packing(costs.buffer_bytes(self.num_replicas), wire_dtype)
            return ProcessMesh(self.group, self.devices[0], packing, self.shard)
        packing = gradient_reduction.Packing(BUFFER_BYTES, wire_dtype)
        return collectives.WorkersMesh(self.tf_strategy, self.devices, self.world, packing)

    @property
    def _collectives(self) -> str:
        """The `communication` for TensorFlow's collectives, which themselves choose a ring on GPUs too."""
        if self._communication != "auto" or self.devices[0] == "CPU:0":
            return self._communication
        return "ring" if _gpus.are_shared(self.world, os.environ) else "nccl"

    def _connect(self) -> SocketGroup | None:
        required = self._communication == SOCKETS
        if required and len(self.devices) > 1:
            raise UsageError(
                f"`communication` is `{SOCKETS}`, and this process has {len(self.devices)} devices",
                "start a process for each device, or use `nccl`",
            )
        wanted = required or (self._communication == "auto" and self.devices == ["CPU:0"])
        if self.world.world_size == 1 or not wanted:
            return None
        return _connected(self.world, self.tf_strategy, self._timeout_seconds, required)

    @property
    def single_threaded(self) -> bool:
        return False  # its graphs hold collectives

    def options(self) -> dict[str, Any]:
        return super().options() | {
            "communication": self._collectives if self.group is None else SOCKETS,
            "compression": self.compression,
            "timeout_seconds": self._timeout_seconds,
            "callback_timeout_seconds": self._callback_timeout_seconds,
        }

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        stack = contextlib.ExitStack()
        stack.enter_context(self.guard())
        stack.enter_context(super().scope())
        return stack

    def sum_metrics(self, variables: Sequence[Any], name: str) -> list[tf.Tensor]:
        outside = [one for one in variables if not self.is_ours(one)]
        if outside:  # an ordinary variable, which does not say whether each process has a part of the state or all
            raise self.made_outside(f"variable `{outside[0].path}` of a metric")
        if self.group is None:
            return super().sum_metrics(variables, name)
        local, in_parts = self.tf_strategy.experimental_local_results, list(map(_is_in_parts, variables))
        parts = [local(tf_variable(one))[0] for one, part in zip(variables, in_parts, strict=True) if part]
        sums = iter(collective.summed(self.group, list(map(tf.convert_to_tensor, parts)), name))
        return [
            next(sums) if part else tf.convert_to_tensor(tf_variable(one))
            for one, part in zip(variables, in_parts, strict=True)
        ]

    def exchange(self, message: bytes) -> list[bytes]:
        return _exchange_by(self.tf_strategy, self.group)(message)

    def exchanged(self) -> Exchanged | None:
        counter = self._collectives_counted if self.group is None else self.group
        return None if counter is None else counter.exchanged()

    def numbers_of_all(self, number: tf.Tensor) -> tf.Tensor:
        one = number[tf.newaxis]
        if self.group is not None:
            return self.group.all_gather(one, "numbers")
        return collectives.all_gather(self.tf_strategy)(one)[:: len(self.devices)]

    def broadcast(self, values: np.ndarray) -> np.ndarray:
        if self.group is not None:
            return self.group.broadcast_bytes(values)
        return distribute.broadcast(self.tf_strategy, values, self.world.is_chief)

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        try:
            with self._heartbeat.work() if self._heartbeat is not None else contextlib.nullcontext():
                yield
        except (tf.errors.OpError, ClusterError) as error:
            tensorflow_internals.close_pools(error)
            failure = self.group.sockets.failure if self.group is not None else None
            if failure is None and self._heartbeat is not None:
                failure = self._heartbeat.error
            if isinstance(error, ClusterError) and error is not failure:
                raise  # it names the process already
            told = self._explain(str(error), failure)
            if told is None or told is error:
                raise
            raise told from error

    def _explain(self, message: str, failure: ClusterError | None) -> ClusterError | None:
        """The error to raise for a message of TensorFlow or a failure of sockets; `None` if no other process failed."""
        if self.world.world_size == 1 or isinstance(failure, DisagreementError):
            return failure
        shapes = re.search(r"[Ss]hape mismatch.*expected shape (\[.*?\]) but another member.*shape (\[.*?\])", message)
        if shapes is not None:
            return DisagreementError(
                f"The processes of the job disagree on the model, or on the data: a tensor has the shape {shapes[1]} "
                f"in one and {shapes[2]} in another",
                "build the same model, on the same data, in all processes",
            )
        silent = set(tensorflow_internals.silent_peers(self.world, seconds=5.0))
        if silent and self._heartbeat is not None:
            silent |= set(self._heartbeat.silent())
        return gone(self.world, silent, self._timeout_seconds) if silent else failure


def _is_in_parts(variable: Any) -> bool:
    """Whether each replica has a part of `variable`, as of the state of a metric."""
    value, on_read, of_parts = tf_variable(variable), tf.VariableSynchronization.ON_READ, tf.VariableAggregation.SUM
    return value.synchronization == on_read and value.aggregation == of_parts


@functools.cache
def _heartbeat(
    world: World,
    strategy: tf.distribute.Strategy,
    watch: watchdog.Watch,
    group: SocketGroup | None,
    limits: Limits,
) -> Heartbeat:
    """The heartbeat of this process, whose threads live as long as the process."""

    def counts() -> tuple[int, int]:
        of_tensorflow, of_sockets = watch.counts(), (0, 0) if group is None else group.counts()
        return of_tensorflow[0] + of_sockets[0], of_tensorflow[1] + of_sockets[1]

    def give_up(error: ClusterError) -> None:
        if group is not None:
            group.sockets.give_up(error)
        tensorflow_internals.abort_collectives(error.sentence)

    heartbeat = Heartbeat(world, _exchange_by(strategy, group), counts, limits, give_up)
    watch.excused = heartbeat.others_are_busy
    if group is not None:
        group.sockets.excuse(heartbeat.others_are_busy)
    return heartbeat


def _exchange_by(strategy: tf.distribute.Strategy, group: SocketGroup | None) -> Exchange:
    return functools.partial(collectives.exchange, strategy) if group is None else group.exchange


@functools.cache
def _connected(
    world: World, strategy: tf.distribute.Strategy, timeout_seconds: float, required: bool
) -> SocketGroup | None:
    """Sockets that live as long as this process; `None` if the processes cannot connect and need not."""
    try:
        return SocketGroup(
            world,
            functools.partial(collectives.exchange, strategy),
            min(timeout_seconds, SECONDS_TO_CONNECT),
            timeout_seconds,
        )
    except ClusterError as error:
        if required:
            raise
        warnings.warn(f"{error.sentence}. TensorFlow's slower ring is used", RuntimeWarning, stacklevel=2)
        return None


@functools.cache
def _join(
    world: World,
    communication: str,
    timeout_seconds: float,
    start_timeout_seconds: float,
    job_settings: tuple[Any, ...],
) -> tuple[tf.distribute.MultiWorkerMirroredStrategy, watchdog.Watch | None, CollectiveCounter | None]:
    """Joins the job, which a process can do once; a job of several processes watches and counts its collectives."""
    options = tf.distribute.experimental.CommunicationOptions(implementation=COMMUNICATIONS[communication])
    if world.world_size == 1:
        return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options), None, None
    if not distribute.meet(world, "multiworker", job_settings, start_timeout_seconds):
        raise ClusterError(
            f"The job of {world.named(0)} has begun without {world.named(world.rank)}",
            "end all its processes, and start all of them again",
        )
    tensorflow_internals.configure_coordination(world.cluster(), timeout_seconds)
    task = world.task
    assert task is not None
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(world.cluster()), task_type=task.role, task_id=task.index, rpc_layer="grpc"
    )
    with tensorflow_internals.sigterm_as_it_was():
        strategy = tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver, communication_options=options)
    counter = CollectiveCounter()
    tensorflow_patches.around_collectives(counter.around)
    watch = watchdog.Watch(timeout_seconds, counter.counts, tensorflow_internals.abort_collectives)
    return strategy, watch, counter


STRATEGY = MultiWorkerStrategy
TRAITS = Traits(
    processes=True,
    elastic=True,
    options=("communication", "compression", "shard", "speeds", "timeout_seconds", "callback_timeout_seconds"),
)
