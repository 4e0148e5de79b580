"""The inner loops of a pipeline whose stages are in several processes: those of a partitioned step."""

from __future__ import annotations

from typing import Any

from tfdist.interface.program import AtNan, Outcome, Program, Steps
from tfdist.internals import keras_optimizers
from tfdist.loop.partitioned_program import PartitionedPredictProgram, PartitionedProgram
from tfdist.pipeline_parallel.delayed import DelayedProgram

# With M micro-batches and S stages, a stage waits (S - 1) / (4 M + S - 1) of the time, and not (S - 1) / (M + S - 1).
# More of them would take longer to trace.
STEPS_TOGETHER = 4


class _OfStage(Program):
    """Tells the messages of a call of the inner loop from those of others."""

    _strategy: Any

    def run(self, state: Any, first: int, count: int) -> Outcome:
        self._strategy.exchange_of_stages.begin_call()
        return super().run(state, first, count)


class StageProgram(_OfStage, PartitionedProgram):
    """Trains or tests a model of which this process computes one stage."""


class StagePredictProgram(_OfStage, PartitionedPredictProgram):
    """Predicts."""


class DelayedStageProgram(_OfStage, DelayedProgram):
    """Trains with the schedule `2bw`: a stage begins a step while later stages still compute the one before."""

    def __init__(self, strategy: Any, steps: Steps):
        super().__init__(strategy, steps)
        optimizer, stages = steps.model.optimizer, strategy.world.world_size
        meets = keras_optimizers.inner(optimizer) is not optimizer or bool(optimizer.global_clipnorm)
        # What a step finds out of its loss is not known before the next one begins.
        if not meets and steps.at_nan is AtNan.NOTHING and strategy.micro_batches >= stages - 1:
            self.steps_together = STEPS_TOGETHER
