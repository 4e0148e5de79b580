"""Point 1, the call: what `fit`, `evaluate` and `predict` take, for any model, gives what stock Keras gives."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf
from keras import layers

from tests.contract import contestants
from tests.contract.comparison import STOCK, assert_same, start

REPLICAS = contestants.FEW
EXAMPLES, BATCH = 19, 8  # the last batch has three
_rng = np.random.default_rng(0)
X = _rng.normal(size=(EXAMPLES, 4)).astype("float32")
Y = _rng.normal(size=(EXAMPLES, 1)).astype("float32")
WEIGHT = _rng.uniform(0, 2, EXAMPLES).astype("float32")
LABELS = _rng.integers(0, 3, EXAMPLES)
UNSEEN = (X[:11] + 1, Y[:11])


@dataclass(frozen=True)
class Call:
    """What is passed to `fit`, made anew for each fit, and the model that is trained with it.

    Attributes:
        evaluate: what to pass to `evaluate` afterwards, if it is to be called.
        predict: what to pass to `predict` afterwards, if it is to be called.
    """

    fit: Callable[[], dict[str, Any]]
    model: Callable[[], Any] | None = None
    evaluate: Callable[[], dict[str, Any]] | None = None
    predict: Callable[[], dict[str, Any]] | None = None


def compiled(model, optimizer="sgd", loss="mse", **options):
    # XLA would only make stock Keras slower to start.
    model.compile(optimizer, loss, **{"jit_compile": False} | options)
    return model


def linear(**options):
    return lambda: compiled(keras.Sequential([keras.Input((4,)), layers.Dense(1)]), **options)


def classifier():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3, activation="softmax")])
    return compiled(model, loss="sparse_categorical_crossentropy")


def call(name, contestant):
    case = CASES[name]
    strategy = start(contestant)
    with strategy.scope():
        model = (case.model or linear())()
    if contestant != STOCK:
        strategy.prepare(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # data that ends early
        result = model.fit(**{"epochs": 2, "shuffle": False, "verbose": 0} | case.fit())
        assert isinstance(result, keras.callbacks.History)
        found = {"history": result.history, "epochs": result.epoch, "steps": result.params["steps"]}
        if case.evaluate:
            for as_dict in (False, True):
                found[f"evaluate {as_dict}"] = model.evaluate(**case.evaluate(), verbose=0, return_dict=as_dict)
        if case.predict:
            found["predict"] = model.predict(**case.predict(), verbose=0)
    return found | {"weights": model.get_weights()}


def arrays(**options):
    return lambda: {"x": X, "y": Y, "batch_size": BATCH} | options


# Data


def two_inputs(kind):
    left, right = keras.Input((2,), name="left"), keras.Input((2,), name="right")
    inputs = {"left": left, "right": right} if kind is dict else [left, right]
    return compiled(keras.Model(inputs, layers.Dense(1)(layers.Concatenate()([left, right]))))


def halves(kind):
    return {"left": X[:, :2], "right": X[:, 2:]} if kind is dict else [X[:, :2], X[:, 2:]]


def sparse():
    return scipy.sparse.csr_matrix(np.where(X > 0, X, 0))


def tf_sparse():
    return tf.sparse.from_dense(np.where(X > 0, X, 0))


def sparse_linear():
    return compiled(keras.Sequential([keras.Input((4,), sparse=True), layers.Dense(1)]))


def ragged():
    return tf.RaggedTensor.from_row_lengths(np.arange(2.0 * EXAMPLES, dtype="float32") / 20, [1, 3] * 9 + [2])


class SumsOfRows(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, x):
        return self.dense(tf.reduce_sum(x, axis=1)[:, None])


def dataset(*parts):
    return tf.data.Dataset.from_tensor_slices(parts or (X, Y)).batch(BATCH)


def unknown(data):
    return data.filter(lambda *parts: True)


def with_pandas():
    pandas = pytest.importorskip("pandas")
    return {"x": pandas.DataFrame(X), "y": pandas.Series(Y[:, 0]), "batch_size": BATCH}


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, batch):
        part = slice(batch * BATCH, (batch + 1) * BATCH)
        return X[part], Y[part]


def endless():
    while True:
        yield from ((x.numpy(), y.numpy()) for x, y in dataset())


def once():
    yield from ((x.numpy(), y.numpy(), x.numpy()[:, 0] ** 2) for x, y in dataset())


DATA = {
    "numpy": Call(
        lambda: {"x": X.astype("float64"), "y": Y.astype("float64"), "batch_size": BATCH},
        evaluate=arrays(),
        predict=lambda: {"x": X, "batch_size": BATCH},
    ),
    "the default batch size": Call(lambda: {"x": X, "y": Y}),
    "tensors": Call(lambda: {"x": tf.constant(X), "y": tf.constant(Y), "batch_size": BATCH}),
    "pandas": Call(with_pandas),
    "scipy sparse": Call(
        lambda: {"x": sparse(), "y": Y, "batch_size": BATCH}, sparse_linear, predict=lambda: {"x": sparse()}
    ),
    "sparse tensor": Call(lambda: {"x": tf_sparse(), "y": Y, "batch_size": BATCH}, sparse_linear),
    "sparse dataset": Call(lambda: {"x": dataset(tf_sparse(), Y)}, sparse_linear),
    "ragged": Call(
        lambda: {"x": ragged(), "y": Y, "batch_size": BATCH},
        lambda: compiled(SumsOfRows()),
        predict=lambda: {"x": ragged(), "batch_size": BATCH},
    ),
    "ragged dataset": Call(lambda: {"x": dataset(ragged(), Y)}, lambda: compiled(SumsOfRows())),
    "dict of inputs": Call(
        lambda: {"x": halves(dict), "y": Y, "batch_size": BATCH},
        lambda: two_inputs(dict),
        predict=lambda: {"x": halves(dict)},
    ),
    "list of inputs": Call(
        lambda: {"x": halves(list), "y": Y, "batch_size": BATCH},
        lambda: two_inputs(list),
        predict=lambda: {"x": halves(list), "batch_size": BATCH},
    ),
    "dataset": Call(
        lambda: {"x": dataset()}, evaluate=lambda: {"x": dataset()}, predict=lambda: {"x": dataset(X).map(lambda x: x)}
    ),
    "dataset of unknown length": Call(
        lambda: {"x": unknown(dataset()), "epochs": 1},
        evaluate=lambda: {"x": unknown(dataset())},
        predict=lambda: {"x": unknown(dataset())},
    ),
    "dataset with weights": Call(lambda: {"x": dataset(X, Y, WEIGHT)}),
    "repeated dataset": Call(lambda: {"x": dataset().repeat(), "steps_per_epoch": 4}),
    "dataset that ends early": Call(lambda: {"x": dataset(), "steps_per_epoch": 2, "epochs": 4}),
    "endless evaluation and prediction": Call(
        arrays(),
        evaluate=lambda: {"x": dataset().repeat(), "steps": 4},
        predict=lambda: {"x": dataset().repeat(), "steps": 4},
    ),
    "PyDataset": Call(lambda: {"x": Batches()}, evaluate=lambda: {"x": Batches()}, predict=lambda: {"x": Batches()}),
    "PyDataset with workers": Call(lambda: {"x": Batches(workers=2)}),
    "PyDataset with class weights": Call(lambda: {"x": Batches(), "class_weight": {0: 1.0, 1: 2.0}, "epochs": 1}),
    "generator": Call(
        lambda: {"x": endless(), "steps_per_epoch": 4},
        evaluate=lambda: {"x": once()},
        predict=lambda: {"x": once()},
    ),
    "generator that ends": Call(lambda: {"x": once(), "epochs": 1}),
}

ARGUMENTS = {
    "validation_split": Call(arrays(validation_split=0.3)),
    "validation_split with weights": Call(arrays(validation_split=0.3, sample_weight=WEIGHT)),
    "validation_data": Call(arrays(validation_data=UNSEEN)),
    "validation_data with weights": Call(arrays(validation_data=(*UNSEEN, WEIGHT[:11]))),
    "validation_data as a dataset": Call(arrays(validation_data=dataset(*UNSEEN))),
    "validation_data as a PyDataset": Call(arrays(validation_data=Batches())),
    "validation_freq": Call(arrays(validation_data=UNSEEN, validation_freq=2, epochs=4)),
    "validation_freq as a list": Call(arrays(validation_data=UNSEEN, validation_freq=[1, 3], epochs=4)),
    "validation_steps": Call(arrays(validation_data=dataset(*UNSEEN).repeat(), validation_steps=3)),
    "validation_steps of arrays": Call(arrays(validation_data=UNSEEN, validation_steps=1)),
    "validation_batch_size": Call(arrays(validation_data=UNSEEN, validation_batch_size=3)),
    "sample_weight": Call(
        arrays(sample_weight=WEIGHT), linear(weighted_metrics=["mae"]), evaluate=arrays(sample_weight=WEIGHT)
    ),
    "class_weight": Call(arrays(y=LABELS, class_weight={0: 1.0, 1: 0.0, 2: 3.0}), classifier),
    "class_weight with a dataset": Call(
        lambda: {"x": dataset(X, LABELS), "class_weight": {0: 1.0, 1: 0.0, 2: 3.0}}, classifier
    ),
    "steps_per_epoch goes on in the next epoch": Call(arrays(batch_size=4, steps_per_epoch=2, epochs=5)),
    "steps_per_epoch of more than the data": Call(arrays(steps_per_epoch=5)),
    "initial_epoch": Call(arrays(initial_epoch=2, epochs=4)),
    "no epoch": Call(arrays(epochs=0)),
    "evaluate with steps": Call(
        arrays(), evaluate=arrays(steps=2), predict=lambda: {"x": X, "batch_size": 2, "steps": 3}
    ),
}


# Models


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, x, training=False):
        return self.dense(x)


class OwnLogs(Subclassed):
    """Its steps return more than its metrics."""

    def train_step(self, data):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            predictions = self(x, training=True)
            loss = self.compute_loss(x, y, predictions, weight)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        logs = self.compute_metrics(x, y, predictions, weight)
        return logs | {"mean_prediction": tf.reduce_mean(predictions), "mean_input": tf.reduce_mean(x, axis=0)[0]}

    def test_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        predictions = self(x, training=False)
        return {"mean_error": tf.reduce_mean(tf.abs(y - predictions))}


class OwnMetrics(Subclassed):
    """A metric's result under another name, beside the others."""

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        results = super().compute_metrics(x, y, y_pred, sample_weight)
        return results | {"mean_target": tf.reduce_mean(y)}


class Seen(keras.metrics.Metric):
    """Counts examples in whole numbers, and answers with the variable itself."""

    additive = True

    def __init__(self):
        super().__init__(name="seen")
        self.examples = self.add_weight(shape=(), initializer="zeros", name="examples", dtype="int32")

    def update_state(self, x):
        self.examples.assign_add(tf.shape(x)[0])

    def result(self):
        return self.examples


class CountsInTests(Subclassed):
    """What training does not touch is not exchanged before the steps are."""

    def __init__(self):
        super().__init__()
        self.seen = Seen()

    def test_step(self, data):
        self.seen.update_state(data[0])
        return super().test_step(data)


class OwnPredictStep(Subclassed):
    def predict_step(self, data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return {"prediction": self(x), "input": x}


def nested():
    inner = keras.Sequential([layers.Dense(3, activation="tanh"), layers.Dense(2)])
    inputs = keras.Input((4,))
    return compiled(keras.Model(inputs, layers.Dense(1)(keras.Sequential([inner, layers.Dense(2)])(inputs))))


def two_outputs():
    inputs = keras.Input((4,))
    model = keras.Model(inputs, [layers.Dense(1, name="first")(inputs), layers.Dense(1, name="second")(inputs)])
    return compiled(model, loss=["mse", "mae"], metrics=[["mae", "mse"], ["mse"]], loss_weights=[1.0, 0.5])


def whole(model, y=Y):
    """Trained, evaluated and asked to predict."""
    return Call(arrays(y=y), model, evaluate=arrays(y=y), predict=lambda: {"x": X, "batch_size": BATCH})


MODELS = {
    "sequential, unbuilt": whole(lambda: compiled(keras.Sequential([layers.Dense(3), layers.Dense(1)]))),
    "subclassed, unbuilt": whole(lambda: compiled(Subclassed(), metrics=["mae"])),
    "nested": whole(nested),
    "several outputs, metrics as lists": whole(two_outputs, [Y, Y * 2]),
    "names of losses, optimizers and metrics": whole(linear(optimizer="adam", loss="huber", metrics=["mae", "mse"])),
    "weighted metrics": whole(linear(weighted_metrics=["mae"])),
    "logs that are not metrics": whole(lambda: compiled(OwnLogs(), metrics=["mae"])),
    "own compute_metrics": whole(lambda: compiled(OwnMetrics(), metrics=["mae"])),
    "metric of whole numbers in tests alone": whole(lambda: compiled(CountsInTests(), metrics=["mae"])),
    "own predict_step": whole(lambda: compiled(OwnPredictStep())),
    "without metrics": whole(linear()),
}

CASES = DATA | ARGUMENTS | MODELS


@pytest.mark.sampled(8)
@contestants.among(contestants.WHOLE_AND_PARTS)
@pytest.mark.parametrize("name", DATA | ARGUMENTS)
def test_data_and_arguments_give_what_they_give_in_stock_keras(name, same_as_stock):
    same_as_stock(lambda contestant: call(name, contestant))


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_a_model_gives_what_it_gives_in_stock_keras(name, same_as_stock):
    same_as_stock(lambda contestant: call(name, contestant))


def linear_of(contestant, **options):
    strategy = start(contestant)
    with strategy.scope():
        model = linear(**options)()
    return strategy.prepare(model)


@pytest.mark.sampled(1)
def test_arguments_may_be_positional(contestant):
    model = linear_of(contestant)
    assert model.fit(X, Y, BATCH, 2, 0).epoch == [0, 1]
    assert model.predict(X, BATCH, 0).shape == Y.shape
    assert model.evaluate(X, Y, BATCH, 0) > 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("eagerly", [False, True])
def test_everything_may_happen_in_the_scope(contestant, eagerly):
    def train(strategy):
        with strategy.scope():
            model = linear(run_eagerly=eagerly)()
            history = strategy.fit(model, X, Y, batch_size=BATCH, validation_data=UNSEEN, shuffle=False, verbose=0)
            return [history.history, strategy.predict(model, X, batch_size=BATCH, verbose=0), model.get_weights()]

    expected = train(start(STOCK))
    assert_same(train(start(contestant)), expected)


class Shuffling(Batches):
    """Shuffles in both hooks, and notes when they are called."""

    def __init__(self, heard, name, **options):
        super().__init__(**options)
        self.heard, self.name = heard, name
        self.order, self.random = np.arange(len(X)), np.random.default_rng(1)

    def __getitem__(self, batch):
        part = self.order[batch * BATCH : (batch + 1) * BATCH]
        return X[part], Y[part]

    def on_epoch_begin(self):
        self.heard.append(f"{self.name} begins")
        self.random.shuffle(self.order)

    def on_epoch_end(self):
        self.heard.append(f"{self.name} ends")
        self.random.shuffle(self.order)


class Hears(keras.callbacks.Callback):
    """Notes hooks of a callback among those of the data, and stops at a batch."""

    def __init__(self, heard, stop_at=None):
        super().__init__()

        def note(hook):
            return lambda *arguments, **named: heard.append(hook)

        for hook in ("train_begin", "epoch_begin", "epoch_end", "test_begin", "test_end", "predict_begin"):
            setattr(self, f"on_{hook}", note(hook))

        def stop(batch, logs=None):
            if batch == stop_at:
                self.model.stop_training = self.model.stop_evaluating = self.model.stop_predicting = True

        self.on_train_batch_end = self.on_test_batch_end = self.on_predict_batch_end = stop


FIT = ("fit", {"shuffle": False})
HOOKS = {
    "fit": [("fit", {"shuffle": False, "epochs": 3})],
    "fit from a later epoch on": [("fit", {"shuffle": False, "epochs": 3, "initial_epoch": 1})],
    "fit, evaluate and fit": [FIT, ("evaluate", {}), FIT],
    "evaluate": [("evaluate", {})],
    "predict": [("predict", {})],
}


# The batch that the training stops at.
STOPS = {"to the end": None, "stopped": 1, "stopped at the end": 2}


@pytest.mark.thorough
@contestants.among(contestants.WHOLE_AND_PARTS)
@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("name", HOOKS)
def test_a_py_dataset_that_shuffles_in_its_hooks_gives_the_batches_of_stock_keras(name, stop, same_as_stock):
    def case(contestant):
        heard, found = [], []
        strategy = start(contestant)
        with strategy.scope():
            model = linear(metrics=["mae"])()
        data = Shuffling(heard, "data")
        for method, options in HOOKS[name]:
            callbacks = [Hears(heard, STOPS[stop])]
            result = getattr(strategy, method)(model, data, callbacks=callbacks, verbose=0, **options)
            found.append(getattr(result, "history", result))
        return [heard, found, model.get_weights()]

    same_as_stock(case)


@pytest.mark.thorough
@contestants.among(contestants.WHOLE_AND_PARTS)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("options", [{}, {"validation_freq": 2}, {"validation_steps": 2}], ids=str)
def test_validation_data_hear_of_each_evaluation_as_with_stock_keras(options, workers, same_as_stock):
    def case(contestant):
        heard = []
        strategy = start(contestant)
        with strategy.scope():
            model = linear()()
        data, validation_data = (Shuffling(heard, data, workers=workers) for data in ("data", "validation data"))
        options_of_fit = {"epochs": 3, "callbacks": [Hears(heard)], "shuffle": False, "verbose": 0} | options
        strategy.fit(model, data, validation_data=validation_data, **options_of_fit)
        # Workers read ahead, while the hook that is called before the first batch shuffles.
        return [heard, model.get_weights()] if workers == 1 else heard

    same_as_stock(case)


@pytest.mark.sampled(1)
@contestants.among(contestants.WHOLE_AND_PARTS)
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_a_py_dataset_hears_of_each_epoch_where_a_pass_lasts_several(steps, same_as_stock):
    def case(contestant):
        heard = []
        strategy = start(contestant)
        with strategy.scope():
            model = linear()()
        data = Shuffling(heard, "data")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the data end within an epoch
            strategy.fit(
                model, data, epochs=4, steps_per_epoch=steps, callbacks=[Hears(heard)], shuffle=False, verbose=0
            )
        return heard  # which batches come follows from how many were read ahead

    same_as_stock(case)


def test_predict_keeps_the_order_whatever_the_batch_size(contestant):
    strategy = start(contestant)
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), layers.Identity()])
    numbers = np.arange(23, dtype="float32")[:, None]
    for batch_size in (1, 2, 5, 23, 32):
        np.testing.assert_array_equal(strategy.predict(model, numbers, batch_size=batch_size, verbose=0), numbers)


@contestants.among(contestants.WHOLE_AND_PARTS)
def test_inputs_stay_as_they_were(contestant):
    given = {"x": X.copy(), "y": LABELS.copy(), "sample_weight": WEIGHT.copy()}
    strategy = start(contestant)
    with strategy.scope():
        model = classifier()
    strategy.fit(model, **given, batch_size=BATCH, verbose=0)
    for name, before in {"x": X, "y": LABELS, "sample_weight": WEIGHT}.items():
        np.testing.assert_array_equal(given[name], before)
        assert given[name].dtype == before.dtype


@pytest.mark.sampled(1)
def test_a_weights_change_between_fits_counts(contestant):
    """Graphs are kept with the model; what it holds is not."""
    model = linear_of(contestant)
    model.fit(X, Y, batch_size=BATCH, verbose=0)
    model.set_weights([np.zeros_like(weight) for weight in model.get_weights()])
    assert_same(model.evaluate(X, Y, batch_size=BATCH, verbose=0), float(np.mean(Y**2)))
    model.optimizer.learning_rate = 0.0
    model.fit(X, Y, batch_size=BATCH, verbose=0)
    assert not any(np.any(weight) for weight in model.get_weights())


def test_predicts_before_anything_else(contestant):
    """Without targets there is nothing to build loss and metrics from."""
    strategy = start(contestant)
    with strategy.scope():
        unbuilt = compiled(Subclassed(), metrics=["accuracy"])
    predictions = strategy.predict(unbuilt, X, batch_size=BATCH, verbose=0)
    assert_same(predictions, X @ unbuilt.dense.kernel.numpy())


READS = {
    "float(learning_rate)": lambda model: float(model.optimizer.learning_rate),
    "int(iterations)": lambda model: int(model.optimizer.iterations),
    "complex(learning_rate)": lambda model: complex(model.optimizer.learning_rate.value),
    "'%d'": lambda model: f"{int(model.optimizer.iterations):d} {float(model.optimizer.learning_rate):.3f}",
    "math": lambda model: math.sqrt(model.optimizer.learning_rate),
    "a comparison": lambda model: bool(model.optimizer.learning_rate < 1),
    "np.asarray(weight)": lambda model: np.asarray(model.layers[0].kernel),
    "np.asarray(weight.value)": lambda model: np.asarray(model.layers[0].kernel.value),
    "weight.numpy()": lambda model: model.layers[0].kernel.numpy(),
    "convert_to_numpy": lambda model: keras.ops.convert_to_numpy(model.optimizer.learning_rate),
    "np.linalg.norm": lambda model: np.linalg.norm(model.layers[0].kernel),
    "tf.reduce_sum": lambda model: float(tf.reduce_sum(model.layers[0].kernel)),
    "a slot": lambda model: np.asarray(model.optimizer.variables[-1]),
    "float(metric.result())": lambda model: float(model.metrics[0].result()),
    "the state of a metric": lambda model: float(model.metrics[0].variables[0]),
    "a tf.Variable": lambda model: float(model.own),
    "assign": lambda model: float(model.optimizer.learning_rate.assign(float(model.optimizer.learning_rate) * 0.9)),
}


@pytest.mark.sampled(1)
@contestants.among(contestants.FEW)
def test_variables_convert_to_numbers_in_a_callback_and_afterwards_as_with_stock_keras(same_as_stock):
    def case(contestant):
        strategy, found = start(contestant), []
        with strategy.scope():
            model = keras.Sequential([keras.Input((X.shape[1],)), layers.Dense(1)])
            model.own = tf.Variable(1.5, trainable=False)
            model.compile(keras.optimizers.Adam(0.1), "mse", jit_compile=False)

        def read(*arguments, **named):
            found.append({name: value(model) for name, value in READS.items()})

        callback = keras.callbacks.LambdaCallback(on_train_batch_end=read, on_epoch_end=read)
        strategy.fit(model, X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=[callback])
        read()
        return found

    same_as_stock(case)


class OfManyTypes(keras.Model):
    def call(self, x):
        return {
            "ragged": tf.RaggedTensor.from_tensor(x, lengths=tf.cast(x[:, 0] > 0, "int64") + 1),
            "sparse": tf.sparse.from_dense(tf.nn.relu(x)),
            "words": tf.strings.as_string(tf.round(x)),
            "others": [x > 0, tf.cast(x, "float16"), tf.cast(x, "int8"), tf.complex(x, x)],
        }


@pytest.mark.sampled(2)
def test_predictions_may_be_of_any_type(same_as_stock):
    def predict(contestant):
        strategy = start(contestant)
        with strategy.scope():
            model = OfManyTypes()
        found = strategy.predict(model, X, batch_size=BATCH, verbose=0)
        found["ragged"] = found["ragged"].to_list()
        found["sparse"] = tf.sparse.to_dense(found["sparse"]).numpy()
        return found | {"words": found["words"].astype(str).tolist()}

    same_as_stock(predict)


class Pair(keras.Model):
    """Two models and two optimizers, trained against each other; as a whole it is never called."""

    def __init__(self):
        super().__init__()
        self.up, self.down = (keras.Sequential([keras.Input((4,)), layers.Dense(1)]) for _ in range(2))
        self.error = keras.metrics.Mean(name="error")

    def compile(self, up_optimizer, down_optimizer):
        super().compile(jit_compile=False)
        self.up_optimizer, self.down_optimizer = up_optimizer, down_optimizer

    @property
    def metrics(self):
        return [self.error]

    def train_step(self, data):
        x, y = data
        for model, other, optimizer in (
            (self.up, self.down, self.up_optimizer),
            (self.down, self.up, self.down_optimizer),
        ):
            with tf.GradientTape() as tape:
                error = tf.reduce_mean(tf.square(y - model(x) - 0.1 * other(x)))
            gradients = tape.gradient(error, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            self.error.update_state(error)
        return {"error": self.error.result()}


class PairAtOnce(Pair):
    """Takes the gradients of both before it applies those of either."""

    def train_step(self, data):
        x, y = data
        optimizers = self.up_optimizer, self.down_optimizer
        with tf.GradientTape(persistent=True) as tape:
            up, down = self.up(x), self.down(x)
            errors = [tf.reduce_mean(tf.square(y - a - 0.1 * b)) for a, b in ((up, down), (down, up))]
            scaled = [optimizer.scale_loss(error) for optimizer, error in zip(optimizers, errors, strict=True)]
        variables = [model.trainable_variables for model in (self.up, self.down)]
        gradients = [tape.gradient(loss, own) for loss, own in zip(scaled, variables, strict=True)]
        for optimizer, found, own in reversed(list(zip(optimizers, gradients, variables, strict=True))):
            optimizer.apply(found, own)
        self.error.update_state(errors[0])
        return {"error": self.error.result()}


def scaled(optimizer):
    return keras.optimizers.LossScaleOptimizer(optimizer)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "optimizers"),
    [
        (Pair, lambda: (keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.1))),
        (PairAtOnce, lambda: (scaled(keras.optimizers.SGD(0.1)), scaled(keras.optimizers.SGD(0.05)))),
        (PairAtOnce, lambda: (scaled(keras.optimizers.SGD(0.1)), keras.optimizers.SGD(0.05))),
    ],
    ids=["in turn", "at once, both scaled", "at once, one scaled"],
)
def test_a_model_that_is_never_called_trains_with_optimizers_of_its_own(same_as_stock, kind, optimizers):
    def train(contestant):
        strategy = start(contestant)
        with strategy.scope():
            model = kind()
            model.compile(*optimizers())
        history = strategy.fit(model, X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
        return {"history": history, "weights": model.get_weights()}

    same_as_stock(train)
