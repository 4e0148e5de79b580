"""The schedule `2bw` of a pipeline: steps whose gradients are taken at the weights of before the last update."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from tfdist.core.inner_loop import StepProgram, Steps
from tfdist.core.metrics import Logs
from tfdist.errors import UsageError
from tfdist.internals import keras as keras_internals
from tfdist.stages import previous_weights
from tfdist.strategies._towers import Tower

NAME = "2bw"


class PipelineTower(Tower):
    """A micro-batch; `previous`, if set, are the weights of before the last update, with which it computes."""

    previous: previous_weights.PreviousWeights | None = None

    def late(self, update: Callable[..., None]) -> Callable[..., None]:
        """The optimizer's `update` of the newest weights."""
        return update if self.previous is None else self.previous.late(update)

    def write(self, updates: list[tuple[Any, tf.Tensor]]) -> None:
        if self.previous is not None:
            self.previous.require_others([variable for variable, _ in updates])
        super().write(updates)


class DelayedProgram(StepProgram):
    """Trains with gradients at the weights of before the last update; an epoch begins with one version of them."""

    def __init__(self, strategy: Any, steps: Steps, *rest: Any, weights: list[Any] | None = None):
        weights = steps.model.trainable_variables if weights is None else weights
        self._previous = previous_weights.of(steps.model, weights)
        super().__init__(strategy, steps, *rest)

    def begin_epoch(self) -> None:
        super().begin_epoch()
        self._previous.begin()

    def _step(self, state: Any, batch: Any) -> tuple[tf.Tensor, Logs]:
        with self._previous.computing():
            return super()._step(state, batch)


def is_delayed(schedule: str, kind: str) -> bool:
    """Whether steps of this `kind`, as "train", are delayed by the `schedule`."""
    return schedule == NAME and kind == "train"


def begin_anew(model: Any) -> None:
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
