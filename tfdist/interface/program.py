"""The inner loop, between strategies and the outer loop: a `Program` runs `Steps`, and returns an `Outcome`."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from tfdist.data.input.feed import Batches

# Metrics, or what a step returns, by name.
Logs = dict[str, Any]


class AtNan(enum.Enum):
    """What the inner loop does at a step after which the loss is not finite."""

    NOTHING = enum.auto()
    STOP = enum.auto()  # it ends the call: a callback ends training there, and the weights are kept
    # It finds out at the end of the call which step it was: a callback raises, and the later steps do not matter. So
    # the host need not read the loss of each step, nor the processes exchange it.
    FIND = enum.auto()


@dataclass(frozen=True)
class Outcome:
    """The outcome of one call of the inner loop.

    Attributes:
        steps: the number of steps that ran.
        data_ended: the call stopped because there was no further batch.
        logs: the metrics after the last step, scalars; empty if no step ran.
    """

    steps: int
    data_ended: bool
    logs: Logs


@dataclass(frozen=True)
class Steps:
    """The steps that a program is made for.

    Attributes:
        model: compiled and built.
        kind: "train", "test" or "predict".
        batches: the data, as a graph reads them.
        at_nan: what is done at the first step after which the loss is not finite.
        own_logs: the `tf.TensorSpec`s of the logs that a traced step returns; `None` if it returns the results of the
            metrics.
        spec: the `tf.TypeSpec`s of a global batch.
        compares_first: the first step of a training is computed on one device too, see `tfdist.loop.first_step`.
    """

    model: Any
    kind: str
    batches: Batches
    at_nan: AtNan = AtNan.NOTHING
    own_logs: Any = None
    spec: Any = None
    compares_first: bool = False


class Program:
    """An inner loop: runs the steps of an epoch in calls of several steps."""

    def begin_epoch(self) -> None:
        """Called before the first step of an epoch."""

    def end_epoch(self) -> Logs:
        """Called after the last step of an epoch; returns what is to be added to its logs."""
        return {}

    def run(self, state: Any, first: int, count: int) -> Outcome:
        """Runs up to `count` steps, the first on batch number `first` of the pass with this `state`."""
        raise NotImplementedError
