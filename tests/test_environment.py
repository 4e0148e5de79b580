"""What importing TensorFlow and Keras leaves as it was, and which Keras is refused."""

import os
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


def test_garbage_is_collected_after_the_imports_but_not_looked_for_in_them():
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS],
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["True", "True", "True"]


def test_keras_imported_with_another_backend_is_refused(monkeypatch):
    # No other backend is installed where the tests run; only the answer to "which one?" is replaced.
    monkeypatch.setattr(keras.backend, "backend", lambda: "torch")
    with pytest.raises(UsageError, match="Keras was imported with the backend `torch`"):
        tfdist.strategy("single")
