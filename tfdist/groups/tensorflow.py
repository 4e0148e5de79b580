"""TensorFlow's own collective operations, rings over gRPC and NCCL: how `multiworker` joins its job, and its groups.

A process joins a job by `join`, before TensorFlow's server starts. TensorFlow waits for silent processes without limit;
a `Watch` ends the wait. On CPUs, `SocketsOverTensorFlow` exchanges tensors faster than TensorFlow's ring.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import startup
from tfdist.errors import ClusterError, DisagreementError, UsageError
from tfdist.groups import CollectiveCounter, ExchangeTotals, ProcessGroup, broadcast_by_sum, gathered_in_pieces
from tfdist.groups.socket_group import SocketGroup
from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.internals.tensorflow import runtime_started
from tfdist.jobs import process_exit, rendezvous, watchdog
from tfdist.jobs.connections import gone
from tfdist.jobs.heartbeat import Heartbeat
from tfdist.jobs.tf_config import Task
from tfdist.jobs.world import World


def local_results(strategy: tf.distribute.Strategy, results: Any) -> list[Any]:
    """The results of `strategy.run`, as one structure per replica of this process."""
    count = len(strategy.extended.worker_devices)
    flat = [strategy.experimental_local_results(result) for result in tf.nest.flatten(results)]
    flat = [values if len(values) == count else values * count for values in flat]  # all replicas share a single tensor
    return [tf.nest.pack_sequence_as(results, [values[index] for values in flat]) for index in range(count)]


def current_index() -> int:
    """The number of the replica that is being traced, inside `tf.distribute.Strategy.run`."""
    return int(tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group))


# Packages that must have the same version in all processes of a job.
PACKAGES = ("tfdist", "tensorflow", "keras", "numpy")
# How long TensorFlow may take after an error to find out which processes are silent.
SECONDS_TO_ASK = 5.0
MOST_OF_REASON = 200  # characters
CANNOT_LISTEN = "Could not start gRPC server"  # in TensorFlow's errors

Communication = tf.distribute.experimental.CommunicationImplementation


def versions() -> dict[str, str]:
    """The versions of the packages that must be the same in all processes."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}


def meet(world: World, strategy: str, job_settings: Iterable[tuple[str, str]], deadline_seconds: float) -> bool:
    """Waits for all processes of the job, and compares their versions and `job_settings`.

    Returns `False` if the job had already begun.

    Raises:
        UsageError: TensorFlow has already started.
        ClusterError: a process is missing, or has other versions or settings.
    """
    if runtime_started():
        raise UsageError(
            "TensorFlow has already started, and must know the cluster when it starts",
            startup.CREATE_EARLIER,
        )
    return rendezvous.meet(world, versions() | {"strategy": strategy} | dict(job_settings), deadline_seconds)


@dataclass(frozen=True)
class JoinedJob:
    """A job that this process has joined.

    Attributes:
        strategy: TensorFlow's strategy.
        watch: ends collective operations that wait too long; `None` in a job of one process.
        counter: counts the collective operations; `None` in a job of one process.
    """

    strategy: tf.distribute.MultiWorkerMirroredStrategy
    watch: watchdog.Watch | None = None
    counter: CollectiveCounter | None = None


@functools.cache
def join(
    world: World,
    communication: tf.distribute.experimental.CommunicationImplementation,
    timeout_seconds: float,
    start_timeout_seconds: float,
    job_settings: tuple[tuple[str, str], ...],
) -> JoinedJob:
    """Joins the job of `multiworker`, which a process can do once.

    Raises:
        UsageError: TensorFlow has already started.
        ClusterError: a process is missing, or has other versions or settings.
    """
    options = tf.distribute.experimental.CommunicationOptions(implementation=communication)
    if world.world_size == 1:
        return JoinedJob(tf.distribute.MultiWorkerMirroredStrategy(communication_options=options))
    if not meet(world, "multiworker", job_settings, start_timeout_seconds):
        raise rendezvous.begun_without(world)
    process_exit.end_at_failure()  # TensorFlow's destructors may wait for a lost process without limit
    tensorflow_internals.configure_coordination(world.cluster(), timeout_seconds)
    task = world.task
    assert task is not None
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(world.cluster()), task_type=task.role, task_id=task.index, rpc_layer="grpc"
    )
    too_long = TimeoutError(f"not within {start_timeout_seconds:g} s")
    with (
        tensorflow_internals.sigterm_as_it_was(),
        process_exit.limited(
            start_timeout_seconds,
            lambda: start_error(world, too_long, rendezvous.not_serving(world)),
            start_error(world, too_long, silent=()),
        ),
    ):
        strategy = tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver, communication_options=options)
    counter = CollectiveCounter()
    tensorflow_internals.around_collectives(counter.around)
    watch = watchdog.Watch(timeout_seconds, counter.counts, tensorflow_internals.abort_collectives)
    return JoinedJob(strategy, watch, counter)


def start_error(world: World, error: Exception, silent: Sequence[int]) -> ClusterError:
    """The error for a job that TensorFlow cannot start; names the other ranks, or only those that are `silent`."""
    if CANNOT_LISTEN in str(error):  # another program has taken the port since the processes met
        assert world.task is not None
        return rendezvous.cannot_listen(world.task, CANNOT_LISTEN)
    names = world.named_all(silent or [rank for rank in range(world.world_size) if rank != world.rank])
    reason = str(error).partition("\n")[0][:MOST_OF_REASON]
    return ClusterError(
        f"TensorFlow cannot connect {world.named(world.rank)} with {names} at the start: {reason}",
        "see the output of these processes, and see that the machines of the job reach all ports of each other",
    )


class TensorFlowGroup(ProcessGroup):
    """The processes of `multiworker`; messages use TensorFlow's collectives, and tensors use its strategy.

    Args:
        world: the job, and the rank of this process.
        joined: the job, as `join` returns it.
    """

    engine = "TensorFlow"
    carries_tensors = False

    def __init__(self, world: World, joined: JoinedJob):
        self.rank, self.size = world.rank, world.world_size
        self._world, self._joined = world, joined

    def numbers_of_all(self, number: tf.Tensor) -> tf.Tensor:
        strategy = self._joined.strategy
        positions = gathered_positions(self._world.tasks, strategy.extended.worker_devices)
        first_of_processes = positions[:: len(strategy.extended.worker_devices)]
        return tf.gather(all_gather(strategy)(number[tf.newaxis]), first_of_processes)

    def broadcast_bytes(self, values: np.ndarray) -> np.ndarray:
        sum_words = _sum_of_first(self._joined.strategy)
        return broadcast_by_sum(values, self.rank == 0, lambda words: sum_words(tf.constant(words)).numpy())

    def exchange(self, message: bytes) -> list[bytes]:
        return exchange(self._joined.strategy, self._world, message)

    def exchanged(self) -> ExchangeTotals:
        counter = self._joined.counter
        return super().exchanged() if counter is None else counter.exchanged()

    def counts(self) -> tuple[int, int]:
        counter = self._joined.counter
        return super().counts() if counter is None else counter.counts()

    def give_up(self, error: ClusterError) -> None:
        tensorflow_internals.abort_collectives(error.sentence)

    def excuse(self, excused: Callable[[], bool]) -> None:
        if self._joined.watch is not None:
            self._joined.watch.excused = excused

    def explained(self, error: Exception, heartbeat: Heartbeat | None, timeout_seconds: float) -> ClusterError | None:
        return _explained(self, self._world, error, heartbeat, timeout_seconds)


class SocketsOverTensorFlow(SocketGroup):
    """Sockets between the processes of `multiworker`; TensorFlow itself broadcasts the initial values of variables.

    Raises:
        ClusterError: the processes cannot be connected; raised in all of them.
    """

    def __init__(self, world: World, joined: JoinedJob, connect_timeout_seconds: float, timeout_seconds: float):
        exchange_messages = functools.partial(exchange, joined.strategy, world)
        super().__init__(world, exchange_messages, connect_timeout_seconds, timeout_seconds)
        self._world, self._joined = world, joined

    def counts(self) -> tuple[int, int]:
        begun, ended = super().counts()
        if self._joined.counter is None:
            return begun, ended
        begun_by_tensorflow, ended_by_tensorflow = self._joined.counter.counts()
        return begun + begun_by_tensorflow, ended + ended_by_tensorflow

    def give_up(self, error: ClusterError) -> None:
        super().give_up(error)
        tensorflow_internals.abort_collectives(error.sentence)

    def excuse(self, excused: Callable[[], bool]) -> None:
        super().excuse(excused)
        if self._joined.watch is not None:
            self._joined.watch.excused = excused

    def explained(self, error: Exception, heartbeat: Heartbeat | None, timeout_seconds: float) -> ClusterError | None:
        return _explained(self, self._world, error, heartbeat, timeout_seconds)


def _explained(
    group: ProcessGroup, world: World, error: Exception, heartbeat: Heartbeat | None, timeout_seconds: float
) -> ClusterError | None:
    tensorflow_internals.close_pools(error)
    failure = group.failure
    if failure is None and heartbeat is not None:
        failure = heartbeat.error
    if isinstance(error, ClusterError) and error is not failure:
        return None  # it names the process already
    if world.world_size == 1 or isinstance(failure, DisagreementError):
        return failure
    difference = _difference(str(error))
    if difference is not None:
        return DisagreementError(
            f"The processes of the job disagree on the model, or on the data: a tensor has {difference}",
            "build the same model, on the same data, in all processes",
        )
    silent = set(tensorflow_internals.silent_peers(world, seconds=SECONDS_TO_ASK))
    if silent and heartbeat is not None:
        silent |= set(heartbeat.silent())
    return gone(world, silent, timeout_seconds) if silent else failure


def _difference(error: str) -> str | None:
    """How the tensors of the processes differ, if that is TensorFlow's `error`."""
    shapes = re.search(r"[Ss]hape mismatch.*expected shape (\[.*?\]) but another member.*shape (\[.*?\])", error)
    if shapes is not None:
        return f"the shape {shapes[1]} in one and {shapes[2]} in another"
    types = re.search(r"expected type \d+ and data_type (\d+) but got type \d+ and data_type (\d+)", error)
    if types is not None:
        here, there = (tf.as_dtype(int(number)).name for number in types.groups())
        return f"the dtype {here} in one and {there} in another"
    return None


def exchange(strategy: tf.distribute.Strategy, world: World, message: bytes) -> list[bytes]:
    """The messages of all processes of the job, by rank."""
    replicas = len(strategy.extended.worker_devices)  # of this process; each of them sends the message
    positions = gathered_positions(world.tasks, strategy.extended.worker_devices)
    first_of_processes = positions[::replicas]

    def gather(piece: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
        # Collectives do not support bytes, so four of them are sent as an int32; an empty tensor would crash.
        words = np.frombuffer(piece.tobytes() + bytes(4 - len(piece) % 4), np.int32)
        lengths = np.empty(len(positions), np.int64)
        lengths[positions] = np.repeat([size // 4 + 1 for size in sizes], replicas)
        parts = np.split(all_gather(strategy)(tf.constant(words)).numpy(), np.cumsum(lengths)[:-1])
        return [parts[first].view(np.uint8)[:size] for first, size in zip(first_of_processes, sizes, strict=True)]

    length = np.array([len(message)], np.int64).view(np.int32)
    lengths = all_gather(strategy)(tf.constant(length)).numpy().view(np.int64)[first_of_processes]
    return gathered_in_pieces(message, lengths.tolist(), gather)


def gathered_positions(tasks: Sequence[Task], local_devices: Sequence[str]) -> list[int]:
    """Where TensorFlow's all-gather puts the values of each replica, by rank and local device.

    TensorFlow 2.21 orders the replicas by the names of their devices as text, in which `task:10` comes before `task:2`.

    Args:
        tasks: all processes by rank; empty in a process that was started alone.
        local_devices: the full names of the devices of this process; every process has the same number of each kind.
    """
    devices = [tf.DeviceSpec.from_string(device) for device in local_devices]
    names = [device.replace(job=task.role, task=task.index).to_string() for task in tasks for device in devices]
    names = names or list(local_devices)
    position = {name: index for index, name in enumerate(sorted(names))}
    return [position[name] for name in names]


@functools.cache
def all_gather(strategy: tf.distribute.Strategy) -> Callable[..., Any]:
    """A function that gathers an int32 vector of each replica; all processes call it together."""

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int32)], autograph=False)
    def gather(values: tf.Tensor) -> Any:
        def on_replica() -> Any:
            # A tensor from outside the function has no device to gather on.
            return tf.distribute.get_replica_context().all_gather(tf.identity(values), axis=0)

        return local_results(strategy, strategy.run(on_replica))[0]

    return gather


@functools.cache
def _sum_of_first(strategy: tf.distribute.Strategy) -> Callable[..., Any]:
    """A function that sums int32 numbers over the first replicas of all processes."""

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int32)], autograph=False)
    def sum_of_first(values: tf.Tensor) -> Any:
        def on_replica() -> Any:
            is_first = current_index() % len(strategy.extended.worker_devices) == 0
            # A tensor from outside the function has no device to reduce on.
            own = tf.identity(values) if is_first else tf.zeros_like(values)
            return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, own)

        return local_results(strategy, strategy.run(on_replica))[0]

    return sum_of_first
