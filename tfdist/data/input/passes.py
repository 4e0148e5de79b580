"""The position of a `fit`, `evaluate` or `predict` in its data: passes over the data, divided into epochs."""

from __future__ import annotations

import warnings
from typing import Any

from tfdist.data.input.feed import NO_BATCHES, Feed
from tfdist.errors import DataError


class DataPasses:
    """Divides the passes over the data into epochs, and tracks the position; a context manager.

    Without `steps_per_epoch` an epoch is a pass. With it, an epoch continues where the previous one stopped, and ends
    early, with Keras' warning, at the end of the data.

    Attributes:
        feed: the data.
        num_batches: the number of steps per epoch; `None` if only the end of the data will tell.
        examples: the number of examples per epoch; `None` if unknown.
        state: the state of the current pass, see `Feed.start`; `None` between passes.
        position: the number of the next batch in its pass.
    """

    def __init__(self, feed: Feed, steps_per_epoch: int | None):
        self.feed = feed
        self._steps = steps_per_epoch
        self.num_batches = steps_per_epoch or feed.num_batches
        if steps_per_epoch is None or steps_per_epoch == feed.num_batches:
            self.examples = feed.examples
        else:
            self.examples = None if feed.batch_size is None else steps_per_epoch * feed.batch_size
        self.state: Any = None
        self.position = 0
        self._pass = 0
        self._saved: tuple[int, int, bytes] | None = None
        self._empty = True

    def __enter__(self) -> DataPasses:
        return self

    def __exit__(self, *raised: Any) -> None:
        """Frees pipelines that read ahead: their threads may run Python, and would block the interpreter's exit."""
        self.close()
        self.feed.release()

    def begin_at(self, epoch: int, resume_batch: int | None, next_pass: int) -> None:
        """Moves to epoch number `epoch`, or to where a resumed run has finished `resume_batch` steps of it.

        A model that was trained before continues with `next_pass`: its second `fit(epochs=1)` has another order than
        its first, and with `initial_epoch=1` the order of one `fit(epochs=2)`.
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
        """The position in the data, as keyword arguments of `resume`."""
        return {"number": self._pass, "position": self.position}

    def resume(self, saved: bytes, number: int, position: int) -> None:
        """Makes the passes begin at batch `position` of pass `number`, with what `Feed.save` returned."""
        self._saved = number, position, saved

    def _after(self, epochs: int, batches: int) -> tuple[int, int]:
        """The pass and the position in it after `epochs` epochs and `batches` batches."""
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
        # Keras calls this hook once before the first epoch, so that a dataset that shuffles in it begins shuffled.
        self.feed.end_epoch()

    def begin_epoch(self) -> int | None:
        """Starts a pass if none is open; returns how many of its batches are left, `None` if unknown."""
        self.feed.begin_epoch()
        if self._saved is not None:
            self.state = self.feed.resume(self._saved[2], self._pass, self.position)
            self._saved = None
        elif self.state is None:
            self.state = self.feed.start(self._pass, self.position)
        return None if self.feed.num_batches is None else self.feed.num_batches - self.position

    def end_epoch(self, steps: int, data_ended: bool, stopped: bool) -> None:
        """Ends an epoch.

        Args:
            steps: the number of steps of the epoch.
            data_ended: whether there are no further batches in the pass.
            stopped: whether a callback has stopped the training; as with Keras, the hooks of the data are then not
                called.

        Raises:
            DataError: there was not a single batch, which for data of unknown length is only known now.
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
