"""The interface of the inner loop: a `Program` runs `Steps` and returns an `Outcome`."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from tfdist.data.input.feed import Batches

# Metrics, or the values that a step returns, by name.
Logs = dict[str, Any]


class AtNan(enum.Enum):
    """The reaction of the inner loop to a step after which the loss is not finite."""

    NOTHING = enum.auto()
    STOP = enum.auto()  # the call ends after this step: a callback ends the training, and the weights are kept
    # The call goes on and reports the step at its end: a callback raises an error, so that later steps do not matter.
    # Hence the host need not read the loss after each step, and the processes need not communicate it.
    FIND = enum.auto()


@dataclass(frozen=True)
class Outcome:
    """The outcome of one call of the inner loop.

    Attributes:
        steps: the number of steps that ran.
        data_ended: whether the call stopped because there was no further batch.
        logs: the metrics after the last step, as scalars; empty if no step ran.
    """

    steps: int
    data_ended: bool
    logs: Logs


@dataclass(frozen=True)
class Steps:
    """The steps that a program runs.

    Attributes:
        model: a compiled and built model.
        kind: "train", "test" or "predict".
        batches: the data, as a graph reads them.
        at_nan: the reaction to the first step after which the loss is not finite.
        own_logs: the `tf.TensorSpec`s of the logs that a traced step returns; `None` if it returns the results of the
            metrics.
        spec: the `tf.TypeSpec`s of a global batch.
        compares_first: whether the first training step is also computed on one device; see `tfdist.loop.first_step`.
    """

    model: Any
    kind: str
    batches: Batches
    at_nan: AtNan = AtNan.NOTHING
    own_logs: Any = None
    spec: Any = None
    compares_first: bool = False


class Program:
    """An inner loop, which runs the steps of an epoch in calls of several steps."""

    def begin_epoch(self) -> None:
        """Called before the first step of an epoch."""

    def end_epoch(self) -> Logs:
        """Called after the last step of an epoch; returns additional logs of the epoch."""
        return {}

    def run(self, state: Any, first: int, count: int) -> Outcome:
        """Runs up to `count` steps, beginning with batch number `first` of the pass over the data in `state`."""
        raise NotImplementedError
