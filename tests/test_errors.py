"""Errors: one sentence with a hint, wherever they are raised."""

import doctest

import keras
import numpy as np
import pytest

from tfdist import errors
from tfdist.errors import UsageError


def test_the_synopsis_runs():
    assert doctest.testmod(errors).failed == 0


class Refuses(keras.layers.Layer):
    def call(self, inputs):
        raise UsageError("`rate` is 2", "use a rate below 1")


def test_an_error_that_a_layer_raises_when_it_is_called_stays_one_sentence():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    with pytest.raises(UsageError) as raised:
        Refuses(name="refuses")(model(np.zeros((1, 3), "float32")))
    assert str(raised.value) == "`rate` is 2 (in `Refuses.call`)\n\nhint: use a rate below 1"


def test_a_name_of_somebody_else_cannot_speak_to_the_terminal():
    error = UsageError("Unknown name `\x1b]0;title\x07`:\n\tnext", "use ö or \x9b31m")
    assert str(error) == "Unknown name `\\x1b]0;title\\x07`:\n\tnext\n\nhint: use ö or \\x9b31m"
