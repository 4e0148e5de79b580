"""Models: their size, what they take, and that their output is float32 logits."""

from __future__ import annotations

import doctest
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import keras
import numpy as np
import pytest

import tfdist.models
from tfdist.data import DataSpec
from tfdist.errors import UnknownNameError, UsageError

ROOT = Path(__file__).parent.parent
SHAPES = [(28, 28, 1), (8, 8, 1), (32, 32, 3), (2, 3, 1)]


def spec_of(*input_shape: int, classes: int = 10) -> DataSpec:
    return DataSpec("some", "classification", input_shape, classes, {"train": 1})


def some_images(spec: DataSpec) -> np.ndarray:
    return np.random.default_rng(0).random((3, *spec.input_shape), np.float32)


def test_the_synopsis_runs():
    result = doctest.testmod(tfdist.models)
    assert result.attempted and not result.failed


@pytest.mark.parametrize(("name", "parameters"), [("mlp", 101_770), ("cnn", 225_034), ("lenet", 21_840)])
def test_parameters_on_28x28x1_are_the_published_ones(name, parameters):
    assert tfdist.models.build(name, spec_of(28, 28, 1)).count_params() == parameters


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", tfdist.models.names())
def test_every_model_takes_every_image_and_gives_one_logit_a_class(name, shape):
    spec = spec_of(*shape, classes=7)
    model = tfdist.models.build(name, spec)
    logits = model(some_images(spec), training=True)
    assert logits.shape == (3, 7) and not model.compiled
    assert np.asarray(logits).min() < 0  # logits, not probabilities


@pytest.mark.parametrize(("name", "smallest"), [("cnn", 10), ("lenet", 16)])
def test_only_images_too_small_for_unpadded_convolutions_are_padded(name, smallest):
    def paddings(side: int) -> set[str]:
        return {
            layer.padding for layer in tfdist.models.build(name, spec_of(side, 40, 1)).layers if "conv" in layer.name
        }

    assert paddings(smallest) == {"valid"} and paddings(smallest - 1) == {"same"}


@pytest.fixture
def mixed_precision() -> Iterator[None]:
    keras.mixed_precision.set_dtype_policy("mixed_bfloat16")
    yield
    keras.mixed_precision.set_dtype_policy("float32")


@pytest.mark.parametrize("name", tfdist.models.names())
def test_logits_are_float32_under_mixed_precision(name, mixed_precision):
    spec = spec_of(28, 28, 1)
    model = tfdist.models.build(name, spec)
    assert model(some_images(spec)).dtype.name == "float32"
    assert {layer.compute_dtype for layer in model.layers[:-1]} == {"bfloat16"}


@pytest.mark.parametrize("name", tfdist.models.names())
def test_a_saved_model_is_the_same_model_in_stock_keras(name, tmp_path):
    spec = spec_of(8, 8, 1)
    model = tfdist.models.build(name, spec)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(
        again.predict(some_images(spec), verbose=0), model.predict(some_images(spec), verbose=0)
    )


def test_options_reach_the_model():
    model = tfdist.models.build("mlp", spec_of(4), units=5, dropout=0.5)
    assert model.count_params() == 4 * 5 + 5 + 5 * 10 + 10
    rates = [
        layer.rate
        for layer in tfdist.models.build("lenet", spec_of(8, 8, 1), dropout=0.1).layers
        if "drop" in layer.name
    ]
    assert rates == [0.1, 0.1]


def test_an_unknown_model_lists_the_known_ones():
    with pytest.raises(UnknownNameError, match=r"the names are `cnn`, `lenet`, `mlp`\n\nhint: did you mean `lenet`\?"):
        tfdist.models.build("le_net", spec_of(8, 8, 1))


def test_an_unknown_option_lists_the_known_ones():
    with pytest.raises(UsageError, match="`mlp` does not know the option `width`: it takes `units`, `dropout`"):
        tfdist.models.build("mlp", spec_of(8, 8, 1), width=3)
    with pytest.raises(UsageError, match="`cnn` does not know the option `width`: it takes no options"):
        tfdist.models.build("cnn", spec_of(8, 8, 1), width=3)


@pytest.mark.parametrize("name", ["cnn", "lenet"])
def test_a_convolution_over_examples_that_are_no_images_is_refused(name):
    with pytest.raises(UsageError, match=rf"`{name}` takes images .* of shape `\(16,\)`"):
        tfdist.models.build(name, spec_of(16))


@pytest.fixture
def working_folder(tmp_path, monkeypatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_the_example_of_the_documentation_is_a_model(working_folder):
    text = (ROOT / "docs" / "models.md").read_text()
    code = re.search(r"```python\n# my_models\.py\n(.*?)```", text, re.DOTALL)
    (working_folder / "my_models.py").write_text(code.group(1))
    model = tfdist.models.build("my_models:wide", spec_of(8, 8, 1), units=16)
    assert model.output_shape == (None, 10)


def test_a_function_that_gives_no_model_is_named(working_folder):
    (working_folder / "no_models.py").write_text("def build(spec): return 5\n")
    with pytest.raises(UsageError, match=r"`no_models:build` returned a `int`, not a `keras\.Model`"):
        tfdist.models.build("no_models:build", spec_of(8, 8, 1))
