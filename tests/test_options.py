"""What an option is given is checked before anything is made of it: a mistake is one sentence."""

import importlib
import inspect
from dataclasses import dataclass

import pytest

import tfdist.data
import tfdist.models
from tests import zoo
from tfdist import options, registry
from tfdist.errors import UsageError

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
        ({"shape": "32,32,3"}, "`32,32,3` as `shape`: .*not allowed as a Sequence"),
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
