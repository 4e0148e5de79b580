"""Checks that a training can be resumed from a checkpoint, and restores its state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tfdist.checkpointing import random_states, untracked_variables
from tfdist.checkpointing import state as training_state
from tfdist.checkpointing.format import Stored
from tfdist.errors import CheckpointError
from tfdist.interface import state as strategy_state
from tfdist.jobs.consensus import Peers


@dataclass
class Position:
    """The position of a run.

    Attributes:
        epoch: the number of the current epoch.
        batch: the number of its finished steps.
        steps_before: the number of steps of the run before the current epoch.
        step_saved: the step of the run at its last checkpoint.
    """

    epoch: int = 0
    batch: int = 0
    steps_before: int = 0
    step_saved: int = 0

    @property
    def step(self) -> int:
        """The number of finished steps of the run."""
        return self.steps_before + self.batch

    def begin_epoch(self, epoch: int, batch: int) -> None:
        """Begins an epoch, or resumes it at batch number `batch`."""
        self.epoch, self.batch = epoch, batch

    def end_epoch(self) -> None:
        """Ends the current epoch."""
        self.steps_before, self.batch = self.step, 0

    def is_due(self, every_steps: int | None) -> bool:
        """Whether a multiple of `every_steps` was reached since the last checkpoint."""
        return every_steps is not None and self.step // every_steps > self.step_saved // every_steps

    def until_due(self, every_steps: int, batch: int) -> int:
        """Returns the number of steps from batch number `batch` of the epoch to the next multiple of `every_steps`."""
        return every_steps - (self.steps_before + batch) % every_steps


def refuse_without_variables(model: Any) -> None:
    """Raises `CheckpointError` for a layer or optimizer without variables, since it could not be restored."""
    missing = training_state.without_variables(model)
    if missing is not None:
        raise CheckpointError(
            f"{missing} has no variables yet, so that a run of the model `{model.name}` could not be resumed",
            "build it before `fit`: give the model an input shape, or call it on a batch; for an optimizer that is not "
            "passed to `compile`, call `optimizer.build(variables)`",
        )


def refuse_another_run(model: Any, stored: Stored, steps_per_epoch: int | None, seed: int | None) -> None:
    """Raises `CheckpointError` if a checkpoint has another model, another optimizer or another order of batches.

    Args:
        model: the compiled model; its optimizer is built if the checkpoint contains the optimizer's variables.
        stored: the checkpoint.
        steps_per_epoch: the steps per epoch of the current run; `None` if unknown.
        seed: the seed of the order of its examples; `None` if unknown.
    """
    header = stored.header
    hint = "resume with the model and the arguments of the run that wrote it, or use another folder"
    _build_optimizer(model, stored)
    optimizer = training_state.optimizer_class(model)
    if optimizer != header.optimizer:
        raise CheckpointError(
            f"The checkpoint `{header.path}` has the optimizer `{header.optimizer}`, and the model `{optimizer}`", hint
        )
    difference = training_state.first_difference(model, stored.entries, _groups(model, stored))
    difference = difference or untracked_variables.difference(model, stored.entries)
    if difference is not None:
        in_checkpoint, in_model = difference
        raise CheckpointError(
            f"The checkpoint `{header.path}` is of another model: it has {in_checkpoint}, where the model has "
            f"{in_model}",
            hint,
        )
    for name, written, now in (
        ("steps in an epoch", header.steps_per_epoch, steps_per_epoch),
        ("as the seed of the order of examples", header.seed, seed),
    ):
        # A run that continues within an epoch needs the same batches.
        if header.batch and written is not None and now is not None and written != now:
            raise CheckpointError(
                f"The checkpoint `{header.path}` was written within an epoch, with {written} {name}, and this run "
                f"has {now}",
                "resume with the same data, batch size and seed",
            )


def _build_optimizer(model: Any, stored: Stored) -> None:
    stored_count = sum(entry.group == "optimizer" for entry in stored.entries)
    lacks_some = stored_count > len(training_state.variables(model)["optimizer"])
    if lacks_some and model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


def restore(model: Any, callbacks: Iterable[Any], stored: Stored, peers: Peers, send: bool) -> None:
    """Restores the variables of `model`, the states of `callbacks` and the random states from a checkpoint.

    All processes must call it. `send` broadcasts the chief's variables to the other processes.
    """
    header, entries = stored.header, training_state.local_entries(stored.entries, peers)
    in_chief = training_state.assign(model, stored, entries, _groups(model, stored), peers)
    if send:
        state = strategy_state.of(model)
        peers.broadcast_variables([variable for variable in in_chief if not state.has_own(variable)])
    training_state.assign_own(model, stored.entries, peers)
    training_state.restore_callbacks_state(callbacks, header.callbacks, entries, header.train_seconds)
    untracked_variables.restore(model, entries)
    random_states.restore(entries)


def _groups(model: Any, stored: Stored) -> tuple[str, ...]:
    """Returns the groups of variables to restore.

    A new epoch resets the metrics, so that the model may have other metrics then. The state of a strategy is restored
    if both the checkpoint and the strategy have such variables; another strategy begins without them.
    """
    known = {entry.group for entry in stored.entries}
    of_strategy = ("strategy",) if "strategy" in known and training_state.variables(model)["strategy"] else ()
    return ("model", "optimizer", *(("metrics",) if stored.header.batch else ()), *of_strategy)
