"""The base class of strategies with replicas in several processes: joining the job, and detecting missing processes.

The processes communicate through the strategy's process group (`tfdist.groups`), which `join` returns.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import keras
import tensorflow as tf

from tfdist import spmd
from tfdist.errors import ClusterError, UsageError
from tfdist.groups import ProcessGroup
from tfdist.groups import tensorflow as tensorflow_group
from tfdist.groups.packing import Packing
from tfdist.interface import devices as device_choice
from tfdist.interface.variables import Variables
from tfdist.internals.tensorflow import global_seed
from tfdist.jobs import consensus, process_exit, rendezvous
from tfdist.jobs.heartbeat import Heartbeat, Limits, checked_callback_timeout
from tfdist.jobs.world import World
from tfdist.options import Seconds, checked_seconds
from tfdist.spmd.process_mesh import ProcessMesh
from tfdist.training.strategy import TrainingStrategy


class JobStrategy(TrainingStrategy):
    """Trains on all processes of a job.

    Args:
        timeout_seconds: how long a process may send no heartbeat.
        callback_timeout_seconds: how long a process may be busy, for example in a callback, while others wait for it;
            `None` for no limit.
        start_timeout_seconds: how long the start waits for all processes; `None` uses the launcher's setting or 60.
        job_settings: settings that must be equal in all processes, like the versions of packages.
        options: see `tfdist.interface.strategy.Strategy`.

    Raises:
        UsageError: an option is unknown, or the engine is not installed.
        ClusterError: a process is missing, or has other versions or settings.
    """

    seconds_per_call = 2.0  # between calls, the processes agree on the next one and sum the metrics
    parallel_steps = 1  # collective operations are matched by their order, or by names that every step uses again
    several_devices: ClassVar[bool] = False  # whether a process may have several devices

    def __init__(
        self,
        *,
        timeout_seconds: Seconds = 20.0,
        callback_timeout_seconds: Seconds | None = None,
        start_timeout_seconds: Seconds | None = None,
        job_settings: Mapping[str, str] | None = None,
        **options: Any,
    ):
        self.timeout_seconds = checked_seconds("timeout_seconds", timeout_seconds)
        self.callback_timeout_seconds = checked_callback_timeout(callback_timeout_seconds)
        self.start_timeout_seconds = rendezvous.start_timeout_seconds(start_timeout_seconds)
        self.job_settings = dict(job_settings or {})
        super().__init__(**options)
        # The seed determines the order of the examples, so it must be equal in all processes.
        self.seed = consensus.broadcast_from_chief(self, self.seed)
        if self.world.world_size > 1 and global_seed() is None:  # the user has not set it
            tf.random.set_seed(self.seed)  # operations without a seed draw the same numbers in all processes

    def join(self) -> ProcessGroup:
        """Joins the job that `self.world` describes and returns its process group; may set `self.variables`."""
        raise NotImplementedError

    def make_mesh(self) -> spmd.Mesh | None:
        """Returns the replicas that compute the partitioned step, by default one in each process."""
        return ProcessMesh(self.group, self.devices[0], Packing())

    @property
    def mesh(self) -> spmd.Mesh | None:
        return self._mesh

    def choose_devices(self, wanted: int | str | Sequence[str] | None) -> list[str]:
        # An engine may have to know the job before TensorFlow starts, so the devices are only counted here.
        assigned = device_choice.gpus_of_process(World.detect(os.environ), os.environ)
        available = len(assigned) or 1 if self.several_devices else 1
        count = available if wanted is None else wanted
        if not isinstance(count, int) or not 1 <= count <= available:
            devices = f"{available} GPU{'s' * (available > 1)}" if assigned else "one CPU"
            raise UsageError(
                f"`devices` is `{wanted}`, and a process of `{self.name}` has {devices}",
                "leave `devices` out; start more processes to use more of the machine",
            )
        return device_choice.use_only_gpus(assigned[:count]) or ["CPU:0"]

    def set_up(self) -> None:
        self.world = World.detect(os.environ)
        if self.world.world_size > 1:
            process_exit.end_with_exit_codes()
        self.variables = Variables(in_parts=True)
        self.group = self.join()
        self.world.require_size(self.group.size, self.group.engine)
        consensus.require_equal(self, tensorflow_group.versions() | self.job_settings)
        self._mesh = self.make_mesh()
        self._heartbeat = None
        if self.world.world_size > 1:
            limits = Limits(self.timeout_seconds, self.callback_timeout_seconds)
            self._heartbeat = _heartbeat(self.group, self.world, limits)

    @property
    def alone(self) -> bool:
        return self.world.world_size == 1

    @property
    def single_threaded(self) -> bool:
        return self.alone and super().single_threaded

    def options(self) -> dict[str, Any]:
        return super().options() | {
            "engine": self.group.engine,
            "timeout_seconds": self.timeout_seconds,
            "callback_timeout_seconds": self.callback_timeout_seconds,
        }

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        with self._heartbeat.work() if self._heartbeat is not None else contextlib.nullcontext():
            try:
                yield
            except (tf.errors.OpError, ClusterError) as error:
                explained = self.group.explained(error, self._heartbeat, self.timeout_seconds)
                explained = None if explained is None else self.named(explained)
                if explained is None or explained is error:
                    raise
                raise explained from error

    def named(self, error: ClusterError) -> ClusterError:
        """Returns `error`, which names processes, with any details that the strategy knows about them."""
        return error


@functools.cache
def _heartbeat(group: ProcessGroup, world: World, limits: Limits) -> Heartbeat:
    """Returns the heartbeat of this process, whose threads run until the process ends."""
    heartbeat = Heartbeat(world, group.exchange, group.counts, limits, group.give_up)
    group.excuse(heartbeat.others_are_busy)
    return heartbeat


def needs_whole_state(callback: Any) -> str | None:
    """Describes a Keras callback that needs all variables in one process, or saves within epochs; otherwise `None`."""
    name = type(callback).__name__
    if isinstance(callback, keras.callbacks.ModelCheckpoint) and callback.save_freq != "epoch":
        return f"`{name}` within epochs"
    whole = isinstance(callback, keras.callbacks.BackupAndRestore | keras.callbacks.SwapEMAWeights)
    return f"`{name}`" if whole else None
