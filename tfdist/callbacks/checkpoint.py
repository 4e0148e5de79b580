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

import math
import operator
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import keras

from tfdist.callbacks.clock import ClockedCallback
from tfdist.checkpointing import format as checkpoint_format
from tfdist.checkpointing import state as training_state
from tfdist.checkpointing.format import Header, Stored
from tfdist.cluster import consensus, elastic
from tfdist.errors import CheckpointError, UnknownNameError, UsageError
from tfdist.internals import keras as keras_internals


class Checkpoint(ClockedCallback):
    """Saves the whole state of a training every so often, and resumes one from it.

    A file holds the variables of the model, its optimizer and its metrics, the random states, the position, what Keras'
    callbacks remember (a callback of one's own takes part with `checkpoint_state()` and
    `restore_checkpoint_state(state)`), the epochs' logs and the training time. A run that is killed at any moment and
    started again with `resume=True` ends where an unbroken one ends, provided that its data and its strategy's `seed`
    are the same.

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
        saved: the file that was written last, or None.
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
        self.saved: Path | None = None
        self.resume_batch: int | None = None  # tfdist's loop begins there
        self._callbacks: keras.callbacks.CallbackList | None = None
        self._stored: Stored | None = None
        self._within_epochs = False  # a run can begin there
        self._peers: consensus.ProcessGroup = consensus.Alone()
        self._begin()

    def set_model(self, model: keras.Model) -> None:
        """Puts the part that saves and restores behind all other callbacks."""
        super().set_model(model)
        self._callbacks = _callback_list()
        if self._callbacks is None:  # hooks called by hand
            return
        if not any(isinstance(c, _Last) and c.checkpoint is self for c in self._callbacks.callbacks):
            # The list is being walked; what is appended now gets its turn too.
            self._callbacks.callbacks.append(_Last(self))

    def batches_until_hook(self, batch: int) -> int | None:
        """To the next multiple of `every_steps`."""
        if self.every_steps is None:
            return None
        return self.every_steps - (self._step_of_epoch + batch) % self.every_steps

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Chooses the checkpoint to go on from."""
        super().on_train_begin(logs)
        if self.saved is None:
            self._begin()
        self.resumed_from, self.resume_batch, self._stored = None, None, None
        self._peers = self.params.get("peers") or consensus.Alone()
        self._refuse_what_cannot_be_resumed()
        # A model that runs eagerly makes its metrics with the first batch, and they could not be given back before.
        made = not self.model.run_eagerly or training_state.metrics_are_made(self.model)
        self._within_epochs = _loop_is_tfdists(self.params) and made
        if self._peers.world.is_chief:
            checkpoint_format.remove_temporaries(self.folder)
        # A machine of its own may not know that the run is resumed, and all must ask the chief, or none.
        if consensus.broadcast_from_chief(self._peers, self.resume):
            self._stored = self._choose_alike()
        elif self._peers.world.is_chief and self.saved is None and (found := checkpoint_format.paths(self.folder)):
            raise CheckpointError(
                f"The folder `{self.folder}` already holds checkpoints, `{found[0].name}` the newest, and a new run "
                "would replace them",
                "resume it (`Checkpoint(..., resume=True)`, `--resume`), or use another folder",
            )
        if self._callbacks is None:
            self.restore()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes where the epoch begins."""
        super().on_epoch_begin(epoch, logs)
        self._epoch = epoch
        self._batch = self.resume_batch or 0
        self._epoch_began = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts the steps."""
        steps = self.params.get("steps")
        self._batch = min(batch + 1, steps) if steps else batch + 1  # Keras rounds the last chunk up
        if self._callbacks is None:
            self.save_within_epoch(logs or {})

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts the steps of the epoch."""
        super().on_epoch_end(epoch, logs)
        self._step_of_epoch += self._batch
        self._batch = 0
        self._epoch_began = None
        if self._callbacks is None:
            self.save_at_epoch_end(epoch, logs or {})

    @property
    def step(self) -> int:
        """How many steps the run has taken."""
        return self._step_of_epoch + self._batch

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
        self._refuse_another_run(self._stored)
        self._restore_state(self._stored)
        self.resumed_from = self.saved = header.path
        self.best = header.best
        self.epoch_logs = list(header.epoch_logs)
        self._seconds_before = header.train_seconds
        self._step_of_epoch, self._batch = header.step - header.batch, header.batch
        self._steps_at_last_save = header.step
        # A run that a callback had ended does not train on: the loop then has no epoch to run.
        ended = header.stopped and header.epoch < self.params.get("epochs", header.epoch)
        keras_internals.set_initial_epoch(self.model, self.params["epochs"] if ended else header.epoch)
        if self._within_epochs:
            self.resume_batch = header.batch
            if header.data is not None and header.steps_per_epoch == self.params.get("steps"):
                data, entries = self.params["data"], self._stored.entries
                training_state.restore_data_state(data, header.data, entries, self._peers)

    def begin_resumed_epoch(self) -> None:
        """The first epoch begins; called once all callbacks have seen it begin."""
        # Only this fit begins there, not the model's next one.
        if self.resumed_from is not None:
            keras_internals.set_initial_epoch(self.model, None)
        if self._stored is not None and self.resume_batch:
            # The callbacks have begun this epoch before, in the run that was killed: what they did to the model in
            # `on_epoch_begin` (LearningRateScheduler lowers the rate) must not be done twice.
            self._restore_state(self._stored)
        self._stored, self.resume_batch = None, None

    def save_within_epoch(self, logs: dict[str, Any]) -> None:
        """Saves if it is time to; called once all callbacks have seen the batch."""
        # After an epoch's last batch, the epoch's end is saved instead: the loop could not go on from here to an
        # evaluation. Neither could stock Keras from within an epoch.
        at_end = self._batch == self.params.get("steps") or self.model.stop_training
        if self._due_by_steps() and not at_end and self._within_epochs and not self._only_at_epoch_ends:
            data = training_state.data_state(self.params["data"], self._peers)
            if data is None:
                self._note_only_at_epoch_ends()
                return
            self._save(self._epoch, self._batch, logs, data)
            elastic.leave_if_told(self._peers)

    def save_at_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Saves if it is time to; called once all callbacks have seen the epoch's logs."""
        numbers = {name: value for name, value in logs.items() if isinstance(value, int | float)}
        self.epoch_logs.append({"epoch": epoch, **numbers})
        self._note_best(epoch, numbers)
        due = self.every_epochs is not None and (epoch + 1) % self.every_epochs == 0
        last = epoch + 1 == self.params.get("epochs") or self.model.stop_training
        if due or last or self._due_by_steps():
            data = training_state.data_state(self.params["data"], self._peers) if "data" in self.params else None
            self._save(epoch + 1, 0, logs, data)
            if not last:
                elastic.leave_if_told(self._peers)

    def end(self) -> None:
        """The training ends."""
        if self.resumed_from is not None:
            keras_internals.set_initial_epoch(self.model, None)
        self._stored, self.resume_batch = None, None

    def _begin(self) -> None:
        self.best = None
        self.epoch_logs = []
        self._seconds_before = 0.0
        self._epoch_began = None
        self._epoch = 0
        self._batch = 0
        self._step_of_epoch = 0  # the steps of the run before the current epoch
        self._steps_at_last_save = 0
        self._only_at_epoch_ends = False

    def _choose_alike(self) -> Stored | None:
        """What the chief chooses, in every process: the others need not see its disk."""
        stored = self._choose() if self._peers.world.is_chief else None
        if self._peers.world.world_size == 1:
            return stored
        path = stored.header.path if stored is not None else None
        content = self._peers.exchange(path.read_bytes() if path is not None else b"")[0]
        return checkpoint_format.parse(self.folder / "of the chief", content) if content else None

    def _choose(self) -> Stored | None:
        if self._within_epochs:
            return checkpoint_format.newest(self.folder)
        stored = checkpoint_format.newest(self.folder, lambda header: header.batch == 0)
        if stored is None and (found := checkpoint_format.paths(self.folder)):
            raise CheckpointError(
                f"Keras' own `fit`, and a model that runs eagerly, cannot resume within an epoch, and `{self.folder}` "
                f"holds no checkpoint of an epoch's end; `{found[0].name}` is the newest",
                "train with a strategy of tfdist, or delete the checkpoints to start from the beginning",
            )
        return stored

    def _restore_state(self, stored: Stored) -> None:
        header, entries = stored.header, training_state.of_this(stored.entries, self._peers)
        training_state.assign(self.model, entries, _groups(header))
        others = self._others()
        training_state.restore_callbacks_state(others, header.callbacks, entries, header.train_seconds)
        training_state.restore_random_state(entries)

    def _others(self) -> list[Any]:
        if self._callbacks is None:
            return []
        return [c for c in self._callbacks.callbacks if not isinstance(c, _Last) and not _wraps(c, self)]

    def _refuse_what_cannot_be_resumed(self) -> None:
        """What has no variables yet would have none either when the run is to be resumed."""
        if _loop_is_tfdists(self.params) and not self.model.run_eagerly:
            return  # the loop has made all
        missing = training_state.without_variables(self.model)
        if missing is not None:
            raise CheckpointError(
                f"{missing} has no variables yet, so that a run of the model `{self.model.name}` could not be resumed",
                "build it before `fit`: give the model an input shape, or call it on a batch; and call "
                "`optimizer.build(variables)` of an optimizer that was not given to `compile`",
            )

    def _refuse_another_run(self, stored: Stored) -> None:
        header, model = stored.header, self.model
        hint = "resume with the model and the arguments of the run that wrote it, or use another folder"
        optimizer = model.optimizer
        stored_count = sum(entry.group == "optimizer" for entry in stored.entries)
        lacks_some = stored_count > len(training_state.variables(model)["optimizer"])
        if lacks_some and optimizer is not None and not optimizer.built:
            optimizer.build(model.trainable_variables)
        ours = training_state.optimizer_class(model)
        if ours != header.optimizer:
            raise CheckpointError(
                f"The checkpoint `{header.path}` has the optimizer `{header.optimizer}`, and the model `{ours}`", hint
            )
        difference = training_state.first_difference(model, stored.entries, _groups(header))
        if difference is not None:
            theirs, ours = difference
            raise CheckpointError(
                f"The checkpoint `{header.path}` is of another model: it has {theirs}, where the model has {ours}",
                hint,
            )
        for name, written, now in (
            ("steps in an epoch", header.steps_per_epoch, self.params.get("steps")),
            ("as the seed of the order of examples", header.seed, self.params.get("seed")),
        ):
            # Within an epoch the same batches must follow.
            if header.batch and written is not None and now is not None and written != now:
                raise CheckpointError(
                    f"The checkpoint `{header.path}` was written within an epoch, with {written} {name}, and this run "
                    f"has {now}",
                    "resume with the same data, batch size and seed",
                )

    def _due_by_steps(self) -> bool:
        return self.every_steps is not None and (
            self.step // self.every_steps > self._steps_at_last_save // self.every_steps
        )

    def _note_only_at_epoch_ends(self) -> None:
        self._only_at_epoch_ends = True
        if self._peers.world.is_chief:
            warnings.warn(
                "The data cannot be gone on with in the middle of an epoch, as those of a Python generator cannot, or "
                "of a `PyDataset` that does something between epochs: a run that is resumed begins at an epoch's "
                "start, and `every_steps` saves at the end of the epoch instead",
                stacklevel=2,
            )

    def _save(self, epoch: int, batch: int, logs: dict[str, Any], data: list[checkpoint_format.Entry] | None) -> None:
        if not math.isfinite(logs.get("loss", 0.0)):
            return
        entries = training_state.read(self.model, self._peers)
        if not training_state.finite(self.model, entries):
            return
        entries = training_state.of_all(entries, self._peers)
        self._steps_at_last_save = self.step
        if not self._peers.world.is_chief:
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
            epoch_logs=self.epoch_logs,
            steps_per_epoch=self.params.get("steps"),
            seed=self.params.get("seed"),
            callbacks=states,
            data=None if data is None else self.params["data"].place,
        )
        arrays += [*training_state.random_state(), *(data or [])]
        self.saved = checkpoint_format.write(self.folder, header, [*entries, *arrays])
        checkpoint_format.prune(self.folder, self.keep, self.saved)

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


def _callback_list() -> keras.callbacks.CallbackList | None:
    """The list whose `set_model` is calling.

    Keras tells a callback of its model but never of the other callbacks, whose state belongs to the training.
    """
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, keras.callbacks.CallbackList):
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _loop_is_tfdists(params: dict[str, Any]) -> bool:
    """Whether tfdist's loop runs, which can begin within an epoch: it alone tells callbacks the number of examples."""
    return "examples" in params


def _wraps(callback: Any, wanted: Any) -> bool:
    while callback is not None and callback is not wanted:
        callback = getattr(callback, "callback", None)
    return callback is wanted


def _groups(header: Header) -> tuple[str, ...]:
    """What is restored: an epoch that begins resets the metrics, so that others may be compiled."""
    return ("model", "optimizer", "metrics") if header.batch else ("model", "optimizer")
