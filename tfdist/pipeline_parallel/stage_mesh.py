"""The micro-batches of a pipeline whose stages are in several processes.

Each process makes the graph of all stages, as `tfdist.pipeline_parallel.pipeline_mesh` does for one process, and then
writes its part of it (`tfdist.pipeline_parallel.cut`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.internals import tensorflow_functions
from tfdist.pipeline_parallel import cut, ordering
from tfdist.pipeline_parallel.exchange import Exchange
from tfdist.pipeline_parallel.pipeline_mesh import PipelineMesh, say_that_they_meet
from tfdist.pipeline_parallel.schedule import Schedule


class StageMesh(PipelineMesh):
    """The micro-batches of a job, each of whose processes has a stage.

    Args:
        device: of this process.
        micro_batches: of the job.
        schedule: the order in which a stage computes them.
        exchange: with the other processes.
        rank: of this process, and of its stage.
        stages: their number.
        owner: the stage that has the variable with a handle; `None` if all processes have it.
        agree: is told what this process has traced, and raises an error if another one has traced something else.
    """

    def __init__(
        self,
        device: str,
        micro_batches: int,
        schedule: Schedule,
        exchange: Exchange,
        rank: int,
        stages: int,
        owner: Callable[[tf.Tensor], int | None],
        agree: Callable[[str], None],
    ):
        super().__init__([device] * stages, micro_batches, schedule)
        self._exchange, self._rank = exchange, rank
        self._owner, self._agree = owner, agree
        self._steps = 0  # that are written together, so far

    def compute(self) -> None:
        self._steps += 1

    def number(self, position: int) -> int:
        return (self._steps - 1) * len(self.local) + position

    def is_common(self, handle: tf.Tensor) -> bool:
        return self._owner(handle) is None

    def computed(self) -> None:
        """Nothing: the part of this process is put in order."""

    def written(self, write: Callable[[], Any]) -> Any:
        self._steps = 0
        whole = tf.function(write, autograph=False).get_concrete_function()
        outputs = iter(self._part(whole.graph))
        flat = tf.nest.flatten(whole.structured_outputs, expand_composites=True)
        packed = [None if one is None else next(outputs) for one in flat]
        return tf.nest.pack_sequence_as(whole.structured_outputs, packed, expand_composites=True)

    def _part(self, graph: Any) -> list[Any]:
        """Writes the part of this process into the present graph; returns the outputs of the whole one."""
        outside, _ = tensorflow_functions.captured(graph)
        places = [self._owner(one) for one in outside]
        stages, micro_batches = len(self.stage_devices), self._steps * len(self.local)
        whole = cut.whole(graph, places, self._schedule, stages, micro_batches)
        self._agree(whole.region.described())
        with tf.device(self.devices[0]), self._exchange.sequence():
            outputs = cut.Part(self._rank, self._exchange).write(whole.region, outside)
        if whole.in_schedule:
            ordering.order(tf.compat.v1.get_default_graph(), self._schedule, self.stage_devices, micro_batches)
        elif self._schedule != "gpipe" and self._rank == 0:
            say_that_they_meet(self._schedule)
        return outputs
