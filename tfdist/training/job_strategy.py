"""What the strategies over a `ProcessGroup` share: one replica per process, and its operations between processes.

The variables are ordinary ones, a copy in each process: every process computes the same updates from the same reduced
gradients. Each process has its part of a metric's state, and the parts are summed when the metric is read.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import spmd
from tfdist.data_parallel import distribute
from tfdist.errors import ClusterError, DisagreementError, UsageError
from tfdist.groups import ProcessGroup
from tfdist.groups import packing as gradient_reduction
from tfdist.groups.exchanged import Exchanged
from tfdist.interface import gpus as _gpus
from tfdist.jobs import consensus, timeouts
from tfdist.jobs.heartbeat import Heartbeat, Limits, gone
from tfdist.jobs.world import World
from tfdist.options import checked_seconds
from tfdist.spmd.process_mesh import ProcessMesh
from tfdist.training.strategy import TrainingStrategy


def needs_whole_state(callback: Any) -> str | None:
    """What a callback of Keras' is that reads or writes all variables in one process, or within epochs; else `None`."""
    name = type(callback).__name__
    if isinstance(callback, keras.callbacks.ModelCheckpoint) and callback.save_freq != "epoch":
        return f"`{name}` within epochs"
    whole = isinstance(callback, keras.callbacks.BackupAndRestore | keras.callbacks.SwapEMAWeights)
    return f"`{name}`" if whole else None


class MultiProcessStrategy(TrainingStrategy):
    """Trains on all processes of a job, with one device per process.

    Args:
        timeout_seconds: how long a process may be silent.
        callback_timeout_seconds: how long a process may be busy, as in a callback, while others wait for it; `None`
            is without limit.
        start_timeout_seconds: how long the start waits for all processes; `None` is the launcher's setting, else 60.
        job_settings: settings that must be the same in all processes, as the versions of packages must.
        options: see `tfdist.interface.strategy.Strategy`.

    Raises:
        UsageError: an option is unknown, or the engine is not installed.
        ClusterError: a process is missing, or has other versions or settings.
    """

    metrics_by_process = True
    seconds_per_call = 2.0
    parallel_steps = 1  # exchanges are told apart by names, which each step uses again

    def __init__(
        self,
        *,
        timeout_seconds: float = 20.0,
        callback_timeout_seconds: float | None = None,
        start_timeout_seconds: float | None = None,
        job_settings: Mapping[str, str] | None = None,
        **options: Any,
    ):
        self.timeout_seconds = checked_seconds("timeout_seconds", timeout_seconds)
        self.callback_timeout_seconds = timeouts.callback_timeout_seconds(callback_timeout_seconds)
        self._start_timeout_seconds = timeouts.start_timeout_seconds(start_timeout_seconds)
        self._job_settings = dict(job_settings or {})
        super().__init__(**options)
        self.seed = consensus.broadcast_from_chief(self, self.seed)
        distribute.seed_tensorflow(self)

    def connect(self) -> ProcessGroup:
        """Joins the job that `self.world` describes."""
        raise NotImplementedError

    @property
    def packing(self) -> gradient_reduction.Packing:
        """How gradients are packed."""
        return gradient_reduction.Packing()

    def make_mesh(self) -> spmd.Mesh | None:
        """The replicas that compute the partitioned step of one device; one in each process, if not overridden."""
        return ProcessMesh(self.group, self.devices[0], self.packing)

    @property
    def mesh(self) -> spmd.Mesh | None:
        return self._mesh

    def choose_devices(self, wanted: int | str | Sequence[str] | None) -> list[str]:
        if wanted not in (None, 1):
            raise UsageError(
                f"`devices` is `{wanted}`, and a process of `{self.name}` has one device",
                "leave `devices` out; start more processes to use more devices",
            )
        own = _gpus.of_process(World.detect(os.environ), os.environ)[:1]
        return (_gpus.use_only(own) or ["CPU:0"])[:1]

    def set_up(self) -> None:
        self.world = World.detect(os.environ)
        self.group = self.connect()
        self.world.require_size(self.group.size, self.group.engine)
        versions = {name: importlib.metadata.version(name) for name in distribute.PACKAGES}
        consensus.require_equal(self, versions | self._job_settings)
        self._mesh = self.make_mesh()
        self._heartbeat = None
        if self.world.world_size > 1:
            self._heartbeat = self.heartbeat(Limits(self.timeout_seconds, self.callback_timeout_seconds))

    def heartbeat(self, limits: Limits) -> Heartbeat:
        """The heartbeat of this process, which says which others are silent."""
        return _heartbeat(self.group, self.world, limits)

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

    def sum_metrics(self, variables: Sequence[Any], name: str) -> list[tf.Tensor]:
        values = super().sum_metrics(variables, name)
        return values if self.world.world_size == 1 else summed(self.group, values, name)

    def exchange(self, message: bytes) -> list[bytes]:
        return self.group.exchange(message)

    def exchanged(self) -> Exchanged | None:
        return self.group.exchanged() if self.world.world_size > 1 else None

    def numbers_of_all(self, number: tf.Tensor) -> tf.Tensor:
        return self.group.all_gather(number[tf.newaxis], "numbers")

    def broadcast(self, values: np.ndarray) -> np.ndarray:
        return self.group.broadcast_bytes(values)

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        with self._heartbeat.work() if self._heartbeat is not None else contextlib.nullcontext():
            try:
                yield
            except (tf.errors.OpError, ClusterError) as error:
                failure = self.group.failure
                told = self.explained(failure) if failure is not None else self._explain(error)
                if told is None or told is error:
                    raise
                raise told from error

    def explained(self, failure: ClusterError) -> ClusterError:
        """The error to raise for a `failure` of the engine, which names the processes that are gone."""
        return failure

    def _explain(self, error: Exception) -> ClusterError | None:
        """The error to raise for one of the engine; `None` if it is not about the others, or says who they are."""
        if isinstance(error, ClusterError):
            return None
        mismatch = next((line for line in str(error).splitlines() if "Mismatched" in line), None)
        if mismatch is not None:
            return DisagreementError(
                "The processes of the job disagree on the model, or on the data: " + mismatch.strip(),
                "build the same model, on the same data, in all processes",
            )
        silent = self._heartbeat.silent() if self._heartbeat is not None else []
        return gone(self.world, silent, self.timeout_seconds) if silent else None


def summed(group: ProcessGroup, tensors: Sequence[tf.Tensor], name: str) -> list[Any]:
    """The sums of `tensors` over the processes, sent in one buffer; `name` names the exchange."""
    reduce = gradient_reduction.packed(lambda sent: group.all_reduce(sent, name), gradient_reduction.Packing(None))
    return reduce(list(tensors))


@functools.cache
def _heartbeat(group: ProcessGroup, world: World, limits: Limits) -> Heartbeat:
    """The heartbeat of this process, whose threads live as long as the process."""
    heartbeat = Heartbeat(world, group.exchange, group.counts, limits, group.give_up)
    group.excuse(heartbeat.others_are_busy)
    return heartbeat
