"""How many steps have been run, from batch hooks that may come once for many steps.

Stock Keras with `steps_per_execution` and tfdist's loop both call `on_train_batch_begin(first)` and
`on_train_batch_end(last)` around a chunk of steps, and may not call them at all for a callback that needs
none. Then the epoch's announced length counts.

Synopsis:

    >>> counter = StepCounter()
    >>> counter.begin_epoch(steps=10)
    >>> counter.chunk_ended(7)   # steps 0 to 7
    >>> counter.chunk_ended(11)  # Keras rounds the last chunk up
    >>> counter.steps
    10
    >>> counter.end_epoch()
    >>> counter.steps_before_epoch
    10
"""

from __future__ import annotations


class StepCounter:
    """Counts training steps in an epoch and before it.

    Attributes:
        steps_before_epoch: steps of this `fit` before the current epoch.
    """

    def __init__(self) -> None:
        self.steps_before_epoch = 0
        self._announced: int | None = None
        self._seen = 0

    def begin_epoch(self, steps: int | None) -> None:
        """An epoch begins, of `steps` steps where that is known (`params["steps"]`)."""
        self._announced = steps
        self._seen = 0

    def chunk_ended(self, last: int) -> None:
        """The step with index `last` in this epoch has been run."""
        self._seen = max(self._seen, last + 1)

    @property
    def steps(self) -> int | None:
        """Steps of this epoch: those seen, else those announced, else None."""
        if not self._seen:
            return self._announced
        return min(self._seen, self._announced) if self._announced else self._seen

    def end_epoch(self) -> None:
        """The epoch ends."""
        self.steps_before_epoch += self.steps or 0
        self._announced, self._seen = None, 0
