"""Counts training steps in batch hooks, which may be called only once for many steps.

Stock Keras with `steps_per_execution` and tfdist's loop call `on_train_batch_begin(first)` and
`on_train_batch_end(last)` around a chunk of steps, and may not call them at all for a callback that does not need them.
In that case the counter uses the announced length of the epoch.

Synopsis:

    >>> counter = StepCounter()
    >>> counter.begin_epoch(steps=10)
    >>> counter.chunk_begins(0)
    >>> counter.chunk_ended(7)
    >>> counter.chunk_begins(8)
    >>> counter.chunk_ended(11)  # Keras rounds the last chunk up
    >>> counter.steps
    10
    >>> counter.end_epoch()
    >>> counter.begin_epoch(steps=10)
    >>> counter.chunk_begins(4)
    >>> counter.number(4), counter.number(6)  # a resumed epoch may begin at any batch
    (10, 12)
"""

from __future__ import annotations


class StepCounter:
    """Counts the training steps that this `fit` has run.

    Attributes:
        steps_before_epoch: the number of steps before the current epoch.
    """

    def __init__(self) -> None:
        self.steps_before_epoch = 0
        self._announced: int | None = None
        self._first: int | None = None
        self._end = 0

    def begin_epoch(self, steps: int | None) -> None:
        """Starts to count an epoch; `steps` is its length if it is known (`params["steps"]`)."""
        self._announced, self._first, self._end = steps, None, 0

    def chunk_begins(self, first: int) -> None:
        """Called before the step with index `first` in this epoch is run."""
        if self._first is None:
            self._first = first

    def chunk_ended(self, last: int) -> None:
        """Called after the step with index `last` in this epoch has been run."""
        self._end = last + 1

    def number(self, batch: int) -> int:
        """The number over the whole `fit`, from 0, of the step with index `batch` in this epoch."""
        return self.steps_before_epoch + batch - (self._first or 0)

    @property
    def steps(self) -> int | None:
        """The number of steps of this epoch: as counted, or as announced, or `None`."""
        if not self._end:
            return self._announced
        end = min(self._end, self._announced) if self._announced else self._end
        return end - (self._first or 0)

    def end_epoch(self) -> None:
        self.steps_before_epoch += self.steps or 0
        self._announced, self._first, self._end = None, None, 0
