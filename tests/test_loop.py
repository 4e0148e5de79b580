"""What cannot work is refused before the first step, in one sentence and a hint; and how long a call lasts."""

import contextlib
import copy
import itertools
import json
import os
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.planted_rules import mean_of_means, plant
from tfdist.data.input import adapters
from tfdist.errors import DataError, UnknownNameError, UsageError, VerificationError
from tfdist.launcher import function
from tfdist.loop import steps_per_call
from tfdist.strategies import base

X, Y = np.ones((10, 2), "float32"), np.ones((10, 1), "float32")
EACH = pytest.mark.parametrize("name", ["single", "mirrored", "custom"])


def strategy_of(name, **options):
    return tfdist.strategy(name, devices=1 if name == "single" else 2, seed=0, **options)


def model_of(strategy, optimizer="sgd", **options):
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
        model.compile(optimizer, "mse", jit_compile=False, **options)
    return model


@contextlib.contextmanager
def refuses(error, *words):
    """The block raises `error` with these words and a hint."""
    with pytest.raises(error) as raised:
        yield
    for word in (*words, "\n\nhint: "):
        assert word in str(raised.value)


@EACH
@pytest.mark.parametrize("method", ["fit", "evaluate"])
def test_an_uncompiled_model_is_refused(name, method):
    strategy = strategy_of(name)
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), layers.Dense(1)], name="bare")
    with refuses(UsageError, "`bare` is not compiled", f"`{method}`"):
        getattr(strategy, method)(model, X, Y)


def empty_datasets():
    examples = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    return {
        "arrays": (X[:0], Y[:0]),
        "dataset": (examples.take(0),),
        "dataset of unknown length": (examples.filter(lambda x, y: False),),
    }


class Empty(keras.utils.PyDataset):
    def __len__(self):
        return 0

    def __getitem__(self, batch):
        raise AssertionError


@pytest.mark.sampled(8)
@EACH
@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_data_without_batches_is_refused(name, method):
    strategy = strategy_of(name)
    model = model_of(strategy)
    for data in [*empty_datasets().values(), (Empty(),)]:
        with refuses(DataError, "no batches"):
            getattr(strategy, method)(model, *data[: 1 if method == "predict" else 2], verbose=0)


@pytest.mark.sampled(1)
@EACH
def test_validation_data_without_batches_is_refused(name):
    strategy = strategy_of(name)
    for data in empty_datasets().values():
        with refuses(DataError, "no batches"):
            strategy.fit(model_of(strategy), X, Y, validation_data=data[0] if len(data) == 1 else data, verbose=0)


def test_a_model_made_outside_of_the_scope_is_refused():
    strategy = strategy_of("mirrored")
    outside = model_of(strategy_of("single"))
    for method in (strategy.prepare, lambda model: strategy.fit(model, X, Y), lambda model: strategy.predict(model, X)):
        with refuses(UsageError, "was made outside the scope of the strategy `mirrored`", "with strategy.scope"):
            method(outside)
    with refuses(UsageError, "was made outside the scope"):
        strategy_of("mirrored").prepare(model_of(strategy))


def test_an_optimizer_made_outside_of_the_scope_is_refused():
    strategy = strategy_of("mirrored")
    for optimizer in (keras.optimizers.Adam(), keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())):
        with refuses(UsageError, "outside the scope of the strategy `mirrored`"):
            strategy.fit(model_of(strategy, optimizer), X, Y)


def test_a_layer_made_outside_of_the_scope_is_refused():
    strategy = strategy_of("mirrored")
    layer = layers.Dense(1)
    layer.build((None, 2))
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), layer])
        model.compile("sgd", "mse")
    with refuses(UsageError, "variable `dense/kernel` was made outside the scope"):
        strategy.fit(model, X, Y)


@pytest.mark.sampled(7)
@EACH
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"x": tf.data.Dataset.from_tensors((X, Y)), "y": Y}, ValueError),
        ({"x": X, "y": Y[:3]}, ValueError),
        ({"x": Empty(), "y": Y}, ValueError),
        ({"x": X, "y": Y, "sample_weight": Y[:, 0], "class_weight": {0: 1.0, 1: 2.0}}, ValueError),
        ({"x": X, "y": Y, "validation_split": 0.99}, ValueError),
        ({"x": tf.data.Dataset.from_tensors((X, Y)), "validation_split": 0.5}, ValueError),
        ({"x": X, "y": Y, "validation_data": (X, Y), "validation_freq": "often"}, ValueError),
        ({"x": "examples"}, ValueError),
        ({"x": X, "y": Y, "batchsize": 3}, TypeError),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else value.__name__,
)
def test_what_keras_refuses_is_refused_alike(name, arguments, error):
    with pytest.raises(error) as by_keras:
        model_of(strategy_of("single")).fit(**arguments, verbose=0)
    strategy = strategy_of(name)
    with pytest.raises(error) as by_us:
        strategy.fit(model_of(strategy), **arguments, verbose=0)
    # Keras' `TypeError` names the method with its class.
    words = ("batchsize",) if error is TypeError else (str(by_keras.value)[:60],)
    assert all(word in str(by_us.value) for word in words)


@EACH
@pytest.mark.parametrize(
    ("option", "value", "minimum"),
    [("steps_per_call", 0, 1), ("steps_per_call", -1, 1), ("seed", -1, 0), ("device_data_bytes", -1, 0)],
)
def test_a_number_below_its_minimum_is_refused(name, option, value, minimum):
    with refuses(UsageError, f"`{option}` is {value}", f"use {minimum} or more"):
        tfdist.strategy(name, **{option: value})


def test_an_unknown_strategy_is_refused_with_the_names_there_are():
    with refuses(UnknownNameError, "`miror`", "`custom`", "`mirrored`", "`single`", "did you mean `mirrored`"):
        tfdist.strategy("miror")


@pytest.mark.parametrize("name", ["single", "mirrored", "custom", "multiworker", "parameter_server"])
def test_an_unknown_option_is_refused_with_the_options_there_are(name):
    with refuses(UsageError, f"`{name}`", "`device`", "`devices`"):
        tfdist.strategy(name, device=1)


@EACH
def test_unknown_devices_are_refused(name):
    with refuses(UnknownNameError, "device `CPU:9`", "`CPU:0`"):
        tfdist.strategy(name, devices="CPU:9")
    with refuses(UsageError, "`devices` is 0"):
        tfdist.strategy(name, devices=0)
    if name != "single":
        with refuses(UsageError, "`devices` is 64, and TensorFlow has"):
            tfdist.strategy(name, devices=64)


def test_single_refuses_several_devices():
    with refuses(UsageError, "`single` uses one device, and 2"):
        tfdist.strategy("single", devices=2)


@EACH
def test_processes_of_a_job_that_train_apart_from_each_other_are_told_so(name, monkeypatch):
    task = {"type": "worker", "index": 1}
    cluster = {"worker": ["localhost:20000", "localhost:20001"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    with pytest.warns(UserWarning, match=rf"2 of 2 of a job \(TF_CONFIG\), and the strategy `{name}` trains in one"):
        tfdist.strategy(name)


class TestPace:
    """A call lasts until a callback must be called, and about half a second at most."""

    def steps_of(self, *callbacks, kind="train", steps_per_execution=1, at_most=None, seconds=None):
        chosen = steps_per_call.Pace(callbacks, kind, steps_per_execution, at_most)
        if seconds is not None:
            chosen.ran(1, 100.0)  # builds the graph
            chosen.ran(1, seconds)
        return chosen.steps(0)

    def test_the_clock_alone_decides_where_no_callback_needs_to_know(self):
        assert self.steps_of() == steps_per_call.STEPS_OF_FIRST_CALL
        assert self.steps_of(seconds=0.001) == 500
        assert self.steps_of(seconds=10.0) == 1
        assert self.steps_of(at_most=50, seconds=0.001) == 50

    def test_batch_hooks_are_called_after_each_execution(self):
        needs = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)
        assert self.steps_of(needs, seconds=0.001) == 1
        assert self.steps_of(needs, steps_per_execution=3, seconds=0.001) == 3
        assert self.steps_of(needs, steps_per_execution=3, seconds=10.0) == 3
        assert self.steps_of(needs, kind="test", seconds=0.001) == 500

    @pytest.mark.parametrize(
        "make",
        [
            lambda folder: keras.callbacks.History(),
            lambda folder: keras.callbacks.ProgbarLogger(),
            lambda folder: keras.callbacks.EarlyStopping(),
            lambda folder: keras.callbacks.ModelCheckpoint(folder / "x.keras"),
            keras.callbacks.BackupAndRestore,
            keras.callbacks.TensorBoard,
            lambda folder: keras.callbacks.CSVLogger(folder / "log.csv"),
            lambda folder: keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None),
        ],
    )
    def test_keras_callbacks_that_act_at_the_end_of_epochs_leave_the_inner_loop_long(self, make, tmp_path):
        callback = make(tmp_path)
        callback.set_model(keras.Sequential([keras.Input((1,)), layers.Dense(1)]))
        assert self.steps_of(callback, seconds=0.001) == 500

    def test_a_callback_says_itself_when_it_must_be_called(self):
        class EveryTen(keras.callbacks.Callback):
            def batches_until_hook(self, batch):
                return 10 - batch % 10

            def on_train_batch_end(self, batch, logs=None):
                pass

        assert self.steps_of(EveryTen(), seconds=0.001) == 10


def test_terminate_on_nan_hears_of_the_loss_of_a_step_of_ones_own():

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(1)

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            x, _ = data
            self.optimizer.iterations.assign_add(1)
            return {"loss": tf.reduce_mean(x), "other": 1.0}

    x = X.copy()
    x[6:] = np.nan
    strategy = strategy_of("single")
    with strategy.scope():
        model = Own()
        model.compile("sgd", jit_compile=False)
    strategy.fit(model, x, Y, batch_size=2, shuffle=False, verbose=0, callbacks=[keras.callbacks.TerminateOnNaN()])
    assert int(model.optimizer.iterations.numpy()) == 4


@pytest.mark.sampled(1)
@pytest.mark.parametrize("method", ["fit", "evaluate", "predict", "validation", "a fit that fails"])
def test_a_generator_is_not_read_on_after_the_call(method):
    """A process that exits while TensorFlow still reads a generator of Python's hangs."""
    drawn = 0

    def slowly():
        nonlocal drawn
        while True:
            time.sleep(0.05)
            drawn += 1
            yield np.ones([2, 1]), np.ones([2, 1])

    class Fails(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise RuntimeError("planted")

    strategy = tfdist.strategy("single")
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mae", jit_compile=False)
    if method == "fit":
        strategy.fit(model, slowly(), steps_per_epoch=2, verbose=0)
    elif method == "validation":
        strategy.fit(model, np.ones([4, 1]), np.ones([4, 1]), validation_data=slowly(), validation_steps=2, verbose=0)
    elif method == "a fit that fails":
        with pytest.raises(RuntimeError, match="planted"):
            strategy.fit(model, slowly(), steps_per_epoch=2, verbose=0, callbacks=[Fails()])
    else:
        getattr(strategy, method)(model, slowly(), steps=2, verbose=0)
    at_the_end = drawn
    time.sleep(0.3)
    assert drawn == at_the_end >= 2


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["fit", "verify"])
def test_a_generator_is_not_read_on_after_a_verification_that_fails(method, monkeypatch):
    plant("Mean", mean_of_means, monkeypatch)
    rng, drawn = np.random.default_rng(0), 0

    def slowly():
        nonlocal drawn
        while True:
            time.sleep(0.05)
            drawn += 1
            yield rng.normal(size=[4, 1]), np.ones([4, 1])

    examples = tf.TensorSpec([4, 1])
    dataset = tf.data.Dataset.from_generator(slowly, output_signature=(examples, examples)).prefetch(1000)
    strategy = tfdist.strategy("custom", devices=2)
    inside = [layers.Dense(2), layers.BatchNormalization(), layers.Dense(1)]
    model = keras.Sequential([keras.Input((1,)), *inside])
    model.compile("sgd", "mse", jit_compile=False)
    strategy.prepare(model, verify=method == "fit")
    with pytest.raises(VerificationError) as raised:
        if method == "fit":
            model.fit(dataset, steps_per_epoch=2, verbose=0)
        else:
            strategy.verify(model, dataset)
    at_the_end = drawn
    time.sleep(0.3)
    assert raised  # a process that ends with the error holds its frames until it has ended
    assert drawn == at_the_end >= 2


@pytest.mark.parametrize("steps", [None, 1, 3])
def test_keras_cap_on_the_steps_of_an_epoch_holds_whatever_steps_are_asked_for(steps):
    model = keras.Sequential([keras.Input((1,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    keras.config.set_max_steps_per_epoch(2)
    try:
        tfdist.strategy("single").fit(model, X[:8, :1], Y[:8], batch_size=2, steps_per_epoch=steps, verbose=0)
    finally:
        keras.config.set_max_steps_per_epoch(None)
    assert int(model.optimizer.iterations) == min(steps or 2, 2)


def test_on_one_core_nothing_is_autotuned_unless_the_user_asks_for_it():
    def autotunes(dataset):
        return adapters.make(adapters.request(dataset), seed=0).start(0, 0)._dataset.options().autotune.enabled

    plain = tf.data.Dataset.from_tensor_slices((X, Y)).batch(2)
    asked = tf.data.Options()
    asked.autotune.enabled = True
    cores = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(cores)})
        assert autotunes(plain) is False
        assert autotunes(plain.with_options(asked)) is True
    finally:
        os.sched_setaffinity(0, cores)
    if len(cores) > 1:
        assert autotunes(plain) is None


def test_a_pass_over_a_generator_begins_with_its_first_batches_and_loses_one_at_its_end():
    """As stock Keras has it, but for a race there: one batch is mostly prefetched, and never seen."""
    drawn = []

    def numbers():
        for number in itertools.count():
            drawn.append(number)
            yield np.full([2, 1], float(number)), np.zeros([2, 1])

    strategy = tfdist.strategy("single")
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.0), "mae", jit_compile=False)
    history = strategy.fit(
        model, np.ones([4, 1]), np.ones([4, 1]), epochs=3, verbose=0, validation_data=numbers(), validation_steps=3
    )
    expected = [np.mean(batches) for batches in ((0, 1, 2), (0, 1, 4), (0, 1, 6))]
    np.testing.assert_allclose(history.history["val_loss"], expected)
    assert drawn == list(range(8))


@EACH
def test_numbers_of_numpy_count_like_those_of_python(name):
    strategy = strategy_of(name)
    one, two, four = np.int64(1), np.int64(2), np.int64(4)
    options = {"batch_size": four, "steps_per_epoch": one, "validation_steps": two, "validation_batch_size": four}
    model = strategy.prepare(model_of(strategy))
    model.fit(X, Y, epochs=two, initial_epoch=np.int64(0), validation_data=(X, Y), verbose=0, **options)
    model.evaluate(X, Y, batch_size=four, steps=two, verbose=0)
    assert len(model.predict(X, batch_size=four, steps=two, verbose=0)) == 8
    assert model.optimizer.iterations == 2


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"steps_per_epoch": len(X) / 4}, "`steps_per_epoch` is 2.5, which is no whole number"),
        ({"batch_size": "4"}, "`batch_size` is '4', which is no whole number"),
        ({"epochs": 2.0}, "`epochs` is 2.0, which is no whole number"),
        ({"steps_per_epoch": -1}, "`steps_per_epoch` is -1"),
        ({"batch_size": np.int64(-4)}, "`batch_size` is -4"),
        ({"validation_data": (X, Y), "validation_steps": 2.5}, "`validation_steps` is 2.5, which is no whole number"),
    ],
)
def test_a_number_that_cannot_count_is_refused(options, sentence):
    strategy = strategy_of("single")
    with refuses(UsageError, sentence):
        strategy.prepare(model_of(strategy)).fit(X, Y, verbose=0, **options)


class Unsaid(base.Strategy):
    """A strategy of one's own that does not say how its replicas exchange values."""

    name = "unsaid"


@pytest.mark.parametrize("kind", ["fit", "predict"])
def test_a_strategy_of_several_replicas_without_a_mesh_and_a_program_is_refused(kind):
    strategy = Unsaid(devices=2)
    model = model_of(strategy)
    with refuses(UsageError, "`unsaid` has 2 replicas", "nor how their steps run", "define a property `mesh`"):
        getattr(strategy, kind)(model, *((X, Y) if kind == "fit" else (X,)), verbose=0)


def test_a_strategy_of_one_replica_needs_neither():
    strategy = Unsaid(devices=1)
    history = strategy.fit(model_of(strategy), X, Y, epochs=2, verbose=0).history
    assert history["loss"][1] < history["loss"][0]


@EACH
def test_a_strategy_is_not_sent_to_other_processes_where_each_would_train_alone(name):
    strategy = strategy_of(name)
    with refuses(UsageError, "cannot be sent to other processes", f"`{strategy.name}` belongs to its process"):
        function.pickled(lambda: strategy, (), {})


@EACH
def test_a_copy_of_what_refers_to_a_strategy_refers_to_the_same(name):
    strategy = strategy_of(name)
    assert copy.deepcopy([strategy])[0] is strategy


@EACH
def test_a_prepared_model_can_be_copied(name):
    strategy = strategy_of(name)
    model = strategy.prepare(model_of(strategy))
    copied = copy.deepcopy(model)
    for original, weights in zip(model.get_weights(), copied.get_weights(), strict=True):
        np.testing.assert_array_equal(original, weights)
