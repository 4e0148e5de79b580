"""The position in the data of a `fit`, `evaluate` or `predict`: passes over the data, cut into epochs."""

from __future__ import annotations

import warnings
from typing import Any

from tfdist.data.input.feed import NO_BATCHES, Feed
from tfdist.errors import DataError


class Passes:
    """Cuts the passes over the data into epochs.

    Without `steps_per_epoch` an epoch is a pass. With it, an epoch goes on where the one before stopped, and ends
    early, with Keras' warning, at the end of the data.

    Attributes:
        feed: the data.
        num_batches: steps in an epoch, `None` when only the end of the data will tell.
        examples: examples in an epoch, `None` when unknown.
        state: the arguments of the graph for the current pass, `None` between passes.
        position: the number in its pass of the next batch.
    """

    def __init__(self, feed: Feed, steps_per_epoch: int | None):
        self.feed = feed
        self._steps = steps_per_epoch
        self.num_batches = steps_per_epoch or feed.num_batches
        whole = self._steps is None or self._steps == feed.num_batches
        sized = self._steps is not None and feed.batch_size is not None
        self.examples = feed.examples if whole else self._steps * feed.batch_size if sized else None
        self.state: Any = None
        self.position = 0
        self._pass = 0
        self._saved: tuple[int, int, bytes] | None = None
        self._empty = True

    def __enter__(self) -> Passes:
        return self

    def __exit__(self, *raised: Any) -> None:
        """Lets go of what reads ahead: at the interpreter's exit its threads, which may run Python, would never end."""
        self.close()
        self.feed.release()

    def begin_at(self, epoch: int, resume_batch: int | None, next_pass: int) -> None:
        """Goes to epoch number `epoch`, or to where a run that is resumed has run `resume_batch` steps of it.

        A model that was trained before goes on with `next_pass`: its second `fit(epochs=1)` has another order than its
        first one, and with `initial_epoch=1` the order of one `fit(epochs=2)`.
        """
        self._pass, self.position = max(epoch, next_pass), 0
        if self._saved is not None:
            self._pass, self.position, _ = self._saved
        elif resume_batch is not None:
            self._pass, self.position = self._after(epoch, resume_batch)

    @property
    def next(self) -> int:
        """The number of the pass that a later `fit` begins with."""
        return self._pass + (self.position > 0)

    @property
    def position_in_passes(self) -> dict[str, int]:
        """Where the data stand, as `resume` takes it."""
        return {"number": self._pass, "position": self.position}

    def resume(self, saved: bytes, number: int, position: int) -> None:
        """Has the passes begin at batch `position` of pass `number`, as `saved` by the feed of another process."""
        self._saved = number, position, saved

    def _after(self, epochs: int, batches: int) -> tuple[int, int]:
        """The pass, and the position in it, after `epochs` epochs and `batches` batches."""
        if self._steps is None:
            return epochs, batches
        if self.feed.num_batches is None:
            return 0, epochs * self._steps + batches
        number = position = 0
        for _ in range(epochs):
            position += min(self._steps, self.feed.num_batches - position)
            if position == self.feed.num_batches:
                number, position = number + 1, 0
        return number, position + batches

    def reset(self) -> None:
        """Tells the data that a training or an evaluation is about to begin."""
        self.feed.reset()

    def begin_epoch(self) -> int | None:
        """Makes the data ready; returns how many batches of the pass are left, `None` when unknown."""
        self.feed.begin_epoch()
        if self._saved is not None:
            self.state = self.feed.resume(self._saved[2], self._pass, self.position)
            self._saved = None
        elif self.state is None:
            self.state = self.feed.start(self._pass, self.position)
        return None if self.feed.num_batches is None else self.feed.num_batches - self.position

    def end_epoch(self, steps: int, data_ended: bool, stopped: bool) -> None:
        """Notes that the epoch took `steps` steps, and whether there are no further batches in the pass.

        The data do not hear of the end of an epoch that a callback has `stopped`, as with Keras.

        Raises:
            DataError: there was not one batch, which for data of unknown length only shows now.
        """
        self._empty = self._empty and self.position == 0
        if self._empty and data_ended:
            raise DataError(*NO_BATCHES)
        if self._steps is None or data_ended:
            self.close()
            self._pass, self.position = self._pass + 1, 0
        if not stopped:
            if data_ended and self.feed.num_batches is not None:
                self.feed.look_ahead(keep=self._steps is not None)
            self.feed.end_epoch()
        if self._steps is not None and steps < self._steps and data_ended:
            warnings.warn(
                f"The data ended after {steps} of the {self._steps} steps of an epoch; repeat the dataset, or lower "
                "the number of steps.",
                stacklevel=2,
            )

    def close(self) -> None:
        """Ends the pass, if one is open."""
        if self.state is not None:
            self.feed.finish()
            self.state = None
