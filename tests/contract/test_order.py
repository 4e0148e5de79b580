"""Points 3 and 4: every example once, in an order that follows from the seed and the epoch alone; seen by counting."""

import math
import random
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.contract import contestants
from tests.contract.comparison import Stock, assert_same, start
from tfdist.data.input import order

REPLICAS = contestants.EACH_COUNT
BATCH, SEED = 4, 7


class Seen(keras.metrics.Metric):
    """How often each example was seen; an example's target is its number. States of replicas are added."""

    additive = True

    def __init__(self, examples):
        super().__init__(name="seen")
        self.counts = self.add_weight(shape=(examples,), initializer="zeros", name="counts")

    def update_state(self, y_true, y_pred, sample_weight=None):
        numbers = tf.cast(tf.reshape(y_true, [-1]), tf.int32)
        self.counts.assign_add(tf.reduce_sum(tf.one_hot(numbers, self.counts.shape[0]), axis=0))

    def result(self):
        return self.counts + 0.0


class Batches(keras.callbacks.Callback):
    """The examples of each global batch, an array of numbers a batch, a list an epoch."""

    def __init__(self):
        super().__init__()
        self.epochs = []

    def on_epoch_begin(self, epoch, logs=None):
        self.epochs.append([])
        self._before = 0

    def on_train_batch_end(self, batch, logs=None):
        counts = np.asarray(logs["seen"])
        self.epochs[-1].append(np.repeat(np.arange(len(counts)), (counts - self._before).astype(int)))
        self._before = counts


class Observed:
    """Models whose fits tell which examples were in which batch."""

    def __init__(self, contestant, examples, **options):
        self.examples = examples
        self.x, self.y = np.ones((examples, 2), "float32"), np.arange(examples, dtype="float32")
        self.strategy = start(contestant, **options)

    def epochs(self, *data, again=False, **options):
        """Those of a new model, or `again` of the one before."""
        if not again:
            with self.strategy.scope():
                self.model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
                self.model.compile(keras.optimizers.SGD(0.0), "mse", metrics=[Seen(self.examples)])
        batches = Batches()
        fit = {"epochs": 2, "verbose": 0, "callbacks": [batches]} | options
        self.strategy.fit(self.model, *(data or (self.x, self.y)), **fit)
        return batches.epochs

    def expected(self, indices):
        return [np.sort(indices[first : first + BATCH]) for first in range(0, self.examples, BATCH)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("examples", [2 * BATCH, 2 * BATCH + 1, 3 * BATCH - 1, 1])
def test_every_example_is_seen_once_an_epoch(contestant, examples):
    """A remainder of one leaves all replicas but one without an example."""
    observed = Observed(contestant, examples)
    for epoch in observed.epochs(batch_size=BATCH):
        np.testing.assert_array_equal(np.sort(np.concatenate(epoch)), np.arange(examples))
    scores = observed.strategy.evaluate(
        observed.model, observed.x, observed.y, batch_size=BATCH, verbose=0, return_dict=True
    )
    np.testing.assert_array_equal(scores["seen"], np.ones(examples))


@pytest.mark.thorough
def test_a_global_batch_holds_the_same_examples_for_any_number_of_replicas(contestant):
    observed = Observed(contestant, 3 * BATCH + 1, seed=SEED)
    size = observed.examples
    orders = {
        True: lambda epoch: order.epoch_order(size, SEED, epoch),
        "batch": lambda epoch: order.order_within_batches(size, BATCH, SEED, epoch),
        False: lambda epoch: order.as_stored(size),
    }
    for shuffle, indices in orders.items():
        found = observed.epochs(batch_size=BATCH, shuffle=shuffle)
        assert_same(found, [observed.expected(indices(epoch)) for epoch in range(2)], tolerance=0)


class Stored(keras.utils.PyDataset):
    def __init__(self, x, y, **options):
        super().__init__(**options)
        self.x, self.y = x, y

    def __len__(self):
        return math.ceil(len(self.x) / BATCH)

    def __getitem__(self, batch):
        part = slice(batch * BATCH, (batch + 1) * BATCH)
        return self.x[part], self.y[part]


@pytest.mark.thorough
@contestants.among(contestants.WHOLE_AND_PARTS)
def test_batches_of_datasets_come_in_the_order_of_the_seed_or_as_they_are(contestant):
    observed = Observed(contestant, 5 * BATCH + 1, seed=SEED)
    stored = observed.expected(order.as_stored(observed.examples))
    for workers in (0, 2):
        data = Stored(observed.x, observed.y, workers=workers)
        shuffled = [[stored[k] for k in order.epoch_order(len(stored), SEED, epoch)] for epoch in range(2)]
        assert_same(observed.epochs(data, shuffle=True), shuffled, tolerance=0)
        assert_same(observed.epochs(data, shuffle=False), [stored] * 2, tolerance=0)
    data = tf.data.Dataset.from_tensor_slices((observed.x, observed.y)).batch(BATCH)
    assert_same(observed.epochs(data), [stored] * 2, tolerance=0)


def reshuffled(unknown_length=False):
    """Batches that TensorFlow shuffles again in each epoch; the model learns something else in each order."""
    numbers = tf.data.Dataset.range(5 * BATCH + 3).shuffle(5 * BATCH + 3, seed=4)
    if unknown_length:
        numbers = numbers.filter(lambda number: True)
    return numbers.map(lambda number: (tf.stack([tf.sin(1.0 * tf.cast(number, "float32")), 1.0]), [number])).batch(
        BATCH
    )


class StopsAt(keras.callbacks.Callback):
    def __init__(self, batch):
        super().__init__()
        self.batch = batch

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = self.model.stop_training or batch == self.batch


RESHUFFLED = {
    "epochs": {},
    "one epoch": {"epochs": 1},
    "fewer steps than batches": {"steps_per_epoch": 4},
    "as many steps as batches": {"steps_per_epoch": 6},
    "more steps than batches": {"steps_per_epoch": 7},
    "stopped within the epoch": {"callbacks": [StopsAt(2)]},
    "stopped at its last batch": {"callbacks": [StopsAt(5)]},
    "several steps per execution": {"steps_per_execution": 4},
}


# With as many steps as batches, stock Keras goes through an epoch without a batch, whose loss it notes as 0.
OF_UNKNOWN_LENGTH = [name for name in RESHUFFLED if name != "as many steps as batches"]


@pytest.mark.thorough
@contestants.among(contestants.WHOLE_AND_PARTS)
@pytest.mark.parametrize(
    ("name", "unknown_length"),
    [*((name, False) for name in RESHUFFLED), *((name, True) for name in OF_UNKNOWN_LENGTH)],
    ids=lambda value: value if isinstance(value, str) else "unknown length" if value else "known length",
)
def test_a_dataset_that_is_reshuffled_comes_in_the_orders_of_stock_keras(name, unknown_length, same_as_stock):
    def case(contestant):
        options = {"epochs": 3, "verbose": 0} | RESHUFFLED[name]
        strategy = start(contestant)
        with strategy.scope():
            model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
            steps_per_execution = options.pop("steps_per_execution", 1)
            model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False, steps_per_execution=steps_per_execution)
        data = reshuffled(unknown_length)
        found = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the data end within an epoch
            for _ in range(2):
                found += [strategy.fit(model, data, **options).history, model.get_weights()]
            strategy.evaluate(model, data, verbose=0)
            strategy.predict(model, data.map(lambda x, y: x), verbose=0)
            found += [strategy.fit(model, data, validation_data=data, **options).history, model.get_weights()]
        return found

    same_as_stock(case)


@pytest.mark.thorough
@contestants.among(contestants.FEW)
def test_the_order_of_an_epoch_follows_from_seed_and_number(contestant):
    one, other = (Observed(contestant, 5 * BATCH + 3, seed=seed) for seed in (1, 2))
    first = one.epochs(batch_size=BATCH, epochs=4)
    assert_same(one.epochs(batch_size=BATCH, epochs=4), first, tolerance=0)
    assert_same(one.epochs(batch_size=BATCH, epochs=4, initial_epoch=3), first[3:], tolerance=0)
    assert not np.array_equal(np.concatenate(first[0]), np.concatenate(first[1]))
    elsewhere = other.epochs(batch_size=BATCH, epochs=1)
    assert not np.array_equal(np.concatenate(first[0]), np.concatenate(elsewhere[0]))


@pytest.mark.sampled(1)
@contestants.among(contestants.WHOLE_AND_PARTS)
def test_a_second_fit_goes_on_with_the_order_where_the_first_one_stopped(contestant):
    observed = Observed(contestant, 5 * BATCH + 3, seed=SEED)
    at_once = observed.epochs(batch_size=BATCH, epochs=4)
    one_by_one = [observed.epochs(batch_size=BATCH, epochs=1, again=bool(number))[0] for number in range(3)]
    assert_same(one_by_one, at_once[:3], tolerance=0)
    assert_same(observed.epochs(batch_size=BATCH, epochs=4, initial_epoch=3, again=True), at_once[3:], tolerance=0)
    observed.epochs(batch_size=BATCH, epochs=1)
    assert_same(observed.epochs(batch_size=BATCH, epochs=4, initial_epoch=3, again=True), at_once[3:], tolerance=0)


@pytest.mark.sampled(1)
@contestants.among(contestants.WHOLE_AND_PARTS)
def test_steps_of_an_epoch_go_on_where_the_epoch_before_stopped(contestant):
    observed = Observed(contestant, 4 * BATCH, seed=SEED)
    whole = observed.epochs(batch_size=BATCH, epochs=2)
    halves = observed.epochs(batch_size=BATCH, epochs=4, steps_per_epoch=2)
    assert_same([*halves[0], *halves[1]], whole[0], tolerance=0)
    assert_same([*halves[2], *halves[3]], whole[1], tolerance=0)


@pytest.mark.thorough
def test_the_same_seed_gives_the_same_history_with_random_layers_too(contestant):
    def history(seed):
        rng = np.random.default_rng(0)
        x, y = rng.normal(size=(27, 4)).astype("float32"), rng.integers(0, 3, 27)
        strategy = start(contestant, seed=seed)
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), layers.Dense(8), layers.Dropout(0.5), layers.Dense(3)])
            model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
        return strategy.fit(model, x, y, batch_size=BATCH, epochs=2, verbose=0).history

    assert history(SEED) == history(SEED)


@pytest.mark.sampled(1)
@contestants.among(contestants.WHOLE_AND_PARTS)
def test_a_random_seed_that_is_set_after_the_strategy_counts_too(contestant):
    def order(seed):
        observed = Observed(contestant, 9, seed=None)
        keras.utils.set_random_seed(seed)
        return [batch.tolist() for epoch in observed.epochs(batch_size=BATCH) for batch in epoch]

    assert order(5) == order(5) != order(6)


def test_a_ported_script_begins_with_the_weights_that_it_began_with():
    def weights(make_strategy):
        keras.utils.set_random_seed(5)
        with make_strategy().scope():
            return keras.Sequential([keras.Input((2,)), layers.Dense(3)]).get_weights()

    assert_same(weights(lambda: tfdist.strategy("mirrored", devices=2)), weights(Stock), tolerance=0)


@pytest.mark.sampled(1)
@contestants.among(contestants.WHOLE_AND_PARTS)
def test_without_a_seed_the_order_follows_keras_random_seed(contestant):
    first, second = (Observed(contestant, 9, seed=None).epochs(batch_size=BATCH) for _ in range(2))
    assert_same(first, second, tolerance=0)


class Noisy(keras.layers.Layer):
    def call(self, x, training=False):
        return x + keras.random.normal((4,)) if training else x


class NoisyInACondition(keras.layers.Layer):
    def call(self, x, training=False):
        return tf.cond(tf.reduce_sum(x) < 1e9, lambda: x + keras.random.normal((4,)), lambda: x) if training else x


DRAWING = {"nothing": keras.layers.Identity, "a number": Noisy, "a number in a condition": NoisyInACondition}


@pytest.mark.sampled(1)
@contestants.among(contestants.FEW)
@pytest.mark.parametrize("drawing", DRAWING)
def test_what_is_drawn_in_and_after_a_training_is_what_stock_keras_draws(drawing, contestant, same_as_stock):
    """Keras makes the generator for draws without a seed at the first of them, with a number of Python's `random`."""
    if contestant[0].startswith("parameter_server") and drawing != "nothing":
        pytest.skip("workers draw from a generator that servers hold")

    def run(contestant):
        keras.backend.clear_session(free_memory=False)
        strategy = start(contestant)
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), DRAWING[drawing](), layers.Dense(1)])
            model.compile("sgd", "mse", jit_compile=False)
        x = np.random.default_rng(0).normal(size=(19, 4)).astype("float32")
        history = strategy.fit(model, x, x[:, :1], batch_size=BATCH, shuffle=False, verbose=0).history
        return history, model.get_weights(), random.random(), float(keras.random.uniform(())), layers.Dense(2)(x)

    same_as_stock(run)
