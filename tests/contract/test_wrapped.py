"""Point 1, where a library wraps Keras' methods, as MLflow's autolog does: the wrapper and the strategy both run."""

import contextlib
import copy
import functools
import pickle

import keras
import numpy as np
import pytest
from keras import layers

from tests.contract import contestants
from tests.contract.comparison import STOCK, start
from tfdist.errors import UsageError
from tfdist.loop import outer_loop

REPLICAS = contestants.FEW
_rng = np.random.default_rng(0)
X = _rng.normal(size=(19, 4)).astype("float32")
Y = _rng.normal(size=(19, 1)).astype("float32")
ARGUMENTS = {"batch_size": 8, "verbose": 0}
METHODS = {
    "fit": lambda model: model.fit(X, Y, shuffle=False, **ARGUMENTS).history,
    "evaluate": lambda model: model.evaluate(X, Y, **ARGUMENTS),
    "predict": lambda model: model.predict(X, **ARGUMENTS),
    "train_on_batch": lambda model: model.train_on_batch(X, Y),
    "test_on_batch": lambda model: model.test_on_batch(X, Y),
    "predict_on_batch": lambda model: model.predict_on_batch(X),
}


def linear():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3, activation="tanh"), layers.Dense(1)])
    # A replica that clips its own gradients before they are added does not end with the weights of one device.
    model.compile(keras.optimizers.SGD(0.1, global_clipnorm=0.05), "mse", jit_compile=False)
    return model


def made(contestant, build=linear):
    """A model that is prepared by the strategy of a contestant, or one of stock Keras."""
    strategy = start(contestant)
    with strategy.scope():
        model = build()
    return model if contestant[0] in ("stock", "stock_mirrored") else strategy.prepare(model)


class Calls(list):
    """The names of the wrappers that were called."""

    @contextlib.contextmanager
    def wrapped(self, owner, names=METHODS):
        """In this context a wrapper is around each of the methods with these `names` that `owner` has."""
        self.clear()
        with pytest.MonkeyPatch.context() as patch:
            for name in names:
                patch.setattr(owner, name, self._around(name, getattr(owner, name)))
            yield

    def _around(self, name, original):
        @functools.wraps(original)
        def wrapper(*arguments, **named):
            self.append(name)
            return original(*arguments, **named)

        return wrapper


@pytest.fixture
def calls():
    return Calls()


@pytest.fixture
def loops(monkeypatch):
    """The names of the loops of tfdist that have run."""
    run = []

    def telling(name, loop):
        def tell(*arguments, **named):
            run.append(name)
            return loop(*arguments, **named)

        return tell

    for name in METHODS:
        monkeypatch.setattr(outer_loop, name, telling(name, getattr(outer_loop, name)))
    return run


@pytest.mark.sampled(1)
@pytest.mark.parametrize("when", ["before prepare", "after prepare"])
@pytest.mark.parametrize("name", METHODS)
def test_a_wrapper_of_keras_runs_once_and_so_does_the_strategys_loop(name, when, calls, loops, same_as_stock):
    def case(contestant):
        loops.clear()
        if when == "before prepare":
            with calls.wrapped(keras.Model):
                model = made(contestant)
                result = METHODS[name](model)
        else:
            model = made(contestant)
            with calls.wrapped(keras.Model):
                result = METHODS[name](model)
        assert calls == [name]
        assert loops == ([] if contestant[0] in ("stock", "stock_mirrored") else [name])
        return [result, model.get_weights()]

    same_as_stock(case)


class Doubling(keras.Sequential):
    def fit(self, x, y, **named):
        return super().fit(2 * x, y, **named)

    def evaluate(self, x, y, **named):
        return {name: 2 * value for name, value in super().evaluate(x, y, **named).items()}


def doubling():
    model = Doubling([keras.Input((4,)), layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    return model


@pytest.mark.sampled(1)
def test_overrides_and_wrappers_of_fit_and_evaluate_are_called_as_stock_keras_calls_them(calls, same_as_stock):
    def case(contestant):
        with calls.wrapped(keras.Model), calls.wrapped(Doubling, ("fit", "evaluate")):
            model = made(contestant, doubling)
            model.fit(X, Y, epochs=2, validation_data=(X, Y), shuffle=False, **ARGUMENTS)
        assert calls == ["fit", "fit", *["evaluate", "evaluate"] * 2]
        return [model.history.history, model.get_weights()]

    same_as_stock(case)


@pytest.mark.thorough
@pytest.mark.parametrize("when", ["before prepare", "after prepare"])
def test_a_wrapper_on_the_model_itself_runs_once(when, calls, contestant, loops):
    if contestant[0] == "stock_mirrored":
        pytest.skip("it has no loop of its own")
    strategy = start(contestant)
    with strategy.scope():
        model = linear()
    if when == "after prepare":
        strategy.prepare(model)
    with calls.wrapped(model):
        if when == "before prepare":
            strategy.prepare(model)
        for name, method in METHODS.items():
            calls.clear()
            loops.clear()
            method(model)
            assert calls == loops == [name]


@pytest.mark.sampled(1)
def test_a_wrapper_may_change_arguments_and_results(contestant, monkeypatch):
    original = keras.Model.fit
    seen = []
    callback = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(epoch))
    monkeypatch.setattr(
        keras.Model, "fit", lambda self, *args, **named: (original(self, *args, **named | {"callbacks": [callback]}), 7)
    )
    assert made(contestant).fit(X, Y, epochs=3, **ARGUMENTS)[1] == 7
    assert seen == [0, 1, 2]


def functions_of_keras():
    """Each method that Keras defines for models, its callback list and its optimizers, and what it does."""
    kinds = {*keras.Model.__mro__, keras.Sequential, keras.callbacks.CallbackList}
    found = {}
    for kind in kinds - {object}:
        for name, function in vars(kind).items():
            inner = getattr(function, "__wrapped__", function)
            found[kind.__qualname__, name] = (
                function,
                getattr(inner, "__code__", None),
                getattr(inner, "__defaults__", None),
                getattr(inner, "__kwdefaults__", None),
            )
    return found


@pytest.mark.thorough
def test_after_a_fit_keras_models_are_as_before(contestant):
    strategy = start(contestant)
    before = functions_of_keras()
    with strategy.scope():
        model = linear()
    if contestant[0] != "stock_mirrored":
        strategy.prepare(model)
    for method in METHODS.values():
        method(model)
    after = functions_of_keras()
    assert {name for name in after if after[name] != before.get(name)} == set()


@pytest.mark.sampled(1)
def test_a_stock_model_trains_as_ever_while_a_prepared_one_trains(contestant):
    losses = []
    alone = made(STOCK)
    expected = alone.fit(X, Y, shuffle=False, **ARGUMENTS).history["loss"]

    class Other(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            losses.append(other.fit(X, Y, shuffle=False, **ARGUMENTS).history["loss"])

    other = made(STOCK)
    made(contestant).fit(X, Y, callbacks=[Other()], **ARGUMENTS)
    np.testing.assert_allclose(losses, [expected], rtol=1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_keras_own_loop_refuses_to_run_a_step_of_a_prepared_model(name, contestant):
    if contestant[0] == "stock_mirrored":
        pytest.skip("Keras' own loop is its loop")
    model = made(contestant)
    data = {} if name.startswith("predict") else {"y": Y}
    with pytest.raises(UsageError, match=r"prepared for the strategy `.*`, outside of the strategy's loop\n\nhint: "):
        getattr(keras.Model, name)(model, X, **data)


@pytest.mark.sampled(1)
@contestants.among(contestants.WHOLE_AND_PARTS)
@pytest.mark.parametrize(
    "copied",
    [keras.models.clone_model, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["clone_model", "deepcopy", "pickle"],
)
def test_a_copy_of_a_prepared_model_is_one_of_stock_keras(copied, contestant, loops):
    model = made(contestant)
    model.fit(X, Y, **ARGUMENTS)
    assert type(model) is keras.Sequential
    other = copied(model)
    loops.clear()
    assert other.predict(X, **ARGUMENTS).shape == (19, 1)
    other.compile("sgd", "mse")
    other.fit(X, Y, **ARGUMENTS)
    assert loops == []


@pytest.mark.parametrize("first", ["autolog", "prepare"])
def test_mlflow_logs_a_training_that_the_strategy_runs(first, contestant, loops, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed")
    if contestant[0] == "stock_mirrored":
        pytest.skip("it has no loop of its own")
    monkeypatch.chdir(tmp_path)  # where it leaves its files
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/runs.db")
    try:
        if first == "autolog":
            mlflow.tensorflow.autolog(log_models=False)
        model = made(contestant)
        if first == "prepare":
            mlflow.tensorflow.autolog(log_models=False)
        with mlflow.start_run() as run:
            history = model.fit(X, Y, epochs=2, validation_data=(X, Y), **ARGUMENTS).history
    finally:
        mlflow.tensorflow.autolog(disable=True)
    assert loops == ["fit", "evaluate", "evaluate"]
    logged = mlflow.tracking.MlflowClient().get_metric_history(run.info.run_id, "loss")
    np.testing.assert_allclose([metric.value for metric in logged], history["loss"])
