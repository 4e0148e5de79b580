"""The first step of a training is compared with that of one device, and leaves no trace."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.contract import contestants
from tests.contract.test_verify import PLANTED, running_sum_of_each_part
from tests.planted_rules import plant
from tfdist.errors import DifferenceWarning

_rng = np.random.default_rng(0)
X = _rng.normal(size=(19, 4)).astype("float32")
Y = _rng.normal(size=(19, 1)).astype("float32")

on_one_machine = contestants.among({"custom": (2, 3), "mirrored": (2,)})


def trained(contestant, make, **options):
    """The model after two epochs, and the warnings of a difference."""
    keras.utils.set_random_seed(11)
    strategy = contestants.start(*contestant, **options)
    with strategy.scope():
        model = make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy.fit(model, X, Y, batch_size=10, epochs=2, verbose=0)
    return model, [str(one.message) for one in caught if issubclass(one.category, DifferenceWarning)]


def network(*inside, optimizer="adam"):
    model = keras.Sequential([keras.Input((4,)), layers.Dense(6, activation="tanh"), *inside, layers.Dense(1)])
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def with_everything():
    return network(layers.Dropout(0.4), layers.BatchNormalization(), layers.GaussianNoise(0.1), layers.Dense(300))


@pytest.mark.thorough
@on_one_machine
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "lion", "adafactor", "rmsprop"])
def test_it_is_equal_and_the_training_is_that_without_the_comparison(contestant, optimizer):
    compared, said = trained(contestant, lambda: network(layers.Dropout(0.4), optimizer=optimizer))
    plain, _ = trained(contestant, lambda: network(layers.Dropout(0.4), optimizer=optimizer), compare_first_step=False)
    assert not said
    for one, other in zip(compared.variables, plain.variables, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())
    for one, other in zip(compared.optimizer.variables, plain.optimizer.variables, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


@pytest.mark.thorough
@on_one_machine
def test_it_is_equal_where_a_step_draws_and_normalizes(contestant):
    assert not trained(contestant, with_everything)[1]


@pytest.mark.sampled(1)
@on_one_machine
@pytest.mark.parametrize("name", PLANTED)
def test_a_wrong_rule_of_the_partitioner_is_warned_of(name, contestant, monkeypatch):
    kind, wrong, make, _ = PLANTED[name]
    plant(kind, wrong, monkeypatch)
    _, (said,) = trained(contestant, make)
    assert "differs from that of one device" in said
    assert "a bug in tfdist" in said
    assert not trained(contestant, make, compare_first_step=False)[1]


class LargestRunningSum(keras.metrics.Metric):
    """What a metric computes of several examples together."""

    def __init__(self):
        super().__init__(name="largest")
        self.total = self.add_weight(initializer="zeros", name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(tf.reduce_max(tf.cumsum(tf.abs(y_true - y_pred), 0)))

    def result(self):
        return self.total


@contestants.among({"custom": (2,)})
def test_a_wrong_rule_is_warned_of_where_a_metric_alone_follows_it(contestant, monkeypatch):
    plant("Cumsum", running_sum_of_each_part, monkeypatch)

    def make():
        model = network()
        model.compile("sgd", "mse", metrics=[LargestRunningSum()])
        return model

    _, (said,) = trained(contestant, make)
    assert "`largest/total` by" in said


class Counts(layers.Layer):
    """Has Python count the steps."""

    calls = 0

    def call(self, x):
        def count(values):
            Counts.calls += 1
            return values

        return tf.ensure_shape(tf.numpy_function(count, [x], tf.float32), x.shape)


@pytest.mark.sampled(1)
@on_one_machine
def test_what_has_effects_does_not_run_twice(contestant):
    Counts.calls = 0
    trained(contestant, lambda: network(Counts()))
    assert Counts.calls == 4  # two epochs of two batches


@pytest.mark.thorough
@contestants.among({"custom": (2,)})
def test_many_trainings_are_not_said_to_trace_one_function_again_and_again(contestant, caplog):
    for _ in range(6):  # TensorFlow speaks from the fifth on
        trained(contestant, network)
    assert not [record for record in caplog.records if "retracing" in record.getMessage()]
