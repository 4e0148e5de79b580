"""`hogwild`: threads that update the same weights without waiting for each other."""

import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tfdist import callbacks
from tfdist.errors import DifferenceWarning, UsageError
from tfdist.parameter_server.workers import Threads
from tfdist.strategies import hogwild

WORDS, EXAMPLES, BATCH = 500, 330, 16
RNG = np.random.default_rng(0)
X = RNG.integers(0, WORDS, (EXAMPLES, 8)).astype("int32")
Y = (X.sum(1) % 2).astype("int32")


class Count(keras.metrics.Metric):
    """The number of examples."""

    additive = True

    def __init__(self, name="examples"):
        super().__init__(name=name)
        self.total = self.add_variable((), "zeros", name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(tf.cast(tf.shape(y_pred)[0], "float32"))

    def result(self):
        return self.total.value


def bag_of_words(optimizer="sgd"):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((8,), dtype="int32"),
            layers.Embedding(WORDS, 16),
            layers.GlobalAveragePooling1D(),
            layers.Dense(2),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        keras.optimizers.get({"class_name": optimizer, "config": {"learning_rate": 0.1}}), loss, metrics=[Count()]
    )
    return model


def train(name, optimizer="sgd", data=(X, Y), threads=None, **options):
    strategy = tfdist.strategy(name, seed=1, **options)
    if threads is not None:
        strategy.workers = Threads(threads, name)
    with strategy.scope():
        model = bag_of_words(optimizer)
    arguments = {} if isinstance(data[0], tf.data.Dataset) else {"batch_size": BATCH}
    history = strategy.fit(model, *data, epochs=3, verbose=0, **arguments).history
    return model, history


def assert_equal(found, wanted):
    for one, other in zip(found.get_weights(), wanted.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("locks", [False, True])
def test_steps_of_threads_that_come_one_after_the_other_are_those_of_one_device(optimizer, locks):
    found, history = train("hogwild", optimizer, threads=1, workers=2, locks=locks)
    wanted, of_single = train("single", optimizer)
    assert_equal(found, wanted)
    np.testing.assert_allclose(history["loss"], of_single["loss"], rtol=1e-5)
    assert history["staleness_max"] == [0, 0, 0]


class OwnStep(keras.Model):
    """A step as users write it: two optimizers, a queue of examples, a count, a `tf.Variable`, metrics of its own."""

    def __init__(self):
        super().__init__()
        self.encoder, self.head = layers.Dense(4), layers.Dense(2)
        self.second = keras.optimizers.Adam(0.01)
        self.queue = self.add_weight(shape=(8, 4), initializer="zeros", trainable=False)
        self.seen = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False)
        self.norm = tf.Variable(0.0, trainable=False)
        self.mean, self.unused = keras.metrics.Mean("mean"), keras.metrics.Mean("unused")

    def build(self, shape):
        self.encoder.build(shape)
        self.head.build((None, 4))
        self.second.build(self.head.trainable_variables)
        self.built = True

    def call(self, inputs, training=False):
        return self.head(self.encoder(inputs))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            codes = self.encoder(x)
            joint = tf.concat([codes, self.queue.value], 0)
            loss = tf.reduce_mean(self.compute_loss(y=y, y_pred=self.head(codes))) + 0.01 * tf.math.reduce_std(joint)
        self.optimizer.apply(tape.gradient(loss, self.encoder.trainable_variables), self.encoder.trainable_variables)
        self.second.apply(tape.gradient(loss, self.head.trainable_variables))
        for weight in self.encoder.trainable_variables:
            weight.assign(tf.clip_by_norm(weight, 1.5))
        self.queue.assign(tf.concat([codes, self.queue.value], 0)[:8])
        self.seen.assign_add(tf.shape(x)[0])
        self.norm.assign(0.9 * self.norm + tf.norm(self.encoder.kernel))
        self.mean.update_state(loss)
        return {"mean": self.mean.result(), "unused": loss, "norm": self.norm.read_value()}


def trained_by_own_step(name, **options):
    strategy = tfdist.strategy(name, seed=1, **options)
    if options:
        strategy.workers = Threads(1, name)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = OwnStep()
        model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        model.build((None, 8))
    history = strategy.fit(model, X.astype("float32") / WORDS, Y, batch_size=BATCH, epochs=2, verbose=0)
    return model, history.history


def test_a_step_of_the_users_own_is_that_of_one_device_if_no_other_comes_between():
    found, history = trained_by_own_step("hogwild", workers=2)
    wanted, of_single = trained_by_own_step("single")
    assert_equal(found, wanted)
    assert int(found.seen.numpy()) == 2 * EXAMPLES
    np.testing.assert_allclose(found.norm.numpy(), wanted.norm.numpy(), rtol=1e-5)
    for name, values in of_single.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5, err_msg=name)


class Returning(keras.Sequential):
    """Returns what its metric has counted under another name; the metric is no sum over the examples."""

    def train_step(self, data):
        logs = super().train_step(data)
        self.largest.update_state(data[0])
        return {"loss": logs["loss"], "twice": 2 * self.largest.result()}

    def test_step(self, data):
        super().test_step(data)
        self.largest.update_state(data[0])
        return {"twice": 2 * self.largest.result()}


class Largest(keras.metrics.Metric):
    additive = None  # nobody has said so

    def __init__(self):
        super().__init__(name="largest")
        self.value = self.add_variable((), "zeros", name="value")

    def update_state(self, values):
        self.value.assign(tf.maximum(self.value, tf.reduce_max(values)))

    def result(self):
        return self.value + 0.0


def test_what_a_step_makes_of_its_metrics_is_exact_in_evaluations_and_warned_of_in_trainings():
    model = Returning([keras.Input((4,)), layers.Dense(1)])
    model.largest = Largest()
    model.compile(keras.optimizers.SGD(0.01), "mse")
    x = np.arange(160, dtype="float32").reshape(40, 4)[::-1].copy()
    strategy = tfdist.strategy("hogwild", workers=2, seed=1)
    assert strategy.evaluate(model, x, x[:, :1], batch_size=4, verbose=0, return_dict=True) == {"twice": 318.0}
    model.largest.additive = True
    with pytest.warns(DifferenceWarning, match="returns `twice`, computed from what its metrics have counted"):
        strategy.fit(model, x, x[:, :1], batch_size=4, verbose=0)


def test_one_thread_computes_what_single_does():
    found, history = train("hogwild", "adam", workers=1)
    wanted, of_single = train("single", "adam")
    assert_equal(found, wanted)
    assert history == of_single


def batches():
    return (tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH),)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("data", [(X, Y), batches()], ids=["arrays", "tf.data"])
@pytest.mark.parametrize("locks", [False, True])
def test_threads_together_take_each_step_once_and_learn(data, locks):
    model, history = train("hogwild", "adagrad", data, workers=3, locks=locks)
    assert history["examples"] == [EXAMPLES] * 3
    assert int(model.optimizer.iterations.numpy()) == 3 * -(-EXAMPLES // BATCH)
    assert history["loss"][-1] < history["loss"][0]
    assert model.evaluate(X, Y, verbose=0, return_dict=True)["examples"] == EXAMPLES


def test_predictions_come_in_the_order_of_the_examples():
    strategy = tfdist.strategy("hogwild", workers=3)
    model = bag_of_words()
    np.testing.assert_allclose(
        strategy.predict(model, X, batch_size=BATCH, verbose=0), model.predict(X, verbose=0), atol=1e-6
    )


class Meets(keras.layers.Layer):
    """Passes its input on once two steps are in it at the same time."""

    barrier = threading.Barrier(2)

    def call(self, inputs):
        def meet(values):
            self.barrier.wait(timeout=20)
            return values

        met = tf.numpy_function(meet, [inputs], inputs.dtype)
        met.set_shape(inputs.shape)
        return met


def trained_by_two(layer, **arguments):
    strategy = tfdist.strategy("hogwild", workers=2, seed=1)
    model = keras.Sequential([keras.Input((4,)), layer, layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    x = np.ones((40, 4), "float32")
    # Batches of tf.data are a closure each, so that both threads have the same number of steps.
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(4)
    return model, strategy.fit(model, data, verbose=0, **arguments).history


def test_two_threads_are_in_a_step_at_the_same_time():
    model, history = trained_by_two(Meets(trainable=False))
    assert int(model.optimizer.iterations.numpy()) == 10
    assert history["staleness_max"][0] >= 1


class MeetsAndCounts(Meets):
    """Counts the examples of the steps in a state of the model."""

    def build(self, shape):
        self.seen = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False)

    def call(self, inputs, training=False):
        if training:
            self.seen.assign_add(tf.shape(inputs)[0])
        return super().call(inputs)


def test_what_two_steps_add_to_a_state_of_the_model_at_the_same_time_is_all_in_it():
    model, _ = trained_by_two(MeetsAndCounts())
    assert int(model.layers[0].seen.numpy()) == 40


class Fails(keras.layers.Layer):
    calls = 0

    def call(self, inputs):
        def fail(values):
            Fails.calls += 1
            if Fails.calls == 2:
                raise ValueError("planted")
            time.sleep(0.2)
            return values

        failed = tf.numpy_function(fail, [inputs], inputs.dtype)
        failed.set_shape(inputs.shape)
        return failed


def test_an_error_in_a_thread_ends_the_training_and_all_threads():
    with pytest.raises(tf.errors.OpError, match="planted"):
        trained_by_two(Fails())
    calls = Fails.calls
    time.sleep(0.5)
    assert Fails.calls == calls < 10


def test_a_loss_that_is_not_finite_ends_the_training():
    strategy = tfdist.strategy("hogwild", workers=2, seed=1)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e30), "mse")
    x = np.ones((400, 4), "float32")
    history = strategy.fit(
        model, x, x[:, :1], batch_size=4, epochs=5, verbose=0, callbacks=[keras.callbacks.TerminateOnNaN()]
    ).history
    assert len(history["loss"]) == 1
    assert not np.isfinite(history["loss"][0])


@pytest.mark.thorough
def test_a_run_that_is_resumed_takes_the_steps_that_are_left(tmp_path):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if int(self.model.optimizer.iterations.numpy()) >= 25:
                raise KeyboardInterrupt

    def run(*more):
        strategy = tfdist.strategy("hogwild", workers=2, seed=1)
        model = bag_of_words("adagrad")
        keep = callbacks.Checkpoint(tmp_path, every_steps=5, resume=True)
        strategy.fit(model, X, Y, epochs=2, batch_size=BATCH, verbose=0, callbacks=[keep, *more])
        return model

    with pytest.raises(KeyboardInterrupt):
        run(Stop())
    assert int(run().optimizer.iterations.numpy()) == 2 * -(-EXAMPLES // BATCH)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"devices": 2}, "uses one device, and 2 were set"),
        ({"workers": 0}, "workers"),
        ({"workers": "many"}, "workers"),
    ],
)
def test_an_option_that_cannot_work_is_refused(options, told):
    with pytest.raises(UsageError, match=told):
        tfdist.strategy("hogwild", **options)


def test_a_model_that_runs_eagerly_is_refused():
    model = bag_of_words()
    model.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True)
    with pytest.raises(UsageError, match="runs eagerly"):
        tfdist.strategy("hogwild", workers=2).fit(model, X, Y, verbose=0)


def test_as_many_threads_as_cores_if_not_said():
    assert tfdist.strategy("hogwild").num_workers == hogwild.cores()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_that_several_threads_would_accumulate_are_refused(scaled):
    optimizer = keras.optimizers.SGD(gradient_accumulation_steps=2)
    model = bag_of_words()
    optimizer = keras.optimizers.LossScaleOptimizer(optimizer) if scaled else optimizer
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with pytest.raises(UsageError, match="accumulates gradients"):
        tfdist.strategy("hogwild", workers=2).fit(model, X, Y, verbose=0)
    tfdist.strategy("hogwild", workers=1).fit(model, X, Y, verbose=0)
