"""What an option is given is checked before anything is made of it: a mistake is one sentence."""

import importlib
import inspect
from dataclasses import dataclass

import keras
import numpy as np
import pytest

import tfdist.data
import tfdist.models
from tests import zoo
from tfdist import callbacks, options, registry
from tfdist.errors import UsageError
from tfdist.horovod import callbacks as hvd_callbacks

MODELS = [("tfdist.models", name, "build") for name in tfdist.models.names()]
DATASETS = [("tfdist.data.sources", name, "load") for name in tfdist.data.names()]


@pytest.mark.parametrize(("package", "name", "function"), MODELS + DATASETS)
def test_every_option_of_a_model_or_a_dataset_says_what_it_may_be(package, name, function):
    function = getattr(importlib.import_module(f"{package}.{name}"), function)
    given = {p.name: p.default for p in inspect.signature(function).parameters.values() if p.default is not p.empty}
    assert set(given) <= set(options._annotations(function))
    assert options.checked(function, given, kind="model", name=name) == given


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"units": "many"}, "`many` as `units`: input should be a valid integer"),
        ({"units": 1.5}, "`1.5` as `units`: input should be a valid integer"),
        ({"units": 0}, "`0` as `units`: input should be greater than or equal to 1"),
        ({"dropout": 1}, "`1` as `dropout`: input should be less than 1"),
        ({"width": -1.0}, "`-1.0` as `width`: input should be greater than 0"),
        ({"width": None}, "`None` as `width`: input should be a valid number"),
    ],
)
def test_a_value_that_an_option_cannot_have_is_refused(given, said):
    with pytest.raises(UsageError, match=f"The model `mlp` cannot have {said}.*\n\nhint: correct it, or leave it out"):
        tfdist.models.build("mlp", zoo.images(4, 4, 1), **given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"shape": "32,32,3"}, "`32,32,3` as `shape`: input should be a sequence, such as a list, and is text"),
        ({"shape": 32}, "`32` as `shape`: input should be an instance of Sequence"),
        ({"shape": (32, 0, 3)}, r"`\(32, 0, 3\)` as `shape`: input should be greater than or equal to 1"),
        ({"train": -1}, "`-1` as `train`: input should be greater than or equal to 0"),
    ],
)
def test_data_that_cannot_be_made_are_refused(given, said):
    with pytest.raises(UsageError, match=f"The dataset `synthetic` cannot have {said}"):
        tfdist.data.load("synthetic", **given)


def test_a_number_may_be_written_as_a_text_and_a_text_as_a_number():
    def build(spec, *, units: options.Count = 1, folder: str = "", size: options.Size = (8, 8), anything=None):
        return {"units": units, "folder": folder, "size": size, "anything": anything}

    given = {"units": "64", "folder": 2024, "size": "32", "anything": "as it is"}
    expected = {"units": 64, "folder": "2024", "size": (32, 32), "anything": "as it is"}
    assert registry.call(build, None, kind="model", name="mine", options=given) == expected


@dataclass
class Layout:
    depth: int


@pytest.mark.parametrize("annotation", ["NotImported", Layout, "1 +"])
def test_annotations_of_the_users_own_that_nothing_can_be_checked_by_are_let_be(annotation):
    def build(spec, *, own=None):
        return own

    build.__annotations__["own"] = annotation
    layout = Layout(3)
    assert registry.call(build, None, kind="model", name="mine", options={"own": layout}) is layout


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), 1e300, "inf", "soon"])
def test_a_length_of_time_that_no_clock_counts_to_is_refused(value):
    with pytest.raises(UsageError, match="`--some-seconds` is"):
        options.checked_seconds("--some-seconds", value)


def test_a_length_of_time_may_be_written_as_a_text():
    assert options.checked_seconds("--some-seconds", "2.5") == options.checked_seconds("--some-seconds", 2.5) == 2.5


X, Y = np.ones((8, 4), "float32"), np.zeros(8, "int32")


def from_arrays(**given):
    return tfdist.data.Source.from_arrays("mine", **{"classes": 2} | given)


@pytest.mark.parametrize(
    ("make", "sentence", "hint"),
    [
        (
            lambda: callbacks.TimeToTarget("val_accuracy", 0.3),
            "`TimeToTarget` cannot have `val_accuracy` as `target`: input should be a valid number",
            "its arguments are `TimeToTarget(target, monitor='val_accuracy', mode='max', stop=True)`",
        ),
        (lambda: callbacks.TimeToTarget(float("nan")), "`nan` as `target`: input should be a finite number", ""),
        (lambda: callbacks.TimeToTarget(0.3, mode="high"), "Unknown mode `high`", "use one of"),
        (lambda: callbacks.Throughput("many"), "`many` as `global_batch_size`", "Throughput(global_batch_size=None)"),
        (lambda: callbacks.Throughput(2.5), "`2.5` as `global_batch_size`", ""),
        (lambda: callbacks.Throughput(0), "Received: `0`", ""),
        (callbacks.Checkpoint, "`Checkpoint` missing a required argument: 'folder'", "Checkpoint(folder, "),
        (
            lambda: callbacks.Checkpoint("x", every_step=2),
            "unexpected keyword argument 'every_step'",
            "every_steps=None",
        ),
        (lambda: callbacks.Checkpoint("x", keep="three"), "`Checkpoint` cannot have `three` as `keep`", ""),
        (lambda: callbacks.Checkpoint("x", run="seed"), "`seed` as `run`: input should be a valid dictionary", ""),
        (lambda: callbacks.Profile("logs", 10, 20), "`Profile` cannot have `logs` as `first`", "first, last, log_dir"),
        (lambda: callbacks.Profile(20, 10, "logs"), "Received: `20:10`", ""),
        (lambda: callbacks.LearningRateWarmup("two"), "cannot have `two` as `factor`", "LearningRateWarmup(factor, "),
        (lambda: callbacks.LearningRateWarmup(float("nan")), "`nan` as `factor`", ""),
        (lambda: callbacks.LearningRateWarmup(0), "Received: factor `0.0`", ""),
        (lambda: callbacks.ChiefOnly(keras.callbacks.CSVLogger), "as `callback`: input should be an instance of", ""),
        (lambda: callbacks.StopAtNonFiniteLoss("folder"), "`folder` as `checkpoint`", ""),
        (lambda: hvd_callbacks.LearningRateWarmupCallback("fast"), "cannot have `fast` as `initial_lr`", ""),
        (lambda: tfdist.strategy(2), "The strategy is `2`", "a name, such as `custom`, or your own as `module:Class`"),
        (lambda: tfdist.strategy("custom", devices=[]), "`devices` is empty", "name one device or more"),
        (
            lambda: tfdist.models.build("mlp", tfdist.data.load("digits")),
            "is a `Source`, not a `tfdist.data.DataSpec`",
            "`tfdist.data.load(...).spec`",
        ),
        (lambda: from_arrays(train=X), "`train` of the dataset `mine` is a `ndarray`, not a pair", "`train=(x, y)`"),
        (lambda: from_arrays(train=(X, Y[:3])), "has 8 examples x and 3 targets y", "give each example its target"),
        (lambda: from_arrays(train=(X, Y), classes="two"), "cannot have `two` as `classes`", ""),
        (lambda: from_arrays(train=(X, Y), classnames=("a", "b")), "option `classnames`: it takes", "use one of these"),
        (lambda: tfdist.models.build(None, None), "The model is `None`", "a name, such as `mlp`"),
        (lambda: tfdist.data.load(["digits"]), "The dataset is `['digits']`", "a name, such as `digits`"),
    ],
)
def test_a_mistake_in_an_argument_of_a_public_function_is_a_sentence_and_a_hint(make, sentence, hint):
    with pytest.raises(UsageError) as error:
        make()
    assert sentence in error.value.sentence and hint in error.value.hint


def test_arguments_that_stand_for_what_was_meant_are_converted():
    timer = callbacks.TimeToTarget("0.9")
    assert timer.target == 0.9 and callbacks.Throughput(np.int64(32)).global_batch_size == 32
    assert callbacks.LearningRateWarmup(np.float32(2), warmup_epochs=np.int32(3)).warmup_epochs == 3
    assert inspect.signature(callbacks.TimeToTarget).parameters["target"].name == "target"
    assert callbacks.ChiefOnly(timer).callback is timer
