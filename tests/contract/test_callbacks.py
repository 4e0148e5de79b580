"""Point 1, the callbacks: each of Keras' callbacks gives what it gives under stock `fit`, however many steps run in one
call of the inner loop."""

import contextlib
import csv
import functools
import io
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import callbacks, optimizers
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.contract import cases, contestants
from tests.contract.cases import BATCH, classification
from tests.contract.comparison import STOCK, assert_same, start
from tfdist.callbacks import StopAtNonFiniteLoss
from tfdist.errors import NonFiniteLossError

REPLICAS = contestants.FEW
# XLA would only make stock Keras slower to start.
dense = functools.partial(cases.dense, jit_compile=False)
TRAINING, UNSEEN = classification(3 * BATCH + 3), classification(BATCH + 3, seed=1)


@dataclass(frozen=True)
class Case:
    """A training with callbacks that write into a folder, and what of the folder and the callbacks must be the same."""

    callbacks: Callable[[Path], list]
    results: Callable[[Path, list], Any] = lambda folder, used: None
    model: Callable[[], Any] = field(default_factory=dense)
    data: dict[str, Any] = field(default_factory=lambda: TRAINING)
    fit: dict[str, Any] = field(default_factory=dict)


def train(case, contestant, **options):
    strategy = start(contestant, **options)
    with strategy.scope():
        model = case.model()
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(io.StringIO()) as printed:
        used = case.callbacks(Path(name))
        fit = {
            "batch_size": BATCH,
            "epochs": 3,
            "shuffle": False,
            "verbose": 0,
            "validation_data": tuple(UNSEEN.values()),
        }
        history = strategy.fit(model, **case.data, **fit | case.fit, callbacks=used).history
        return {
            "history": history,
            "weights": model.get_weights(),
            "iterations": int(model.optimizer.iterations.numpy()),
            # Of several processes the chief alone writes.
            "results": case.results(Path(name), used) if contestants.WORLD.is_chief or contestant == STOCK else None,
            "printed": figures(printed.getvalue()),
        }


def files_of_weights(folder, used):
    """Every array in every file, by file and path."""
    found = {}
    for path in sorted(folder.glob("*.h5")):
        with h5py.File(path) as file:
            arrays = found[path.name] = {}
            file.visititems(
                lambda name, item, arrays=arrays: arrays.update({name: item[()]}) if _is_array(item) else None
            )
    return found


def _is_array(item):
    return isinstance(item, h5py.Dataset) and item.dtype.kind in "fiu"


def saved_models(folder, used):
    return {
        path.name: keras.models.load_model(path).predict(UNSEEN["x"], verbose=0) for path in sorted(folder.iterdir())
    }


def rows_of_csv(folder, used):
    with open(folder / "log.csv", encoding="utf-8") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def scalars(folder, used):
    """Each scalar of the event files, as `(step, value)` by run and tag."""
    found = {}
    for run in sorted(path for path in folder.iterdir() if path.is_dir()):
        events = EventAccumulator(str(run), size_guidance={"tensors": 0}).Reload()
        for tag in sorted(events.Tags()["tensors"]):
            values = [(e.step, tf.make_ndarray(e.tensor_proto)) for e in events.Tensors(tag)]
            if values[0][1].dtype.kind == "f":
                found[f"{run.name} {tag}"] = [(step, float(value)) for step, value in values]
    return found


def figures(printed):
    """The names and figures of the last state of each progress bar, and all other words but times."""
    ends = [line.split("\r")[-1].split("\b")[-1] for line in printed.splitlines()]
    return [
        [(name, float(value)) for name, value in re.findall(r"(\w+): (-?[\d.]+(?:e[+-]\d+)?)", e)] for e in ends if e
    ]


def attributes(*names):
    return lambda folder, used: [getattr(used[0], name) for name in names]


class StopsAt(callbacks.Callback):
    """Stops in the middle of an epoch, in a batch hook."""

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations.numpy()) == 6:
            self.model.stop_training = True


def diverging():
    return dense(lambda: optimizers.SGD(3.0))


def with_nan(example):
    data = classification(3 * BATCH + 3)
    data["x"][example] = np.nan
    return data


def averaging():
    return dense(lambda: optimizers.Adam(0.02, use_ema=True, ema_momentum=0.8))


CASES = {
    "ModelCheckpoint": Case(
        lambda folder: [callbacks.ModelCheckpoint(folder / "{epoch}.weights.h5", save_weights_only=True)],
        files_of_weights,
    ),
    "ModelCheckpoint of the whole model": Case(
        lambda folder: [callbacks.ModelCheckpoint(folder / "{epoch}.keras")], saved_models
    ),
    "ModelCheckpoint of the best": Case(
        lambda folder: [
            callbacks.ModelCheckpoint(folder / "{epoch}.weights.h5", save_weights_only=True, save_best_only=True)
        ],
        files_of_weights,
        diverging(),
    ),
    "ModelCheckpoint every 3 batches": Case(
        lambda folder: [
            callbacks.ModelCheckpoint(folder / "{epoch}-{batch}.weights.h5", save_weights_only=True, save_freq=3)
        ],
        files_of_weights,
    ),
    "EarlyStopping with the best weights": Case(
        lambda folder: [callbacks.EarlyStopping(patience=2, restore_best_weights=True)],
        attributes("stopped_epoch", "best_epoch", "best"),
        diverging(),
        fit={"epochs": 6},
    ),
    "ReduceLROnPlateau": Case(
        lambda folder: [callbacks.ReduceLROnPlateau("loss", factor=0.3, patience=1, min_delta=10.0)], fit={"epochs": 4}
    ),
    "LearningRateScheduler": Case(lambda folder: [callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)]),
    "TensorBoard every epoch": Case(lambda folder: [callbacks.TensorBoard(folder)], scalars),
    "TensorBoard every 2 batches": Case(lambda folder: [callbacks.TensorBoard(folder, update_freq=2)], scalars),
    "CSVLogger": Case(lambda folder: [callbacks.CSVLogger(folder / "log.csv")], rows_of_csv),
    "TerminateOnNaN": Case(lambda folder: [callbacks.TerminateOnNaN()], data=with_nan(2 * BATCH + 1)),
    "SwapEMAWeights": Case(lambda folder: [callbacks.SwapEMAWeights()], model=averaging()),
    "SwapEMAWeights at the end of epochs": Case(
        lambda folder: [
            callbacks.SwapEMAWeights(swap_on_epoch=True),
            callbacks.ModelCheckpoint(folder / "{epoch}.weights.h5", save_weights_only=True),
        ],
        files_of_weights,
        averaging(),
    ),
    "stop_training in a batch hook": Case(lambda folder: [StopsAt()]),
    "the progress bar": Case(lambda folder: [], fit={"verbose": 1}),
    "a line an epoch": Case(lambda folder: [], fit={"verbose": 2}),
}


@functools.cache
def reference(name):
    return train(CASES[name], STOCK)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CASES)
def test_gives_what_it_gives_under_stock_fit(name, contestant):
    # Printed figures are rounded to four digits.
    expected, found = dict(reference(name)), train(CASES[name], contestant)
    if not contestants.WORLD.is_chief:
        found["results"], found["printed"] = expected["results"], expected["printed"]
    assert_same(found.pop("printed"), expected["printed"], tolerance=3e-4)
    assert_same(found, {key: value for key, value in expected.items() if key != "printed"})
    if name == "TerminateOnNaN":
        assert found["iterations"] == 3


class InterruptionError(Exception):
    pass


class Interrupts(callbacks.Callback):
    def __init__(self, epoch, batch):
        super().__init__()
        self.at, self.epoch = (epoch, batch), None

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if (self.epoch, batch) == self.at:
            raise InterruptionError


def interrupted_and_resumed(contestant):
    fit = {"batch_size": BATCH, "epochs": 4, "shuffle": False, "verbose": 0}
    with tempfile.TemporaryDirectory() as folder:
        for interrupt in (True, False):
            strategy = start(contestant)
            with strategy.scope():
                model = dense(lambda: optimizers.Adam(0.02))()
            used = [callbacks.BackupAndRestore(folder)] + [Interrupts(2, 1)] * interrupt
            with contextlib.suppress(InterruptionError):
                history = strategy.fit(model, **TRAINING, **fit, callbacks=used)
    return {"epochs": history.epoch, "history": history.history, "weights": model.get_weights()}


@functools.cache
def reference_resumed():
    return interrupted_and_resumed(STOCK)


@pytest.mark.thorough
def test_backup_and_restore_resumes_an_interrupted_training(contestant):
    found = interrupted_and_resumed(contestant)
    assert found["epochs"] == [2, 3]
    assert_same(found, reference_resumed())


HOOKS = {
    kind: [f"on_{kind}_{when}" for when in ("begin", "end", "batch_begin", "batch_end")]
    for kind in ("train", "test", "predict")
}
HOOKS["train"] += ["on_epoch_begin", "on_epoch_end", "on_batch_begin", "on_batch_end"]


def recorder(heard, hook):
    """A hook that notes its name, its index, and its logs by name."""

    def record(*arguments, logs=None):
        index = [argument for argument in arguments if isinstance(argument, int)]
        logs = next((argument for argument in arguments if isinstance(argument, dict)), logs) or {}
        heard.append((hook, index, {name: np.asarray(value) for name, value in logs.items()}))

    return record


def hear(strategy, model, groups):
    """What each group of hooks hears in a training, an evaluation and a prediction, all from the same weights."""
    weights, heard = model.get_weights(), []
    for hooks in groups:
        model.set_weights(weights)
        heard.append([])
        used = [callbacks.LambdaCallback(**{hook: recorder(heard[-1], hook) for hook in hooks})]
        options = {"batch_size": BATCH, "verbose": 0, "callbacks": used}
        kinds = {kind for kind, names in HOOKS.items() if set(names) & set(hooks)}
        if kinds & {"train", "test"}:
            fit = {"epochs": 2, "shuffle": False, "validation_data": tuple(UNSEEN.values())}
            strategy.fit(model, **TRAINING, **fit, **options)
        if "test" in kinds:
            strategy.evaluate(model, **UNSEEN, **options)
        if "predict" in kinds:
            strategy.predict(model, UNSEEN["x"], **options)
    return heard


def heard_by(contestant, groups, steps_per_execution):
    strategy = start(contestant)
    with strategy.scope():
        model = dense(steps_per_execution=steps_per_execution)()
    return hear(strategy, model, groups)


ALL = [hook for hooks in HOOKS.values() for hook in hooks]
EACH = [(hook,) for hook in ALL]


@functools.cache
def reference_heard(alone, steps_per_execution):
    return heard_by(STOCK, EACH if alone else [ALL], steps_per_execution)


@pytest.mark.thorough
def test_each_hook_alone_is_called_as_under_stock_fit(contestant):
    found = heard_by(contestant, EACH, 1)
    for hook, one, other in zip(ALL, found, reference_heard(True, 1), strict=True):
        assert_same(one, other, where=hook)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("steps_per_execution", [1, 3])
def test_all_hooks_are_called_in_the_order_of_stock_fit(contestant, steps_per_execution):
    assert_same(heard_by(contestant, [ALL], steps_per_execution), reference_heard(False, steps_per_execution))


@pytest.mark.thorough
def test_the_length_of_the_inner_loop_does_not_show(contestant):
    case = Case(lambda folder: [], fit={"batch_size": 3})
    one, fifty = (train(case, contestant, steps_per_call=steps) for steps in (1, 50))
    assert_same(one, fifty, tolerance=1e-6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("data", ["arrays", "a generator", "one step per call", "eager steps"])
def test_a_loss_that_is_not_finite_ends_training_with_its_epoch_and_step(data, contestant):
    if contestant[0] == "stock_mirrored":
        pytest.skip("the callback is tfdist's")
    strategy = start(contestant, **({"steps_per_call": 1} if data == "one step per call" else {}))
    with strategy.scope():
        model = dense(run_eagerly=data == "eager steps")()
    x, y = TRAINING["x"].copy(), TRAINING["y"]
    x[2 * BATCH - 1] = np.inf  # in the part of the last replica
    fit = {"x": x, "y": y, "batch_size": BATCH, "shuffle": False}
    if data == "a generator":
        fit = {"x": ((x[at : at + BATCH], y[at : at + BATCH]) for at in range(0, len(x), BATCH))}
    with pytest.raises(NonFiniteLossError, match=r"became `(nan|inf)` in epoch 1 at step 2\n"):
        strategy.fit(model, **fit, verbose=0, callbacks=[StopAtNonFiniteLoss()])
