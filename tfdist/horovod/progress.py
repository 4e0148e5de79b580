"""How far this process is in the trainings that Keras' `fit` runs with a distributed optimizer, in words."""

from __future__ import annotations

from typing import Any

import keras

from tfdist.internals import keras_patches


class Progress:
    """What is known of the trainings of this process; read from any thread.

    Attributes:
        stage: 2n - 1 within the nth training, 2n after it.
        place: where this process is, to follow a verb in a message.
    """

    def __init__(self) -> None:
        self.stage = 0
        self.place = ""

    def begin(self) -> None:
        """A training begins; one that was broken off counts as ended."""
        self.stage += 1 + self.stage % 2

    def end(self, place: str) -> None:
        """The training has ended."""
        self.place = place
        self.stage += 1


class Follow(keras.callbacks.Callback):
    """Notes in `progress` how far a training is; the last one of a callback list."""

    def __init__(self, progress: Progress, callback_list: Any):
        super().__init__()
        self._progress = progress
        self._all = callback_list
        self._follows = False
        self._epoch = 0

    def batches_until_hook(self, batch: int) -> int | None:
        """Never: the epoch is enough; see `tfdist.callbacks`."""

    def on_train_begin(self, logs: Any = None) -> None:
        optimizer = getattr(self.model, "optimizer", None)
        self._follows = optimizer is not None and keras_patches.around_apply(optimizer) is not None
        if self._follows:
            self._progress.begin()
            self._progress.place = "at the beginning of `fit`"

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch
        self._note(f"at the beginning of epoch {epoch + 1}")

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._note(f"in batch {batch + 1} of epoch {self._epoch + 1}")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._note(f"after batch {batch + 1} of epoch {self._epoch + 1}")

    def on_train_end(self, logs: Any = None) -> None:
        if self._follows:
            self._progress.end(f"after `fit`, which ended with epoch {self._epoch + 1}{self._reason()}")

    def _note(self, place: str) -> None:
        if self._follows:
            self._progress.place = place

    def _reason(self) -> str:
        if not self.model.stop_training:
            return ""
        known = [one for one in keras_patches.with_wrapped(self._all.callbacks) if _has_stopped(one, self._epoch)]
        if not known:
            return " (`stop_training` was set)"
        return f" (stopped by `{type(known[0]).__name__}` on its own `{known[0].monitor}`)"


def _has_stopped(callback: Any, epoch: int) -> bool:
    return isinstance(callback, keras.callbacks.EarlyStopping) and callback.stopped_epoch == epoch
