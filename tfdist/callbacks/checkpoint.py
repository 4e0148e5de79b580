"""Checkpoints of a training that can be resumed as if it had never been killed.

    model.fit(x, y, epochs=10, callbacks=[Checkpoint("run/checkpoints", every_steps=100, resume=True)])

When what happens, in an epoch of five steps with `every_steps=2`:

    on_train_begin        resume: everything is given back, after all callbacks have begun anew
    step 1, step 2        saved (epoch 0, batch 2)
    step 3, step 4        saved (epoch 0, batch 4)
    step 5, evaluation
    on_epoch_end          saved (epoch 1, batch 0), after all callbacks have seen the epoch's logs

All optimizers that the model holds are saved, in whatever attribute. What has no variables before the first step could
not be given back: a model that Keras' own `fit`, or `run_eagerly=True`, would build on the way is refused at the start.
And metrics that would be made on the way are the reason why a run that is eager is saved at the ends of epochs alone.

The format of the files is in `tfdist.checkpointing.format`, what is in them in `tfdist.checkpointing.state`.
"""

from __future__ import annotations

import functools
import math
import operator
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras

from tfdist.callbacks.clock import ClockedCallback
from tfdist.checkpointing import random_states, resume, untracked_variables, writer
from tfdist.checkpointing import state as training_state
from tfdist.checkpointing.format import Entry, Header, Stored
from tfdist.checkpointing.resume import Position
from tfdist.checkpointing.store import Store
from tfdist.errors import CheckpointError, UnknownNameError, UsageError
from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_patches
from tfdist.jobs import consensus, elastic

if TYPE_CHECKING:
    from tfdist.data.input.passes import Passes
    from tfdist.interface.strategy import Strategy


class Checkpoint(ClockedCallback):
    """Saves the whole state of a training every so often, and resumes one from it.

    A file holds the variables of the model, its optimizer and its metrics, the random states, the position, what Keras'
    callbacks remember (a callback of one's own takes part with `checkpoint_state()` and
    `restore_checkpoint_state(state)`), the epochs' logs and the training time. A run that is killed at any moment and
    started again with `resume=True` ends where an unbroken one ends, provided that its data are the same, and its
    strategy's `seed` too where one is given; otherwise the strategy takes the seed of the checkpoint.

    Stock Keras' `fit` can begin only at an epoch's first batch. There the newest checkpoint of an epoch's end is
    resumed, and `every_steps` saves at the next epoch's end instead.

    Nothing is saved while the loss, or a trained weight, is not finite.

    Under a strategy of several processes each of them has this callback; the chief reads and writes for all.

    Args:
        folder: for the files; made if needed. It belongs to one run.
        every_steps: save after so many steps, counted over the whole run.
        every_epochs: save after so many epochs. The last epoch is always saved.
        keep: how many files stay, the newest; 1 or more.
        resume: go on from the newest whole checkpoint in `folder`, or begin where there is none.
        monitor: the name in the logs of the value that is best so far; `None` is "val_loss", or else "loss".
        mode: "min" if smaller is better, "max" if larger is.

    Attributes:
        resumed_from: the file that this `fit` went on from, or None.
        saved: the file that was written last, or None; waits for the one under way.
        best: `{"monitor", "value", "epoch"}` of the best epoch so far, or None.
        step: how many steps the run has taken.
        epoch_logs: the logs of each finished epoch, its number under "epoch".
        train_seconds: training time of the run, evaluation excluded.

    Raises:
        UsageError: an argument out of range.
        CheckpointError: before the first step: the folder holds another run's checkpoints, none of them is whole, or
            they are another model's; later: a file cannot be written.
    """

    best: dict[str, Any] | None
    epoch_logs: list[dict[str, Any]]
    _epoch_began: float | None

    def __init__(
        self,
        folder: str | Path,
        every_steps: int | None = None,
        every_epochs: int | None = 1,
        keep: int = 3,
        resume: bool = False,
        monitor: str | None = None,
        mode: str = "min",
    ):
        super().__init__()
        for name, value in (("every_steps", every_steps), ("every_epochs", every_epochs), ("keep", keep)):
            if value is not None and value < 1:
                raise UsageError(f"Checkpoint needs `{name}` of 1 or more. Received: `{value}`", "pass 1 or more")
        if mode not in ("min", "max"):
            raise UnknownNameError("mode", mode, ["min", "max"])
        self.folder = Path(folder)
        self.every_steps = every_steps
        self.every_epochs = every_epochs
        self.keep = keep
        self.resume = resume
        self.monitor = monitor
        self.mode = mode
        self.resumed_from: Path | None = None
        self.resume_batch: int | None = None  # tfdist's loop begins there
        self._store = Store(self.folder, keep)
        self._writer = writer.Writer()
        self._callbacks: keras.callbacks.CallbackList | None = None
        self._strategy: Strategy | None = None
        self._data: Passes | None = None
        self._stored: Stored | None = None
        self._within_epochs = False  # a run can begin there
        keras_patches.tell_callbacks_of_their_list()
        self._begin()

    def set_callback_list(self, callback_list: keras.callbacks.CallbackList) -> None:
        """The callbacks of a training, whose state belongs to it."""
        self._callbacks = callback_list

    def set_model(self, model: keras.Model) -> None:
        """Puts the part that saves and restores behind all other callbacks."""
        super().set_model(model)
        self._strategy = self._data = None  # unless tfdist's loop says otherwise
        if self._callbacks is None:  # hooks called by hand
            return
        if not any(isinstance(c, _Last) and c.checkpoint is self for c in self._callbacks.callbacks):
            # The list is being walked; what is appended now gets its turn too.
            self._callbacks.callbacks.append(_Last(self))

    def set_training(self, strategy: Strategy, data: Passes) -> None:
        """The strategy whose loop calls the hooks, and the data that it goes through."""
        self._strategy, self._data = strategy, data

    def seed_to_resume_with(self) -> int | None:
        """The seed of the order of examples in the checkpoint to go on from; `None` without one."""
        if not self.resume:
            return None
        writer.wait_for_all()
        stored = self._store.read_ahead()
        return None if stored is None else stored.header.seed

    def batches_until_hook(self, batch: int) -> int | None:
        """To the next multiple of `every_steps`."""
        if self.every_steps is None:
            return None
        return self._position.until_due(self.every_steps, batch)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Chooses the checkpoint to go on from."""
        super().on_train_begin(logs)
        writer.wait_for_all()  # of a training that an error has ended
        self._writer.error()
        if self.saved is None:
            self._begin()
        self.resumed_from, self.resume_batch, self._stored = None, None, None
        if self._data is None or self.model.run_eagerly:  # tfdist's loop makes all variables of a graph at the start
            resume.refuse_without_variables(self.model)
        # A model that runs eagerly makes its metrics with the first batch, and they could not be given back before.
        made = not self.model.run_eagerly or training_state.metrics_are_made(self.model)
        self._within_epochs = self._data is not None and made
        if self._peers.world.is_chief:
            self._store.remove_unfinished()
        # A machine of its own may not know that the run is resumed, and all must ask the chief, or none.
        if consensus.broadcast_from_chief(self._peers, self.resume):
            self._stored = self._store.newest(self._peers, self._within_epochs)
        elif self._peers.world.is_chief and self.saved is None:
            self._store.refuse_another_run()
        if self._callbacks is None:
            self.restore()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes where the epoch begins."""
        super().on_epoch_begin(epoch, logs)
        self._position.begin_epoch(epoch, self.resume_batch or 0)
        self._epoch_began = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts the steps."""
        steps = self.params.get("steps")
        self._position.batch = min(batch + 1, steps) if steps else batch + 1  # Keras rounds the last chunk up
        if self._callbacks is None:
            self.save_within_epoch(logs or {})

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts the steps of the epoch."""
        super().on_epoch_end(epoch, logs)
        self._position.end_epoch()
        self._epoch_began = None
        if self._callbacks is None:
            self.save_at_epoch_end(epoch, logs or {})

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Waits for the last checkpoint."""
        if self._callbacks is None:
            self.end()

    @property
    def saved(self) -> Path | None:
        """The file that was written last, or None; waits for the one under way."""
        self._writer.wait()
        return self._writer.written

    @property
    def step(self) -> int:
        """How many steps the run has taken."""
        return self._position.step

    @property
    def train_seconds(self) -> float:
        """Training time of the run so far, evaluation excluded."""
        unfinished = time.perf_counter() - self._epoch_began if self._epoch_began is not None else 0.0
        return self._seconds_before + self.clock.total_train_seconds + unfinished

    def restore(self) -> None:
        """Gives everything back; called once all callbacks have begun."""
        if self._stored is None:
            return
        header = self._stored.header
        assert header.path is not None
        resume.refuse_another_run(self.model, self._stored, self.params.get("steps"), self._seed)
        resume.restore(self.model, self._others(), self._stored, self._peers, send=False)  # the loop does, in a moment
        self.resumed_from = self._writer.written = header.path
        self.best = header.best
        self.epoch_logs = list(header.epoch_logs)
        self._seconds_before = header.train_seconds
        self._position = Position(header.epoch, header.batch, header.step - header.batch, header.step)
        # A run that a callback had ended does not train on: the loop then has no epoch to run.
        ended = header.stopped and header.epoch < self.params.get("epochs", header.epoch)
        keras_internals.set_initial_epoch(self.model, self.params["epochs"] if ended else header.epoch)
        if self._within_epochs:
            self.resume_batch = header.batch
            if header.data is not None and header.steps_per_epoch == self.params.get("steps"):
                training_state.restore_data_state(self._data, header.data, self._stored.entries, self._peers)

    def begin_resumed_epoch(self) -> None:
        """The first epoch begins; called once all callbacks have seen it begin."""
        # Only this fit begins there, not the model's next one.
        if self.resumed_from is not None:
            keras_internals.set_initial_epoch(self.model, None)
        if self._stored is not None and self.resume_batch:
            # The callbacks have begun this epoch before, in the run that was killed: what they did to the model in
            # `on_epoch_begin` (LearningRateScheduler lowers the rate) must not be done twice.
            resume.restore(self.model, self._others(), self._stored, self._peers, send=True)
        self._stored, self.resume_batch = None, None

    def save_within_epoch(self, logs: dict[str, Any]) -> None:
        """Saves if it is time to; called once all callbacks have seen the batch."""
        if (error := self._writer.error()) is not None:
            raise error
        # After an epoch's last batch, the epoch's end is saved instead: the loop could not go on from here to an
        # evaluation. Neither could stock Keras from within an epoch.
        at_end = self._position.batch == self.params.get("steps") or self.model.stop_training
        due = self._position.is_due(self.every_steps)
        if due and not at_end and self._within_epochs and not self._only_at_epoch_ends:
            strategy, data = self._strategy, self._data_state()
            if strategy is None or data is None:
                return self._note_only_at_epoch_ends()
            strategy.before_checkpoint(self.model)
            self._save(self._position.epoch, self._position.batch, logs, data)
            elastic.leave_if_told(self._peers, self._finish_write)

    def save_at_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Saves if it is time to; called once all callbacks have seen the epoch's logs."""
        numbers = {name: value for name, value in logs.items() if isinstance(value, int | float)}
        self.epoch_logs.append({"epoch": epoch, **numbers})
        self._note_best(epoch, numbers)
        due = self.every_epochs is not None and (epoch + 1) % self.every_epochs == 0
        last = epoch + 1 == self.params.get("epochs") or self.model.stop_training
        if due or last or self._position.is_due(self.every_steps):
            self._save(epoch + 1, 0, logs, self._data_state())
            if not last:
                elastic.leave_if_told(self._peers, self._finish_write)

    def end(self) -> None:
        """The training ends, once its last checkpoint is written."""
        self._finish_write()
        if self.resumed_from is not None:
            keras_internals.set_initial_epoch(self.model, None)
        self._stored, self.resume_batch = None, None

    def _begin(self) -> None:
        self.best = None
        self.epoch_logs = []
        self._seconds_before = 0.0
        self._epoch_began = None
        self._position = Position()
        self._only_at_epoch_ends = False

    @property
    def _peers(self) -> consensus.Peers:
        return self._strategy or consensus.Alone()

    @property
    def _seed(self) -> int | None:
        return None if self._strategy is None else self._strategy.seed

    def _data_state(self) -> list[Entry] | None:
        """Where the data stand; `None` for data that a run cannot go on with in the middle of an epoch."""
        return None if self._data is None else training_state.data_state(self._data, self._peers)

    def _others(self) -> list[Any]:
        if self._callbacks is None:
            return []
        others = [c for c in self._callbacks.callbacks if not isinstance(c, _Last)]
        return [c for c in others if all(inner is not self for inner in keras_patches.with_wrapped([c]))]

    def _note_only_at_epoch_ends(self) -> None:
        self._only_at_epoch_ends = True
        if self._peers.world.is_chief:
            warnings.warn(
                "The data cannot be gone on with in the middle of an epoch, as those of a Python generator cannot, or "
                "of a `PyDataset` that does something between epochs: a run that is resumed begins at an epoch's "
                "start, and `every_steps` saves at the end of the epoch instead",
                stacklevel=2,
            )

    def _save(self, epoch: int, batch: int, logs: dict[str, Any], data: list[Entry] | None) -> None:
        if not math.isfinite(logs.get("loss", 0.0)):
            return
        self._finish_write()  # before there is another snapshot in memory
        entries, is_chief = training_state.snapshot(self.model, self._peers), self._peers.world.is_chief
        if not consensus.broadcast_from_chief(self._peers, is_chief and training_state.finite(self.model, entries)):
            return
        self._position.step_saved = self.step
        if not is_chief:
            return
        states, arrays = training_state.callbacks_state(self._others())
        header = Header(
            epoch=epoch,
            batch=batch,
            step=self.step,
            optimizer=training_state.optimizer_class(self.model),
            stopped=bool(self.model.stop_training),
            best=self.best,
            train_seconds=self.train_seconds,
            epoch_logs=list(self.epoch_logs),
            steps_per_epoch=self.params.get("steps"),
            seed=self._seed,
            callbacks=states,
            data=None if data is None or self._data is None else self._data.position_in_passes,
        )
        entries += [*untracked_variables.snapshot(self.model), *arrays, *random_states.snapshot(), *(data or [])]
        self._writer.start(functools.partial(self._store.write, header, entries))

    def _finish_write(self) -> None:
        """Waits for the write under way; all processes call it, and wait for that of the chief.

        Raises:
            CheckpointError: the write has failed; raised in all processes.
        """
        self._writer.wait()
        error = self._writer.error()
        told = consensus.broadcast_from_chief(self._peers, error and [error.sentence, error.hint])
        if told:
            raise CheckpointError(*told) from error

    def _note_best(self, epoch: int, logs: dict[str, Any]) -> None:
        monitor = self.monitor or ("val_loss" if "val_loss" in logs else "loss")
        value = logs.get(monitor)
        better = operator.lt if self.mode == "min" else operator.gt
        if value is None or not math.isfinite(value):
            return
        if self.best is None or self.best["monitor"] != monitor or better(value, self.best["value"]):
            self.best = {"monitor": monitor, "value": value, "epoch": epoch}


class _Last(keras.callbacks.Callback):
    """The end of the list of callbacks: here all others have done what they do at this moment."""

    def __init__(self, checkpoint: Checkpoint):
        super().__init__()
        self.checkpoint = checkpoint

    def batches_until_hook(self, batch: int) -> int | None:
        return self.checkpoint.batches_until_hook(batch)

    def on_train_begin(self, logs: Any = None) -> None:
        self.checkpoint.restore()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.checkpoint.begin_resumed_epoch()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.checkpoint.save_within_epoch(logs or {})

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.checkpoint.save_at_epoch_end(epoch, logs or {})

    def on_train_end(self, logs: Any = None) -> None:
        self.checkpoint.end()
