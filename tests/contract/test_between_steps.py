"""Point 1, what a program does to its model between steps: the next step shows it, as with stock Keras."""

import warnings

import keras
import numpy as np
import pytest
from keras import layers

import tfdist
from tests.contract import contestants
from tests.contract.comparison import STOCK, assert_same, start
from tfdist.errors import UsageError

REPLICAS = contestants.FEW
BATCH = 8
_rng = np.random.default_rng(0)
X = _rng.normal(size=(19, 4)).astype("float32")
Y = _rng.normal(size=(19, 1)).astype("float32")
WEIGHT = _rng.uniform(0, 2, 19).astype("float32")
ARGUMENTS = {"batch_size": BATCH, "shuffle": False, "verbose": 0}


def linear(**options):
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3, activation="tanh"), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse", **{"jit_compile": False} | options)
    return model


def made(contestant, build=linear):
    """A strategy, or stock Keras, and a model that is prepared by it."""
    strategy = start(contestant)
    with strategy.scope():
        model = build()
    if contestant[0] not in ("stock", "stock_mirrored"):
        strategy.prepare(model)
    return strategy, model


def both(case, same_as_stock, build=linear):
    same_as_stock(lambda contestant: case(*made(contestant, build)))


# A class' own methods


class Tenfold(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def fit(self, x, y, **options):
        return super().fit(x * 10.0, y, **options)

    def predict(self, x, **options):
        return super().predict(x, **options) + 1.0

    def train_on_batch(self, x, y):
        return super().train_on_batch(x * 10.0, y)


def tenfold():
    model = Tenfold()
    model.compile(keras.optimizers.SGD(0.001), "mse", jit_compile=False)
    return model


@pytest.mark.sampled(1)
def test_methods_of_the_class_reach_the_strategy_by_super(same_as_stock):
    def case(strategy, model):
        losses = model.fit(X, Y, **ARGUMENTS).history["loss"]
        return [losses, model.train_on_batch(X, Y), model.predict(X, batch_size=BATCH, verbose=0), model.get_weights()]

    both(case, same_as_stock, tenfold)


def test_what_is_no_model_is_refused():
    with pytest.raises(UsageError, match="`prepare` takes a Keras model, and got `int`"):
        start(("custom", 2)).prepare(3)


def test_the_strategys_methods_are_those_of_keras_for_any_class():
    strategy, model = made(("custom", 2), tenfold)
    _, plain = made(STOCK, tenfold)
    losses = strategy.fit(model, X, Y, **ARGUMENTS).history["loss"]
    assert_same(losses, keras.Model.fit(plain, X, Y, **ARGUMENTS).history["loss"])


def test_a_model_that_is_prepared_again_follows_the_last_strategy():
    _, model = made(("single", 1))
    strategy = start(("custom", 2))
    strategy.prepare(model)
    ran = []
    strategy.program = lambda steps: ran.append(steps) or type(strategy).program(strategy, steps)
    model.fit(X, Y, **ARGUMENTS)
    assert ran


def test_a_model_of_a_scope_that_is_fitted_without_the_strategy_is_told_so(contestant):
    strategy = start(contestant)
    with strategy.scope():
        model = linear()
    with pytest.warns(UserWarning, match=r"without the strategy; call `strategy\.prepare\(model\)` first"):
        model.fit(X, Y, **ARGUMENTS)
    if contestant == ("mirrored", 2):  # where Keras' own method returns the rows once for each replica
        with pytest.warns(UserWarning, match=r"`predict_on_batch` runs without the strategy"):
            model.predict_on_batch(X[:4])


@pytest.mark.parametrize("name", ["mirrored", "pipeline", "hogwild", "local_sgd", "gossip"])
def test_the_scope_of_each_strategy_marks_its_models(name):
    with tfdist.strategy(name).scope():
        model = linear()
    with pytest.warns(UserWarning, match=f"scope of the strategy `{name}`, and `fit` runs without the strategy"):
        model.fit(X, Y, **ARGUMENTS)


@pytest.mark.sampled(1)
@contestants.among(contestants.WHOLE_AND_PARTS)
def test_nothing_is_told_of_a_model_that_the_strategy_trains_or_that_is_of_no_scope(contestant):
    strategy = start(contestant)
    with strategy.scope():
        prepared, passed = linear(), linear()
    plain = linear()
    strategy.prepare(prepared)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        prepared.fit(X, Y, **ARGUMENTS)
        strategy.fit(passed, X, Y, **ARGUMENTS)
        plain.fit(X, Y, **ARGUMENTS)


# Single batches


@pytest.mark.sampled(1)
def test_single_batches_are_the_strategys(same_as_stock):
    def case(strategy, model):
        found = [model.train_on_batch(X[:7], Y[:7]) for _ in range(2)]
        found.append(model.train_on_batch(X, Y, sample_weight=WEIGHT, return_dict=True))
        found += [model.test_on_batch(X, Y), model.test_on_batch(X[:9], Y[:9], return_dict=True)]
        return [*found, model.predict_on_batch(X), model.get_weights()]

    both(case, same_as_stock, lambda: linear(metrics=["mae"], weighted_metrics=["mse"]))


@pytest.mark.thorough
@contestants.among(contestants.WHOLE_AND_PARTS)
def test_single_batches_with_class_weights(contestant, same_as_stock):
    labels = (Y[:, 0] > 0).astype("int32")

    def case(strategy, model):
        return [model.train_on_batch(X, labels, class_weight={0: 1.0, 1: 3.0}), model.get_weights()]

    both(case, same_as_stock)
    with pytest.raises(ValueError, match="`sample_weight` and `class_weight`"):
        made(contestant)[1].train_on_batch(X, labels, sample_weight=WEIGHT, class_weight={0: 1.0})


# Changes of the model


class At(keras.callbacks.Callback):
    """Does something to the model at a hook."""

    def __init__(self, hook, epoch, action):
        super().__init__()
        self.epoch = -1

        def act(number, logs=None):
            if hook.startswith("on_epoch"):
                self.epoch = number
            if self.epoch == epoch and (hook.startswith("on_epoch") or number == 1):
                action(self.model)

        setattr(self, hook, act)
        if not hook.startswith("on_epoch"):
            self.on_epoch_begin = lambda number, logs=None: setattr(self, "epoch", number)


def compile_again(model):
    model.layers[0].trainable = True
    model.compile(keras.optimizers.SGD(0.05), "mae", metrics=["mse"], jit_compile=False)
    model.make_train_function()


def force(model):
    model.layers[0].trainable = True
    model.make_train_function(force=True)


def unfreeze_alone(model):
    model.layers[0].trainable = True


def frozen():
    model = linear()
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    model.layers[0].trainable = False
    model.compile(optimizer, "mse", jit_compile=False)
    return model


@pytest.mark.sampled(1)
@pytest.mark.parametrize("action", [compile_again, force, unfreeze_alone])
@pytest.mark.parametrize("hook", ["on_epoch_begin", "on_epoch_end", "on_train_batch_end"])
def test_a_callback_that_changes_the_model_changes_the_next_step(same_as_stock, hook, action):
    def case(strategy, model):
        def act(model):
            with strategy.scope():
                action(model)

        model.fit(X, Y, epochs=3, callbacks=[At(hook, 1, act)], **ARGUMENTS)
        return model.get_weights()

    both(case, same_as_stock, frozen)


@pytest.mark.thorough
@pytest.mark.sampled(1)
def test_quantizing_shows_in_the_next_prediction(same_as_stock):
    def case(strategy, model):
        before = model.predict(X, verbose=0)
        with strategy.scope():
            model.quantize("int8")
        after = model.predict(X, verbose=0)
        assert np.abs(after - before).max() > 0
        return [before, after]

    both(case, same_as_stock)


# Stopping


def stops_at(hook, after=0):
    calls = []

    def stop(self, *arguments, logs=None):
        calls.append(arguments)
        if len(calls) > after:
            self.model.stop_training = True

    return type("Stops", (keras.callbacks.Callback,), {hook: stop})()


HOOKS = [
    "on_train_begin",
    "on_epoch_begin",
    "on_train_batch_begin",
    "on_train_batch_end",
    "on_test_begin",
    "on_test_batch_end",
    "on_test_end",
    "on_epoch_end",
]


@pytest.mark.sampled(1)
@contestants.among(contestants.WHOLE_AND_PARTS)
@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("hook", HOOKS)
def test_training_stops_where_it_stops_under_stock_keras(same_as_stock, hook, after):
    def case(strategy, model):
        callbacks = [stops_at(hook, after)]
        history = model.fit(
            X, Y, epochs=3, callbacks=callbacks, validation_data=(X, Y), **ARGUMENTS | {"batch_size": 2}
        )
        return [int(model.optimizer.iterations.numpy()), history.epoch, history.history["loss"]]

    both(case, same_as_stock)


@pytest.mark.thorough
@pytest.mark.sampled(1)
@contestants.among(contestants.WHOLE_AND_PARTS)
def test_stopping_takes_a_whole_execution(same_as_stock):
    def case(strategy, model):
        model.fit(X, Y, epochs=2, callbacks=[stops_at("on_epoch_begin")], **ARGUMENTS | {"batch_size": 2})
        return int(model.optimizer.iterations.numpy())

    both(case, same_as_stock, lambda: linear(steps_per_execution=3))


# What is not a dict of means


class Returns(Tenfold):
    returned = staticmethod(lambda logs, data: logs)

    def train_step(self, data):
        return self.returned(super().train_step(data), data)


def returning(function):
    def build():
        model = Returns()
        model.returned = function
        model.compile("sgd", "mse", jit_compile=False)
        return model

    return build


@pytest.mark.parametrize("returned", [None, 1.0, ["loss"]])
def test_a_step_that_returns_no_dict_is_refused(contestant, returned):
    if contestant[0] == "stock_mirrored":
        pytest.skip("its error is Keras' own")
    strategy, model = made(contestant, returning(lambda logs, data: returned))
    with pytest.raises(UsageError, match=r"`train_step` of the model .* returned .*\n\nhint: return a dict"):
        strategy.fit(model, X, Y, **ARGUMENTS)


@pytest.mark.sampled(1)
def test_a_count_that_a_step_returns_is_of_the_batch(contestant):
    if contestant[0] == "stock_mirrored":
        pytest.skip("it answers with a mean")
    count = returning(lambda logs, data: logs | {"n": keras.ops.sum(keras.ops.ones_like(data[0], "int32"))})
    strategy, model = made(contestant, count)
    assert strategy.fit(model, X, Y, **ARGUMENTS).history["n"] == [12]


@contestants.among({"single": (1,), "custom": (2,)})
@pytest.mark.parametrize("kind", ["train", "test", "predict"])
def test_a_step_function_of_the_models_own_is_refused(contestant, kind):
    def make(self, force=False):
        setattr(self, f"{kind}_function", lambda data: {"loss": 7.0})

    own = type("Own", (Tenfold,), {f"make_{kind}_function": make, "fit": keras.Model.fit})
    strategy = start(contestant)
    with strategy.scope():
        model = own()
        model.compile("sgd", "mse", jit_compile=False)
    call = {"train": strategy.fit, "test": strategy.evaluate, "predict": strategy.predict}[kind]
    with pytest.raises(UsageError, match=f"`{kind}_function` of its own.*\n\nhint: override `{kind}_step`"):
        call(model, X, *([] if kind == "predict" else [Y]), verbose=0)
