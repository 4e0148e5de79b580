"""Point 1, the models: what stock Keras builds by training it, whatever its step takes, is trained here alike."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfdist
from tests.contract import contestants
from tests.contract.comparison import assert_same, start

REPLICAS = contestants.FEW
BATCH = 8
SGD = keras.optimizers.SGD  # where biases cancel out, others make steps of what is left of them
_rng = np.random.default_rng(0)
X = _rng.normal(size=(19, 4)).astype("float32")
Y = _rng.normal(size=(19, 1)).astype("float32")


def dataset(*parts):
    return tf.data.Dataset.from_tensor_slices(parts if len(parts) > 1 else parts[0]).batch(BATCH)


def ragged():
    return tf.RaggedTensor.from_row_lengths(np.arange(38.0, dtype="float32"), [1, 3] * 9 + [2])


def mean_error(y, predictions):
    return np.mean(np.abs(y.numpy() - predictions.numpy()))


class NumpyInCall(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, x):
        largest = float(np.abs(x.numpy()).max())
        return self.dense(x) / 3.0 + 0.0 * largest


class OwnStep(keras.Model):
    """Its layers are not built, nor is its optimizer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = layers.Dense(3), layers.Dense(1)
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.tracker]

    def loss_of(self, data):
        raise NotImplementedError

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(data)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


class DictOfInputs(OwnStep):
    """As keras.io's speech recognition takes them."""

    def call(self, inputs):
        source, target = inputs
        return self.second(self.first(source) + target[:, :3])

    def loss_of(self, batch):
        predictions = self([batch["source"], batch["target"]])
        return self.compute_loss(None, batch["target"][:, :1], predictions)


class Triplets(OwnStep):
    """As keras.io's siamese network takes them."""

    def call(self, x):
        return self.second(self.first(x))

    def loss_of(self, data):
        anchor, positive, negative = map(self, data)
        return ops.mean(ops.maximum((anchor - positive) ** 2 - (anchor - negative) ** 2 + 0.5, 0.0))


class TwoArguments(OwnStep):
    def call(self, x, y):
        return self.second(self.first(x)) * 0.5 + 0.1 * y

    def loss_of(self, data):
        x, y = data
        return ops.mean((self(x, y) - y) ** 2)


class WithoutCall(OwnStep):
    def loss_of(self, data):
        x, y = data
        return ops.mean((self.second(self.first(x)) - y) ** 2)


class HeadInTrainingAlone(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense, self.extra = layers.Dense(1), layers.Dense(1)

    def call(self, x, training=False):
        return self.dense(x) + self.extra(x) if training else self.dense(x)


class MadeInTheStep(OwnStep):
    """A variable that nobody could know of before."""

    scale = None

    def loss_of(self, data):
        x, y = data
        if self.scale is None:
            self.scale = tf.Variable(0.5, trainable=False)
        return ops.mean((self.second(self.first(x)) * self.scale - y) ** 2)


class LengthsOfRows(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, x):
        return self.dense(tf.cast(x.row_lengths(), tf.float32)[:, None])


def compiled(model, loss=None, optimizer=keras.optimizers.Adam, **options):
    model.compile(optimizer(0.05), loss, **{"jit_compile": False} | options)
    return model


CASES = {
    "NumPy in a metric, eagerly": (
        lambda: compiled(keras.Sequential([layers.Dense(1)]), "mse", metrics=[mean_error], run_eagerly=True),
        lambda: {"x": X, "y": Y},
    ),
    "NumPy in the call, eagerly": (
        lambda: compiled(NumpyInCall(), "mse", metrics=["mae"], run_eagerly=True),
        lambda: {"x": X, "y": Y},
    ),
    "own step, eagerly": (lambda: compiled(WithoutCall(), run_eagerly=True), lambda: {"x": X, "y": Y}),
    "dict of inputs": (lambda: compiled(DictOfInputs(), "mse"), lambda: {"x": dataset({"source": X, "target": X})}),
    "triplets": (lambda: compiled(Triplets(), optimizer=SGD), lambda: {"x": dataset(X, X[::-1], X * 0.5)}),
    "a call of two arguments": (lambda: compiled(TwoArguments()), lambda: {"x": X, "y": Y}),
    "without a call": (lambda: compiled(WithoutCall()), lambda: {"x": X, "y": Y}),
    "a head in training alone": (lambda: compiled(HeadInTrainingAlone(), "mse"), lambda: {"x": X, "y": Y}),
    "a variable made in the step": (lambda: compiled(MadeInTheStep()), lambda: {"x": X, "y": Y}),
    "ragged": (lambda: compiled(LengthsOfRows(), "mse"), lambda: {"x": ragged(), "y": Y}),
}


def train(name, contestant):
    model, data = CASES[name]
    strategy = start(contestant)
    with strategy.scope():
        model = model()
    arguments = data()
    if not isinstance(arguments["x"], tf.data.Dataset):
        arguments |= {"batch_size": BATCH}
    history = strategy.fit(model, **arguments, epochs=2, shuffle=False, verbose=0).history
    return {"history": history, "weights": model.get_weights()}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CASES)
def test_an_unbuilt_model_is_built_and_trained_as_by_stock_keras(name, contestant, same_as_stock):
    if contestant[0] == "parameter_server" and "eagerly" in name:
        pytest.skip("its workers run graphs alone")
    if contestant[0] == "stock_mirrored":
        pytest.skip("it builds by symbols")
    same_as_stock(lambda contestant: train(name, contestant))


def test_an_unbuilt_model_first_predicts_from_ragged_rows(same_as_stock):
    def predict(contestant):
        strategy = start(contestant)
        with strategy.scope():
            model = LengthsOfRows()
        return strategy.predict(model, ragged(), batch_size=BATCH, verbose=0)

    same_as_stock(predict)


@pytest.mark.sampled(1)
@contestants.among({"single": (1,), "custom": (2,)})
def test_an_optimizer_that_the_model_does_not_hold_is_built_too(same_as_stock):
    def train(contestant):
        optimizer = keras.optimizers.Adam(0.05)

        class Held(WithoutCall):
            def train_step(self, data):
                self.optimizer = optimizer
                logs = super().train_step(data)
                self.optimizer = None
                return logs

        strategy = start(contestant)
        with strategy.scope():
            model = Held()
            model.compile(optimizer=None, jit_compile=False)
        strategy.fit(model, X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    same_as_stock(train)


@contestants.among({"single": (1,), "custom": (2,), "mirrored": (2,)})
@pytest.mark.parametrize("eagerly", [False, True])
def test_a_rehearsal_changes_nothing(contestant, eagerly):
    """What is made keeps its first value, and what was there its own, until the first step."""
    seen = []

    class First(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 0:
                seen.append([int(self.model.optimizer.iterations.numpy()), *self.model.get_weights()])

    strategy = start(contestant)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((4,)), layers.BatchNormalization(), layers.Dropout(0.5, seed=1), layers.Dense(1)]
        )
        compiled(model, "mse", metrics=["mae"], run_eagerly=eagerly)
    before = [0, *model.get_weights()]
    strategy.fit(model, X, Y, batch_size=19, verbose=0, callbacks=[First()])
    assert_same(seen[0], before)
    assert int(model.optimizer.iterations.numpy()) == 1


class AlwaysNoisy(keras.layers.Layer):
    def call(self, x):
        return x + keras.random.normal((4,))


@pytest.mark.thorough
@contestants.among(contestants.FEW)
def test_a_training_on_one_device_draws_on_after_one_of_another_strategy(contestant, same_as_stock):
    """Keras' generator for draws without a seed may be made in the scope of a strategy, which it outlives."""
    if contestant[0].startswith("parameter_server"):
        pytest.skip("workers draw from a generator that servers hold")

    def run(contestant):
        keras.backend.clear_session(free_memory=False)
        x = np.random.default_rng(0).normal(size=(19, 4)).astype("float32")
        found = []
        for strategy in (start(contestant), tfdist.strategy("single"), start(contestant)):
            with strategy.scope():
                model = keras.Sequential([keras.Input((4,)), AlwaysNoisy(), layers.Dense(1)])
                model.compile("sgd", "mse", jit_compile=False)
            history = strategy.fit(model, x, x[:, :1], batch_size=BATCH, shuffle=False, verbose=0).history
            found.append((history, model.get_weights()))
        return found

    same_as_stock(run)
