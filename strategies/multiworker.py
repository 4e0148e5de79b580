"""`multiworker`: `tf.distribute.MultiWorkerMirroredStrategy`, with a copy of every variable in each process of a job.
For several machines, with the result of one device.

Every process runs the same program on the same data and takes its part of each global batch. Sockets, or TensorFlow's
collectives, compute the all-reduce; the rest of Keras' step is local.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar

import tensorflow as tf

from tfdist import spmd
from tfdist.data_parallel.strategy import DataParallel
from tfdist.data_parallel.tf_distribute import WorkersMesh, WorkerVariables
from tfdist.errors import UnknownNameError, UsageError
from tfdist.groups import ProcessGroup, joining
from tfdist.groups.packing import Packing
from tfdist.groups.tensorflow import Communication, JoinedJob, TensorFlowGroup, join, start_error
from tfdist.interface import devices as device_choice
from tfdist.interface.traits import Traits
from tfdist.jobs import rendezvous
from tfdist.options import Seconds

SOCKETS = "sockets"
COMMUNICATIONS = {
    SOCKETS: Communication.AUTO,  # for the first values of variables
    "auto": Communication.AUTO,
    "ring": Communication.RING,
    "nccl": Communication.NCCL,
}
# The gradient buffers of NCCL and of TensorFlow's ring, which are sent while the next gradients are computed.
BUFFER_BYTES = 32 << 20


class MultiWorkerStrategy(DataParallel):
    """Trains on all processes that TF_CONFIG or Slurm names: on all GPUs of a process, or on its CPU as one device.

    With several `stages`, the variables are plain, since TensorFlow's strategy cannot place a variable on the device of
    a stage.

    Args:
        communication: how replicas exchange tensors. "ring" and "nccl" are TensorFlow's; "sockets" is faster than
            "ring" on CPUs; "auto" is "nccl" with GPUs, otherwise "sockets" if the processes can connect, or "ring".
        timeout_seconds: how long a process may be silent.
        options: see `tfdist.data_parallel.strategy.DataParallel`.

    Raises:
        UsageError: TensorFlow has already started, the job has parameter servers, or an option is unknown.
        ClusterError: a process is missing, or has other versions or settings.
    """

    name = "multiworker"
    several_devices = True
    wire_dtypes: ClassVar[Mapping[str, Any]] = {"none": None, "bf16": tf.bfloat16}

    def __init__(
        self,
        *,
        communication: str = "auto",
        timeout_seconds: Seconds = 60.0,
        job_settings: Mapping[str, str] | None = None,
        **options: Any,
    ):
        if communication not in COMMUNICATIONS:
            raise UnknownNameError("communication", communication, COMMUNICATIONS)
        self._communication = communication
        settings = dict(job_settings or {}) | {"communication": communication}
        super().__init__(timeout_seconds=timeout_seconds, job_settings=settings, **options)

    def set_up(self) -> None:
        try:
            super().set_up()
        except tf.errors.OpError as error:
            raise start_error(self.world, error, rendezvous.not_serving(self.world)) from error

    def join(self) -> ProcessGroup:
        if self.world.tasks_of("ps"):
            raise UsageError(
                "`TF_CONFIG` has parameter servers, and `multiworker` has no use for them",
                "use the strategy `parameter_server`, or a cluster of workers only",
            )
        self.world.require_addresses(self.name)
        if self.is_staged:
            if self._communication not in ("auto", SOCKETS):
                raise UsageError(
                    f"`communication` is `{self._communication}`, and processes in stages exchange gradients by "
                    "sockets",
                    "leave it out, or leave out `stages`",
                )
            return joining.join(SOCKETS, self.world, self.name, self.timeout_seconds, self.start_timeout_seconds)
        settings = tuple(self.job_settings.items())
        joined = join(
            self.world, COMMUNICATIONS[self._collectives], self.timeout_seconds, self.start_timeout_seconds, settings
        )
        self.variables = WorkerVariables(joined.strategy, self)
        sockets = self._sockets(joined)
        self.parallel_steps = 10 if sockets is None else 1  # sockets pair exchanges by their order
        return TensorFlowGroup(self.world, joined) if sockets is None else sockets

    @property
    def _collectives(self) -> str:
        """The `communication` for TensorFlow's collectives, whose own choice would be a ring on GPUs, too."""
        if self._communication != "auto" or self.devices[0] == "CPU:0":
            return self._communication
        return "ring" if device_choice.gpus_are_shared(self.world, os.environ) else "nccl"

    def _sockets(self, joined: JoinedJob) -> ProcessGroup | None:
        """Connects the processes by sockets; returns `None` if they cannot connect or do not need to."""
        required = self._communication == SOCKETS
        if required and len(self.devices) > 1:
            raise UsageError(
                f"`communication` is `{SOCKETS}`, and this process has {len(self.devices)} devices",
                "start a process for each device, or use `nccl`",
            )
        wanted = required or (self._communication == "auto" and self.devices == ["CPU:0"])
        if self.world.world_size == 1 or not wanted:
            return None
        return joining.sockets_over_tensorflow(self.world, joined, self.timeout_seconds, required)

    def make_mesh(self) -> spmd.Mesh:
        if isinstance(self.variables, WorkerVariables) and not self.group.carries_tensors:
            packing = Packing(BUFFER_BYTES, self.wire_dtypes[self.compression])
            return WorkersMesh(self.variables.strategy, self.devices, self.world, packing)
        return super().make_mesh()

    @property
    def alone(self) -> bool:
        return False  # a step of one process is partitioned for its devices, too

    @property
    def single_threaded(self) -> bool:
        return False  # its graphs hold collectives

    def options(self) -> dict[str, Any]:
        by_sockets = self.is_staged or self.group.carries_tensors
        return super().options() | {"communication": SOCKETS if by_sockets else self._collectives}


STRATEGY = MultiWorkerStrategy
TRAITS = Traits(
    processes=True,
    elastic=True,
)
