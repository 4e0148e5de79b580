"""Points 2 and 3: N replicas end with the weights, the history, the metrics and the predictions of stock Keras on one
device, whatever is trained and however the examples divide."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.contract import contestants
from tests.contract.cases import BATCH, CASES


def train(case, make, scope=None):
    """What a training of two epochs leaves: weights, optimizer's counters, history, evaluation, predictions."""
    keras.config.set_dtype_policy(case.dtype_policy)
    keras.utils.set_random_seed(11)
    data, unseen = case.data(case.examples), case.data(2 * BATCH + 3)
    fit = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0} | case.fit
    with scope() if scope else make.scope():
        model = case.model()
    history = make.fit(model, **data, **fit).history
    scores = make.evaluate(model, **unseen, batch_size=fit["batch_size"], verbose=0, return_dict=True)
    predictions = make.predict(model, unseen["x"], batch_size=fit["batch_size"], verbose=0)
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    return {
        "weights": model.get_weights(),
        "iterations": int(optimizer.iterations.numpy()),
        "history": history,
        "scores": scores,
        "predictions": predictions,
    }


class Stock:
    """Keras' own methods, on one device."""

    def __getattr__(self, method):
        return lambda model, *args, **kwargs: getattr(model, method)(*args, **kwargs)


@functools.cache
def reference(name):
    import contextlib

    return train(CASES[name], Stock(), contextlib.nullcontext)


def largest_difference(left, right):
    pairs = zip(keras.tree.flatten(left), keras.tree.flatten(right), strict=True)
    return max(float(np.max(np.abs(np.asarray(a, "float64") - np.asarray(b, "float64")))) for a, b in pairs)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", CASES)
def test_equals_stock_keras_on_one_device(name, contestant):
    if name == "run eagerly" and contestant[0] in contestants.RECOMPUTING:
        pytest.skip("recomputation needs a graph, and says so")
    case, expected = CASES[name], reference(name)
    found = train(case, contestants.start(*contestant))
    if contestant[0] == contestants.IN_LOCK_STEP:
        assert not any(found["history"].pop("disagreement") + found["history"].pop("sync_seconds"))
    assert found["iterations"] == expected["iterations"]
    for what in ("weights", "history", "scores", "predictions"):
        assert largest_difference(found[what], expected[what]) < case.tolerance, what


class SeesGradients(keras.optimizers.SGD):
    """Notes the kind of gradient that each variable is updated with."""

    def update_step(self, gradient, variable, learning_rate):
        self.__dict__.setdefault("kinds", {})[variable.shape] = type(gradient)
        super().update_step(gradient, variable, learning_rate)


@pytest.mark.sampled(1)
@contestants.among(contestants.WITH_ALL_SLOTS)
def test_the_gradient_of_an_embedding_is_never_made_dense(contestant):
    strategy = contestants.start(*contestant)
    words, width, classes = 100_000, 16, 3
    with strategy.scope():
        optimizer = SeesGradients(0.1)
        found = [
            keras.layers.Embedding(words, width),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(classes),
        ]
        model = keras.Sequential([keras.Input((4,), dtype="int32"), *found])
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x = np.random.default_rng(0).integers(0, words, (BATCH + 3, 4))
    strategy.fit(model, x, np.arange(len(x)) % classes, batch_size=BATCH, verbose=0)
    assert optimizer.kinds[words, width] is tf.IndexedSlices
    assert not issubclass(optimizer.kinds[width, classes], tf.IndexedSlices)
