"""What the strategies share whose processes add their gradients in each step by a process group that they bring."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfdist.errors import UnknownNameError
from tfdist.groups import ProcessGroup
from tfdist.groups import packing as gradient_reduction
from tfdist.groups.sockets import costs
from tfdist.pipeline_parallel import staging

WIRE_DTYPES = {"none": None, "bf16": tf.bfloat16, "fp16": tf.float16}


class ReducingStrategy(staging.StagingStrategy):
    """Trains on all processes of a job, with a copy of every variable in each, and the result of one device.

    Args:
        compression: "none"; "bf16" or "fp16" send gradients in that type, half the bytes.
        buffer_bytes: gradients below this size are sent together, in buffers of this size; `None` is 1 MiB, and 128 KiB
            per process from nine processes on, since rings send each process' part of a buffer by itself.
        dense_below_bytes: sparse gradients of tables below this size are sent as dense tensors; not for adaptive
            optimizers, see `tfdist.groups.ProcessGroup`.
        options: see `tfdist.pipeline_parallel.staging.StagingStrategy`; `shard`, see `tfdist.data_parallel.sharding`.
    """

    takes_speeds = True

    def __init__(
        self,
        *,
        compression: str = "none",
        buffer_bytes: int | None = None,
        dense_below_bytes: int = 0,
        job_settings: Mapping[str, str] | None = None,
        **options: Any,
    ):
        if compression not in WIRE_DTYPES:
            raise UnknownNameError("compression", compression, WIRE_DTYPES)
        self.compression = compression
        self._buffer_bytes = buffer_bytes
        self._dense_below_bytes = dense_below_bytes
        # Processes that sent buffers of different types or sizes would add up what does not belong together, or wait.
        own = {"compression": compression, "buffer_bytes": buffer_bytes, "dense_below_bytes": dense_below_bytes}
        alike = dict(job_settings or {}) | {name: str(value) for name, value in own.items()}
        super().__init__(job_settings=alike, **options)
        if compression != "none":
            self.compare_first_step = False  # what is rounded on its way differs by choice

    def join(self) -> ProcessGroup:
        """Joins the job that `self.world` describes."""
        raise NotImplementedError

    def connect(self) -> ProcessGroup:
        group = self.join()
        group.dense_below_bytes = self._dense_below_bytes
        return group

    @property
    def packing(self) -> gradient_reduction.Packing:
        chosen = costs.buffer_bytes(self.world.world_size) if self._buffer_bytes is None else self._buffer_bytes
        return gradient_reduction.Packing(chosen, WIRE_DTYPES[self.compression])

    def options(self) -> dict[str, Any]:
        return super().options() | {
            "compression": self.compression,
            "buffer_bytes": self.packing.buffer_bytes,
            "dense_below_bytes": self._dense_below_bytes,
        }
