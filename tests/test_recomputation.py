"""The option `recompute`: less memory, the same training."""

import keras
import numpy as np
import pytest
from keras import layers

import tfdist
from tests.contract import test_equality as equality
from tests.contract.cases import CASES
from tfdist.core import recomputation
from tfdist.errors import UnknownNameError, UsageError
from tfdist.internals import tensorflow_graphs as graphs

REFUSED = {"run eagerly"}


@pytest.fixture
def copied(monkeypatch):
    """The names of the operations that are copied."""
    names = []
    original = graphs.copy

    def copy(operation, *arguments):
        names.append(operation.name)
        return original(operation, *arguments)

    monkeypatch.setattr(graphs, "copy", copy)
    return names


@pytest.mark.parametrize("name", [name for name in CASES if name not in REFUSED])
def test_equals_stock_keras_on_one_device(name, copied):
    case, expected = CASES[name], equality.reference(name)
    found = equality.train(case, tfdist.strategy("single", seed=7, recompute="blocks"))
    assert copied
    assert found["iterations"] == expected["iterations"]
    for what in ("weights", "history", "scores", "predictions"):
        assert equality.largest_difference(found[what], expected[what]) < case.tolerance, what
