"""The schedule `2bw` of a pipeline: steps whose gradients are taken at the weights of before the last update."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import keras

from tfdist.errors import UsageError
from tfdist.interface.program import Logs, Steps
from tfdist.internals import keras as keras_internals
from tfdist.loop.inner_loop import StepProgram
from tfdist.loop.one_replica_program import OneReplicaProgram
from tfdist.loop.partitioned_program import PartitionedProgram
from tfdist.pipeline_parallel import previous_weights
from tfdist.pipeline_parallel.schedule import DELAYED

NAME = DELAYED


class _Delayed(StepProgram):
    """Trains with gradients at the weights of before the last update; an epoch begins with one version of them."""

    def __init__(self, strategy: Any, steps: Steps):
        self._previous = previous_weights.of(steps.model, steps.model.trainable_variables)
        super().__init__(strategy, steps)

    def begin_epoch(self) -> None:
        super().begin_epoch()
        self._previous.begin()

    @contextlib.contextmanager
    def _late(self) -> Iterator[None]:
        """The context of a step of the model."""
        with self._previous.computing(), self._previous.updating_late(self._model.optimizer):
            yield


class DelayedProgram(_Delayed, PartitionedProgram):
    """Trains the micro-batches of a pipeline so."""

    def _traced_step(self, data: Any) -> Logs:
        with self._late():
            return super()._traced_step(data)


class DelayedEagerProgram(_Delayed, OneReplicaProgram):
    """Trains a model with `run_eagerly=True` so."""

    def _computed(self, data: Any) -> Logs:
        with self._late():
            return super()._computed(data)


def program(strategy: Any, steps: Steps) -> StepProgram:
    """The inner loop that trains so."""
    kind = DelayedEagerProgram if strategy.runs_eagerly(steps.model) else DelayedProgram
    return kind(strategy, steps)


def is_delayed(schedule: str, kind: str) -> bool:
    """Whether steps of this `kind`, as "train", are delayed by the `schedule`."""
    return schedule == NAME and kind == "train"


def before_checkpoint(model: Any) -> None:
    """The next step of `model` computes with its newest weights, as a training that is resumed here does."""
    previous = previous_weights.kept(model)
    if previous is not None:
        previous.begin()


def refuse_backups_within_epochs(callbacks: Iterable[Any]) -> None:
    """Raises `UsageError` for Keras' backups within epochs: a run that goes on from one would have no delay there."""
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.BackupAndRestore) and callback.save_freq not in ("epoch", False):
            raise UsageError(
                f"`BackupAndRestore` saves every {callback.save_freq} steps, and a run that goes on from there would "
                f"lack the delay of the schedule `{NAME}`",
                'use `tfdist.callbacks.Checkpoint(every_steps=...)` in its place, or `save_freq="epoch"`',
            )


def require_steps_of_keras(model: Any) -> None:
    """Raises `UsageError` for a model whose `train_step` is its own, and may use its weights after an update."""
    if keras_internals.has_own_step(model, "train"):
        raise UsageError(
            f"The model `{model.name}` has a `train_step` of its own, and the schedule `{NAME}` delays the gradients "
            "of Keras' own",
            "leave it out, or use the schedule `gpipe` or `1f1b`",
        )
