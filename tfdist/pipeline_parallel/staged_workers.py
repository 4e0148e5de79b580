"""The option `stages` of `multiworker`: a pipeline in each process, and gradients added over all by sockets.

TensorFlow's `MultiWorkerMirroredStrategy` has each variable on one device of a process, or on all of them, and never on
that of a stage. So it is not used here: the variables are ordinary ones, as those of `horovod` are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfdist.data_parallel import socket_job
from tfdist.errors import UnknownNameError, UsageError
from tfdist.groups import packing as gradient_reduction
from tfdist.groups.sockets import costs
from tfdist.pipeline_parallel import staging

WIRE_DTYPES = {"none": None, "bf16": tf.bfloat16}


class StagedWorkers(staging.StagingStrategy, socket_job.SocketStrategy):
    """Trains on all processes of a job, on several stages in each of them.

    Args:
        communication: "auto" or "sockets".
        compression: "none", or "bf16", which sends gradients as bfloat16.
        options: see `tfdist.pipeline_parallel.staging.StagingStrategy`.
    """

    name = "multiworker"

    def __init__(
        self,
        *,
        communication: str = "auto",
        compression: str = "none",
        timeout_seconds: float = 60.0,
        job_settings: Mapping[str, str] | None = None,
        **options: Any,
    ):
        if communication not in ("auto", "sockets"):
            raise UsageError(
                f"`communication` is `{communication}`, and processes in stages exchange gradients by sockets",
                "leave it out, or leave out `stages`",
            )
        if compression not in WIRE_DTYPES:
            raise UnknownNameError("compression", compression, WIRE_DTYPES)
        self.compression = compression
        alike = dict(job_settings or {}) | {"compression": compression}
        super().__init__(timeout_seconds=timeout_seconds, job_settings=alike, **options)

    @property
    def packing(self) -> gradient_reduction.Packing:
        return gradient_reduction.Packing(costs.buffer_bytes(self.world.world_size), WIRE_DTYPES[self.compression])

    def options(self) -> dict[str, Any]:
        return super().options() | {"communication": "sockets", "compression": self.compression}
