"""What importing TensorFlow and Keras leaves as it was, and which Keras is refused."""

import os
import platform
import subprocess
import sys

import keras
import pytest

import tfdist
from tfdist.errors import UsageError

IMPORTS = """
import gc, tfdist
tfdist.strategy("single")
frozen = gc.get_freeze_count()
tfdist.strategy("single")
print(gc.isenabled(), frozen > 100_000, gc.get_freeze_count() == frozen)
"""


@pytest.mark.thorough
def test_garbage_is_collected_after_the_imports_but_not_looked_for_in_them():
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS],
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["True", "True", "True"]


SELDOM = """
import inspect, sys
import tfdist
tfdist.strategy("single")
import keras, tensorflow as tf
inspect.getmodule(keras)
print("sklearn" in sys.modules, "matplotlib" in sys.modules)
from keras.wrappers import *
print(SKLearnClassifier.__module__, "matplotlib" in sys.modules, keras.wrappers.SKLearnClassifier is SKLearnClassifier)
from keras.visualization import plot_image_gallery
print("matplotlib" in sys.modules, plot_image_gallery is keras._tf_keras.keras.visualization.plot_image_gallery)
old, older = "tensorflow._api.v2.compat.v1.train", "tensorflow._api.v2.compat.v1.compat.v1"
print(old in sys.modules, tf.compat.v1.train.AdamOptimizer.__name__, old in sys.modules, older in sys.modules)
import tensorflow.compat.v1 as tf1
print(tf1.Session is tf.compat.v1.Session is tf.compat.v1.compat.v1.Session, "Session" in dir(tf.compat.v1))
"""


@pytest.mark.thorough
def test_packages_that_few_programs_use_are_imported_when_they_are_used():
    done = subprocess.run([sys.executable, "-c", SELDOM], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "False False",
        "keras.src.wrappers.sklearn_wrapper False True",
        "True True",
        "False AdamOptimizer True False",
        "True True",
    ]


@pytest.mark.thorough
@pytest.mark.skipif(platform.machine() != "x86_64", reason="TensorFlow has oneDNN's kernels for x86")
@pytest.mark.parametrize(("told", "used"), [({}, True), ({"TF_ENABLE_ONEDNN_OPTS": "0"}, False)])
def test_tensorflow_computes_with_onednn_unless_it_is_told_otherwise(told, used):
    untold = {name: value for name, value in os.environ.items() if name != "TF_ENABLE_ONEDNN_OPTS"}
    done = subprocess.run(
        [sys.executable, "-c", "import tfdist; tfdist.strategy('single')"],
        env=untold | told | {"TF_CPP_MIN_LOG_LEVEL": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ("oneDNN custom operations are on" in done.stderr) == used


def test_keras_imported_with_another_backend_is_refused(monkeypatch):
    # No other backend is installed where the tests run; only the answer to "which one?" is replaced.
    monkeypatch.setattr(keras.backend, "backend", lambda: "torch")
    with pytest.raises(UsageError, match="Keras was imported with the backend `torch`"):
        tfdist.strategy("single")


@pytest.mark.thorough
def test_what_the_documents_show_is_there_after_one_import():
    code = """
import sys, tfdist
print("tensorflow" in sys.modules)
print(tfdist.callbacks.Throughput.__name__, "mlp" in tfdist.models.names(), "digits" in tfdist.data.names())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "Throughput", "True", "True"]
