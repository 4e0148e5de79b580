"""The callback `Checkpoint`: checkpoints from which a training can be resumed as if it had never been killed.

    model.fit(x, y, epochs=10, callbacks=[Checkpoint("run/checkpoints", every_steps=100, resume=True)])

The order of events in an epoch of five steps with `every_steps=2`:

    on_train_begin        resume: the state is restored, after `on_train_begin` of all other callbacks
    step 1, step 2        saved (epoch 0, batch 2)
    step 3, step 4        saved (epoch 0, batch 4)
    step 5, evaluation
    on_epoch_end          saved (epoch 1, batch 0), after `on_epoch_end` of all other callbacks

All optimizers in attributes of the model are saved. Variables that do not exist before the first step could not be
restored: a model that would be built during the first step, by Keras' own `fit` or with `run_eagerly=True`, is refused
at the start. Eager runs, which also make their metrics during the first step, are saved only at the end of epochs.

`tfdist.checkpointing.format` defines the format of the files, and `tfdist.checkpointing.state` their content.
"""

from __future__ import annotations

import functools
import math
import operator
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras

from tfdist import terminal
from tfdist.callbacks.throughput import ClockedCallback
from tfdist.checkpointing import format as checkpoint_format
from tfdist.checkpointing import state as training_state
from tfdist.checkpointing import writer
from tfdist.checkpointing.format import Entry, Header, Stored
from tfdist.errors import CheckpointError, UnknownNameError, UsageError
from tfdist.interface.variables import broadcast_array
from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_patches
from tfdist.jobs import consensus, elastic
from tfdist.options import checks_arguments

if TYPE_CHECKING:
    from tfdist.data.input.feed import DataPasses
    from tfdist.interface.strategy import Strategy

BEGAN, SEED = "start", "seed"  # facts that identify a run


class Checkpoint(ClockedCallback):
    """Saves the whole state of a training at regular intervals, and resumes a training from it.

    A file has the variables of the model, its optimizer and its metrics, the random states, the position, the state of
    Keras' callbacks (your own callbacks take part with `checkpoint_state()` and `restore_checkpoint_state(state)`), the
    logs of the epochs and the training time. A run that is killed at any moment and started again with `resume=True`
    ends with the result of an unbroken run, if it has the same data, and the same `seed` of its strategy if that is
    set; otherwise the strategy takes the seed of the checkpoint.

    Stock Keras' `fit` can only begin with the first batch of an epoch. There the newest checkpoint from the end of an
    epoch is resumed, and instead of `every_steps` the end of the epoch is saved.

    Nothing is saved while the loss or a trained weight is not finite.

    In a job of several processes each process has this callback; the chief reads and writes for all.

    Args:
        folder: the folder of the files, which is made if needed. It belongs to one run.
        every_steps: the number of steps between checkpoints, counted over the whole run.
        every_epochs: the number of epochs between checkpoints. The last epoch is always saved.
        keep: the number of files that are kept, the newest; 1 or more.
        resume: continue from the newest complete checkpoint in `folder`; start from the beginning if there is none,
            and say so.
        monitor: the name in the logs of the value for `best`; `None` is "val_loss", or "loss" without validation.
        mode: "min" if smaller is better, "max" if larger is better.
        run: facts that identify the run, such as `{"seed": 0, "model": "mlp"}`; they are stored in each file, and a
            file in which one of them differs is refused. By default, a run is identified by when it began, and
            the files in `folder` have to be of the same run.

    Attributes:
        resumed_from: the file from which this `fit` was resumed, or `None`.
        saved: the file that was written last, or `None`; waits for a write in progress.
        best: `{"monitor", "value", "epoch"}` of the best epoch so far, or `None`.
        step: the number of steps of the run so far.
        epoch_logs: the logs of each finished epoch, with its number under "epoch".
        train_seconds: the training time of the run, without evaluation.

    Raises:
        UsageError: an argument is out of range.
        CheckpointError: before the first step: the checkpoints in the folder belong to another run or model, or none of
            them is complete; later: a file cannot be written.
    """

    best: dict[str, Any] | None
    epoch_logs: list[dict[str, Any]]
    _epoch_began: float | None

    @checks_arguments
    def __init__(
        self,
        folder: str | Path,
        every_steps: int | None = None,
        every_epochs: int | None = 1,
        keep: int = 3,
        resume: bool = False,
        monitor: str | None = None,
        mode: str = "min",
        run: Mapping[str, int | str] | None = None,
    ):
        super().__init__()
        for name, value in (("every_steps", every_steps), ("every_epochs", every_epochs), ("keep", keep)):
            if value is not None and value < 1:
                owner = type(self).__name__
                raise UsageError(f"{owner} needs `{name}` of 1 or more. Received: `{value}`", "pass 1 or more")
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
        self._store = _Store(self.folder, keep, None if run is None else dict(run))
        self._writer = writer.Writer()
        self._callbacks: keras.callbacks.CallbackList | None = None
        self._strategy: Strategy | None = None
        self._data: DataPasses | None = None
        self._stored: Stored | None = None
        self._within_epochs = False  # whether a run can be resumed within an epoch
        keras_patches.tell_callbacks_of_their_list()
        self._begin()

    def set_callback_list(self, callback_list: keras.callbacks.CallbackList) -> None:
        """Called before training with all its callbacks, whose state is saved, too."""
        self._callbacks = callback_list

    def set_model(self, model: keras.Model) -> None:
        """Adds the callback that saves and restores behind all other callbacks."""
        super().set_model(model)
        self._strategy = self._data = None  # in Keras' own loop; tfdist's loop then calls `set_training`
        if self._callbacks is None:  # hooks called by hand
            return
        if not any(isinstance(c, _Last) and c.checkpoint is self for c in self._callbacks.callbacks):
            # Keras is iterating over the list, and will reach what is appended now.
            self._callbacks.callbacks.append(_Last(self))

    def set_training(self, strategy: Strategy, data: DataPasses) -> None:
        """Called by tfdist's loop before training."""
        self._strategy, self._data = strategy, data

    def seed_to_resume_with(self) -> int | None:
        """The seed of the order of examples in the checkpoint that is resumed; `None` if there is none."""
        if not self.resume:
            return None
        writer.wait_for_all()
        stored = self._store.read_ahead()
        return None if stored is None else stored.header.seed

    def batches_until_hook(self, batch: int) -> int | None:
        """Returns the number of batches to the next multiple of `every_steps`."""
        return None if self.every_steps is None else self._position.until_due(self.every_steps, batch)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Chooses the checkpoint that is resumed."""
        super().on_train_begin(logs)
        writer.wait_for_all()  # for writes of a training that an error has ended
        self._writer.error()
        if self.saved is None:
            self._begin()
        self.resumed_from, self.resume_batch, self._stored = None, None, None
        if self._data is None or self.model.run_eagerly:  # tfdist's loop makes all variables of a graph at the start
            _refuse_without_variables(self.model)
        # A model that runs eagerly makes its metrics with the first batch, and they could not be restored before.
        has_metrics = not self.model.run_eagerly or keras_internals.is_built(self.model, "test")
        self._within_epochs = self._data is not None and has_metrics
        if self._peers.world.is_chief:
            checkpoint_format.remove_temporaries(self.folder)
        # Processes may differ in `resume`, such as after a restart on another machine: the chief decides for all.
        if consensus.broadcast_from_chief(self._peers, self.resume):
            self._stored = self._store.newest(self._peers, self._within_epochs)
            if self._stored is None and self.saved is None and self._peers.world.is_chief:
                terminal.say(
                    f"Nothing to resume: `{self.folder}` has no checkpoint, and training starts from the beginning."
                )
        elif self._peers.world.is_chief and self.saved is None:
            self._store.refuse_another_run()
        if self._callbacks is None:
            self.restore()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self._position.begin_epoch(epoch, self.resume_batch or 0)
        self._epoch_began = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        steps = self.params.get("steps")
        self._position.batch = min(batch + 1, steps) if steps else batch + 1  # Keras rounds the last chunk up
        if self._callbacks is None:
            self.save_within_epoch(logs or {})

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        self._position.end_epoch()
        self._epoch_began = None
        if self._callbacks is None:
            self.save_at_epoch_end(epoch, logs or {})

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if self._callbacks is None:
            self.end()

    @property
    def saved(self) -> Path | None:
        """The file that was written last, or `None`; waits for a write in progress."""
        self._writer.wait()
        return self._writer.written

    @property
    def step(self) -> int:
        """The number of steps of the run so far."""
        return self._position.step

    @property
    def train_seconds(self) -> float:
        """The training time of the run so far, without evaluation."""
        unfinished = time.perf_counter() - self._epoch_began if self._epoch_began is not None else 0.0
        return self._seconds_before + self.clock.total_train_seconds + unfinished

    def restore(self) -> None:
        """Restores the state; called after `on_train_begin` of all other callbacks."""
        if self._stored is None:
            return
        header = self._stored.header
        assert header.path is not None
        _refuse_another_run(self.model, self._stored, self.params.get("steps"), self._seed)
        training_state.restore(self.model, self._others(), self._stored, self._peers, send=False)  # the loop sends it
        if self.saved is None and self._peers.world.is_chief:
            where = f"epoch {header.epoch + 1}" + (f", batch {header.batch + 1}" if header.batch else "")
            terminal.say(f"Resuming from `{header.path}` at {where}.")
        self.resumed_from = self._writer.written = header.path
        self.best = header.best
        self.epoch_logs = list(header.epoch_logs)
        self._seconds_before = header.train_seconds
        self._position = _Position(header.epoch, header.batch, header.step - header.batch, header.step)
        # A run that a callback has stopped is not continued: the loop then has no epoch to run.
        ended = header.stopped and header.epoch < self.params.get("epochs", header.epoch)
        keras_internals.set_initial_epoch(self.model, self.params["epochs"] if ended else header.epoch)
        if self._within_epochs:
            self.resume_batch = header.batch
            if header.data is not None and header.steps_per_epoch == self.params.get("steps"):
                training_state.restore_data_state(self._data, header.data, self._stored.entries, self._peers)

    def begin_resumed_epoch(self) -> None:
        """Restores the state within an epoch; called after `on_epoch_begin` of all other callbacks."""
        # Only this `fit` begins with another epoch, and not the next `fit` of the model.
        if self.resumed_from is not None:
            keras_internals.set_initial_epoch(self.model, None)
        if self._stored is not None and self.resume_batch:
            # The callbacks have already begun this epoch, in the run that was killed: what they change in the model in
            # `on_epoch_begin`, such as LearningRateScheduler the rate, must not be changed twice.
            training_state.restore(self.model, self._others(), self._stored, self._peers, send=True)
        self._stored, self.resume_batch = None, None

    def save_within_epoch(self, logs: dict[str, Any]) -> None:
        """Saves if a checkpoint is due; called after `on_train_batch_end` of all other callbacks."""
        if (error := self._writer.error()) is not None:
            raise error
        # After the last batch of an epoch, its end is saved instead: the loop could not continue with an evaluation.
        at_end = self._position.batch == self.params.get("steps") or self.model.stop_training
        due = self._position.is_due(self.every_steps)
        if due and not at_end and self._within_epochs and not self._only_at_epoch_ends:
            strategy, data = self._strategy, self._data_state()
            if strategy is None or data is None:
                return self._note_only_at_epoch_ends()
            strategy.before_checkpoint(self.model)
            self._save(self._position.epoch, self._position.batch, logs, data)
            elastic.end_if_signaled(self._peers, self._finish_write)

    def save_at_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Saves if a checkpoint is due; called after `on_epoch_end` of all other callbacks."""
        numbers = {name: value for name, value in logs.items() if isinstance(value, int | float)}
        self.epoch_logs.append({"epoch": epoch, **numbers})
        self._note_best(epoch, numbers)
        due = self.every_epochs is not None and (epoch + 1) % self.every_epochs == 0
        last = epoch + 1 == self.params.get("epochs") or self.model.stop_training
        if due or last or self._position.is_due(self.every_steps):
            self._save(epoch + 1, 0, logs, self._data_state(), last)
            if not last:
                elastic.end_if_signaled(self._peers, self._finish_write)

    def end(self) -> None:
        """Ends the training, after its last checkpoint is written."""
        self._finish_write()
        if self.resumed_from is not None:
            keras_internals.set_initial_epoch(self.model, None)
        self._stored, self.resume_batch = None, None

    def _begin(self) -> None:
        self.best = None
        self.epoch_logs = []
        self._seconds_before = 0.0
        self._epoch_began = None
        self._position = _Position()
        self._only_at_epoch_ends = False

    @property
    def _peers(self) -> consensus.Peers:
        return self._strategy or consensus.Alone()

    @property
    def _seed(self) -> int | None:
        return None if self._strategy is None else self._strategy.seed

    def _data_state(self) -> list[Entry] | None:
        """The state of the data; `None` for data with which a run cannot be resumed within an epoch."""
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
                "The data cannot be resumed within an epoch, because they come from a Python generator, or from a "
                "`PyDataset` that changes between epochs: a resumed run begins with an epoch, and `every_steps` saves "
                "at the end of the epoch instead",
                stacklevel=2,
            )

    def _save(self, epoch: int, batch: int, logs: dict[str, Any], data: list[Entry] | None, last: bool = False) -> None:
        if not math.isfinite(logs.get("loss", 0.0)):
            return
        self._finish_write()  # so that there is only one snapshot in memory
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
            last=last,
            best=self.best,
            train_seconds=self.train_seconds,
            epoch_logs=list(self.epoch_logs),
            steps_per_epoch=self.params.get("steps"),
            seed=self._seed,
            callbacks=states,
            data=None if data is None or self._data is None else self._data.position_in_passes,
            run=self._store.facts,
        )
        entries += [*training_state.untracked_variables(self.model), *arrays]
        entries += [*training_state.random_states(), *(data or [])]
        self._writer.start(functools.partial(self._store.write, header, entries))

    def _finish_write(self) -> None:
        """Waits for the chief's write in progress; all processes call it.

        Raises:
            CheckpointError: the write has failed; raised in all processes.
        """
        self._writer.wait()
        error = self._writer.error()
        message = consensus.broadcast_from_chief(self._peers, error and [error.sentence, error.hint])
        if message:
            raise CheckpointError(*message) from error

    def _note_best(self, epoch: int, logs: dict[str, Any]) -> None:
        monitor = self.monitor or ("val_loss" if "val_loss" in logs else "loss")
        value = logs.get(monitor)
        is_better = operator.lt if self.mode == "min" else operator.gt
        if value is None or not math.isfinite(value):
            return
        if self.best is None or self.best["monitor"] != monitor or is_better(value, self.best["value"]):
            self.best = {"monitor": monitor, "value": value, "epoch": epoch}


class _Last(keras.callbacks.Callback):
    """The last callback of the list: its hooks are called after those of all other callbacks."""

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


class _Store:
    """The folder with the checkpoints of one run, which only the chief reads and writes.

    Args:
        folder: the folder of one run; made by the first write.
        keep: the number of checkpoints to keep.
        run: facts that identify the run, by name; `None` if only the files identify it.

    Attributes:
        facts: the facts that identify the run, for the files that are written.
    """

    def __init__(self, folder: Path, keep: int, run: dict[str, int | str] | None):
        self.folder = folder
        self._keep = keep
        self._run = run
        self.facts: dict[str, int | str] = {BEGAN: datetime.now(UTC).isoformat()} if run is None else run
        self._ahead: Stored | None = None

    def read_ahead(self) -> Stored | None:
        """Reads the newest intact checkpoint on the chief; the next call of `newest` does not read it again."""
        self._ahead = checkpoint_format.newest(self.folder)
        return self._ahead

    def newest(self, peers: consensus.Peers, within_epochs: bool) -> Stored | None:
        """Returns the chief's newest intact checkpoint in every process; the others need no access to its disk.

        The others get all values except those that the chief broadcasts once it has assigned them.

        Args:
            peers: the processes of the job, all of which must call this method.
            within_epochs: whether a training can begin within an epoch; otherwise only ends of epochs count.

        Raises:
            CheckpointError: there are checkpoints, but all are damaged, or none is from an epoch's end.
        """
        stored = self._newest(within_epochs) if peers.world.is_chief else None
        if peers.world.world_size == 1:
            return stored
        description = stored.described(without=training_state.is_shared) if stored else None
        description = consensus.broadcast_from_chief(peers, description)
        if description is None:
            return None
        stored = stored or checkpoint_format.described_by(description)
        for entry in stored.entries:
            if not training_state.is_shared(entry):
                broadcast_array(entry.value, peers.broadcast)
        return stored

    def _newest(self, within_epochs: bool) -> Stored | None:
        ahead, self._ahead = self._ahead, None
        stored = ahead if ahead is not None and (within_epochs or ahead.header.batch == 0) else None
        stored = stored or self._search(within_epochs)
        if stored is not None:
            self._require_this_run(stored.header)
        return stored

    def _search(self, within_epochs: bool) -> Stored | None:
        if within_epochs:
            return checkpoint_format.newest(self.folder)
        stored = checkpoint_format.newest(self.folder, lambda header: header.batch == 0)
        if stored is None and (paths := checkpoint_format.paths(self.folder)):
            raise CheckpointError(
                f"Keras' own `fit` and eager models cannot resume within an epoch, and `{self.folder}` contains no "
                f"checkpoint from an epoch's end; `{paths[0].name}` is the newest",
                "train with a strategy of tfdist, or delete the checkpoints to start from the beginning",
            )
        return stored

    def _require_this_run(self, header: Header) -> None:
        """Raises `CheckpointError` if a checkpoint is of another run; files of earlier versions have fewer facts."""
        if self._run is None:
            self._require_one_run()
            self.facts = header.run or self.facts
            return
        for name, value in self._run.items():
            written = header.run.get(name, header.seed if name == SEED else None)
            if written not in (None, value):
                raise CheckpointError(
                    f"The checkpoint `{header.path}` is of another run, with the {name} `{written}`; this run has the "
                    f"{name} `{value}`",
                    "delete it to continue from an earlier checkpoint, or resume the run that wrote it in its folder",
                )

    def _require_one_run(self) -> None:
        """Raises `CheckpointError` if the folder has checkpoints of several runs."""
        runs: dict[int | str, Path] = {}
        for path in checkpoint_format.paths(self.folder):
            header = checkpoint_format.header_of(path)
            if header is not None and BEGAN in header.run:
                runs.setdefault(header.run[BEGAN], path)
        if len(runs) > 1:
            names = ", ".join(f"`{path.name}` of the run that began at {began}" for began, path in runs.items())
            raise CheckpointError(
                f"The folder `{self.folder}` has checkpoints of {len(runs)} runs: {names}",
                "delete the files of the other runs; a folder belongs to one run",
            )

    def refuse_another_run(self) -> None:
        if paths := checkpoint_format.paths(self.folder):
            raise CheckpointError(
                f"The folder `{self.folder}` already contains checkpoints, of which `{paths[0].name}` is the newest, "
                "and a new run would replace them",
                "resume it (`Checkpoint(..., resume=True)`, `--resume`), or use another folder",
            )

    def write(self, header: Header, entries: list[Entry]) -> Path:
        """Writes a checkpoint, emptying `entries`, and removes the oldest checkpoints beyond the number to keep."""
        path = checkpoint_format.write(self.folder, header, entries)
        checkpoint_format.prune(self.folder, self._keep, path)
        return path


@dataclass
class _Position:
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
        self.epoch, self.batch = epoch, batch

    def end_epoch(self) -> None:
        self.steps_before, self.batch = self.step, 0

    def is_due(self, every_steps: int | None) -> bool:
        """Whether a multiple of `every_steps` was reached since the last checkpoint."""
        return every_steps is not None and self.step // every_steps > self.step_saved // every_steps

    def until_due(self, every_steps: int, batch: int) -> int:
        """Returns the number of steps from batch number `batch` of the epoch to the next multiple of `every_steps`."""
        return every_steps - (self.steps_before + batch) % every_steps


def _refuse_without_variables(model: Any) -> None:
    """Raises `CheckpointError` for a layer or optimizer without variables, since it could not be restored.

    The compiled optimizer is built later.
    """
    optimizers = keras_internals.optimizers(model)
    missing = [f"The layer `{layer.name}`" for layer in keras_internals.layers_to_build(model) if not layer.built]
    missing += [f"The optimizer `{each.name}`" for each in optimizers if not each.built and each is not model.optimizer]
    if missing:
        raise CheckpointError(
            f"{missing[0]} has no variables yet, so that a run of the model `{model.name}` could not be resumed",
            "build it before `fit`: give the model an input shape, or call it on a batch; for an optimizer that is not "
            "passed to `compile`, call `optimizer.build(variables)`",
        )


def _refuse_another_run(model: Any, stored: Stored, steps_per_epoch: int | None, seed: int | None) -> None:
    """Raises `CheckpointError` if a checkpoint has another model, another optimizer or another order of batches.

    Args:
        model: the compiled model; its optimizer is built if the checkpoint contains the optimizer's variables.
        stored: the checkpoint.
        steps_per_epoch: the steps per epoch of the current run; `None` if unknown.
        seed: the seed of the order of its examples; `None` if unknown.
    """
    header = stored.header
    hint = "resume with the model and the arguments of the run that wrote it, or use another folder"
    in_checkpoint = sum(entry.group == "optimizer" for entry in stored.entries)
    lacks_some = in_checkpoint > len(training_state.variables(model)["optimizer"])
    if lacks_some and model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    optimizer = training_state.optimizer_class(model)
    if optimizer != header.optimizer:
        raise CheckpointError(
            f"The checkpoint `{header.path}` has the optimizer `{header.optimizer}`, and the model `{optimizer}`", hint
        )
    difference = training_state.first_difference(model, stored.entries, training_state.groups_to_restore(model, stored))
    if difference is not None:
        raise CheckpointError(
            f"The checkpoint `{header.path}` is of another model: it has {difference[0]}, where the model has "
            f"{difference[1]}",
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
