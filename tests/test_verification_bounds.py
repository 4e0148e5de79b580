"""What a verification says of a bound: what was measured, what is allowed, and whether that is broken."""

import math

import keras
import pytest

import tfdist.data
from tfdist.errors import VerificationError
from tfdist.interface.bound import Averaging, Staleness
from tfdist.jobs.world import World
from tfdist.verification.bounds import BoundReport, Measurement, is_equality


class Two:
    """What is asked of a strategy: that it has two processes."""

    world = World(world_size=2)


EVEN = tfdist.data.load("digits").feed("train", 8)


def model_of(optimizer, *inside):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), *inside])
    model.compile(optimizer, "mse")
    return model


def test_a_quantity_above_its_bound_or_not_a_number_is_named_in_the_error_and_in_the_table():
    model = model_of("sgd")
    held = BoundReport(
        "single", "nothing", (Measurement("the drift", 2.0, None), Measurement("the staleness", 2.0, 2.0)), 3
    )
    held.require(model)
    assert str(held).splitlines()[0] == repr(held).splitlines()[0] == "The steps of `single` stay within its bound."
    for measured in (3.0, math.nan):
        quantities = Measurement("the drift", 9.0, None), Measurement("the staleness", measured, 2.0)
        report = BoundReport("single", "as it is", quantities, 3)
        with pytest.raises(VerificationError, match=r"breaks its bound: the staleness is .*, and at most 2 is allowed"):
            report.require(model)
        verdict, _, first, _, drift, staleness = str(report).splitlines()
        assert verdict.startswith("`single` breaks its bound: the staleness is ")
        assert first == "The bound: as it is." and drift.endswith("no limit") and staleness.endswith("broken")


@pytest.mark.parametrize(
    ("every", "optimizer", "inside", "equal"),
    [
        (1, keras.optimizers.SGD(0.1), (), True),
        (1, keras.optimizers.SGD(0.1, momentum=0.9), (), True),
        (2, keras.optimizers.SGD(0.1), (), False),
        (None, keras.optimizers.SGD(0.1), (), False),
        (1, keras.optimizers.Adam(), (), False),
        (1, keras.optimizers.SGD(0.1, clipnorm=1.0), (), False),
        (1, keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), (), False),
        (1, keras.optimizers.SGD(0.1), (keras.layers.Dropout(0.5),), False),
        (1, keras.optimizers.SGD(0.1), (keras.layers.BatchNormalization(synchronized=True),), False),
    ],
)
def test_averaging_is_synchronous_training_after_each_linear_step_alone(every, optimizer, inside, equal):
    assert is_equality(Averaging(every), Two, model_of(optimizer, *inside), EVEN) == equal


@pytest.mark.parametrize(("size", "equal"), [(8, True), (9, False)])
def test_arrays_whose_batches_do_not_divide_have_other_batches_on_each_rank(size, equal):
    feed = tfdist.data.load("digits").feed("train", size)
    assert is_equality(Averaging(1), Two, model_of(keras.optimizers.SGD(0.1)), feed) == equal


def test_a_staleness_of_0_alone_is_one_device():
    model = model_of("adam")
    assert [is_equality(Staleness(most), Two, model, EVEN) for most in (0, 1, None)] == [True, False, False]
