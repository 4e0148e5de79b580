"""The inner loops of a pipeline whose stages are in several processes: those of a partitioned step."""

from __future__ import annotations

from typing import Any

from tfdist.core.inner_loop import Outcome, Program
from tfdist.core.partitioned_program import PartitionedPredictProgram, PartitionedProgram
from tfdist.strategies._delayed import DelayedProgram


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
    """Trains with the schedule `2bw`."""
