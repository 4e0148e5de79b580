"""How far a training has come, counted in steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Position:
    """The position of a run.

    Attributes:
        epoch: the number of the current epoch.
        batch: the number of its steps that were taken.
        steps_before: the steps of the run before the current epoch.
        step_saved: the step of the run at its last checkpoint.
    """

    epoch: int = 0
    batch: int = 0
    steps_before: int = 0
    step_saved: int = 0

    @property
    def step(self) -> int:
        """The number of steps that the run has taken."""
        return self.steps_before + self.batch

    def begin_epoch(self, epoch: int, batch: int) -> None:
        """The epoch begins, or is resumed, at batch number `batch`."""
        self.epoch, self.batch = epoch, batch

    def end_epoch(self) -> None:
        """The steps of the epoch are over."""
        self.steps_before, self.batch = self.step, 0

    def is_due(self, every_steps: int | None) -> bool:
        """Whether a multiple of `every_steps` was reached since the last checkpoint."""
        return every_steps is not None and self.step // every_steps > self.step_saved // every_steps

    def until_due(self, every_steps: int, batch: int) -> int:
        """The number of steps from batch number `batch` of the epoch to the next multiple of `every_steps`."""
        return every_steps - (self.steps_before + batch) % every_steps
