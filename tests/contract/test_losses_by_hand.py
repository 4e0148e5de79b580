"""Point 2, for what a step computes by hand: sums and means over examples and other axes, and what several examples
make together. What cannot be computed of all examples is told."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.contract import contestants
from tests.contract.comparison import start

REPLICAS = contestants.OF_THE_JOB | {"mirrored": (3,), "custom": (2,)}


class ByHand(keras.Model):
    """Differentiates, and returns in its logs, what `loss` makes of the squared errors, `[n, steps]`."""

    def __init__(self, loss):
        super().__init__()
        self.net = keras.Sequential([layers.Embedding(7, 4), layers.Dense(3, activation="tanh"), layers.Dense(1)])
        self._loss_by_hand = loss

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self._loss_by_hand(tf.square(self.net(x)[..., 0] - y))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"by hand": loss if loss.shape.rank == 0 else 0.0}


def sequences():
    """Batches of 6, 6 and 5 examples whose numbers of steps differ from batch to batch."""
    batches = [(6, 3), (6, 5), (5, 4)]

    def each():
        rng = np.random.default_rng(0)
        for shape in batches:
            yield rng.integers(0, 7, shape).astype("int32"), rng.normal(size=shape).astype("float32")

    signature = (tf.TensorSpec([None, None], tf.int32), tf.TensorSpec([None, None], tf.float32))
    return tf.data.Dataset.from_generator(each, output_signature=signature).apply(
        tf.data.experimental.assert_cardinality(len(batches))
    )


def number(length):
    return tf.cast(length, tf.float32)


LOSSES = {
    "summed over steps": lambda e: 0.1 * tf.reduce_mean(tf.reduce_sum(e, axis=1)),
    "summed over steps, which come first": lambda e: 0.1 * tf.reduce_mean(tf.reduce_sum(tf.transpose(e), axis=0)),
    "summed over all": lambda e: 0.01 * tf.reduce_sum(e),
    "summed, divided by the number of steps": lambda e: 0.1 * tf.reduce_sum(e) / number(tf.shape(e)[1]),
    "summed, divided by the number of examples": lambda e: 0.1 * tf.reduce_sum(e) / number(tf.shape(e)[0]),
    "summed, divided by both": lambda e: tf.reduce_sum(e) / number(tf.shape(e)[0] * tf.shape(e)[1]),
    "divided by one less than the number of examples": lambda e: 0.1 * tf.reduce_sum(e) / number(tf.shape(e)[0] - 1),
    "multiplied by the number of examples": lambda e: 0.01 * tf.reduce_mean(e) * number(tf.shape(e)[0]) ** 2,
    "of a mean at each step": lambda e: 0.1 * tf.reduce_sum(tf.reduce_mean(e, axis=0)),
    "of all in one row": lambda e: tf.reduce_mean(tf.reshape(e, [-1])),
    "of the last step": lambda e: tf.reduce_sum(e[:, -1]),
    "a mean at each step, which the tape sums": lambda e: 0.1 * tf.reduce_mean(e, axis=0),
    "a sum at each step, which the tape sums": lambda e: 0.02 * tf.reduce_sum(e, axis=0),
    "each error, which the tape sums": lambda e: 0.01 * e,
    "a mean over the steps of a mask": lambda e: tf.reduce_sum(e * number(e > 0.2)) / tf.reduce_sum(number(e > 0.2)),
    "a mean over chosen steps": lambda e: tf.reduce_mean(tf.boolean_mask(e, e > 0.2)),
    "summed over all that were gathered": lambda e: 0.01 * tf.reduce_sum(tfdist.gather(e)),
    "summed over the replicas": lambda e: 0.01 * tfdist.all_reduce(tf.reduce_sum(e)),
}


@pytest.mark.sampled(1)
@contestants.among(REPLICAS)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_by_hand_is_that_of_one_device(name, same_as_stock):
    def trained(contestant):
        strategy = start(contestant)
        with strategy.scope():
            model = ByHand(LOSSES[name])
            model.compile(keras.optimizers.SGD(0.1), jit_compile=False)
        history = strategy.fit(model, sequences(), epochs=2, verbose=0).history
        return {"history": history, "weights": model.get_weights()}

    same_as_stock(trained)


def cross_entropy(logits, labels):
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))


def simclr(net, x, y):
    """Both views in one forward pass, as its code is usually written."""
    one, other = tf.split(tf.math.l2_normalize(net(tf.concat([x, x + 0.1], 0)), 1), 2)
    return cross_entropy(5.0 * one @ tf.transpose(other), tf.range(tf.shape(x)[0]))


def simclr_with_negatives_of_both_views(net, x, y):
    n = tf.shape(x)[0]
    outputs = tf.math.l2_normalize(net(tf.concat([x, x + 0.1], 0)), 1)
    logits = outputs @ tf.transpose(outputs) - 1e9 * tf.eye(2 * n)
    return cross_entropy(logits, tf.concat([tf.range(n, 2 * n), tf.range(n)], 0))


def clip(net, x, y):
    n = tf.shape(x)[0]
    both = net(tf.concat([x, x + 0.1], 0))
    logits = tf.exp(net.temperature) * both[:n] @ tf.transpose(both[n:])
    return cross_entropy(logits, tf.range(n)) + cross_entropy(tf.transpose(logits), tf.range(n))


def vicreg(net, x, y):
    outputs = net(x)
    centred = outputs - tf.reduce_mean(outputs, 0)
    covariance = tf.transpose(centred) @ centred / tf.cast(tf.shape(x)[0] - 1, tf.float32)
    spread = tf.sqrt(tf.math.reduce_variance(outputs, 0) + 1e-4)
    return tf.reduce_mean(tf.nn.relu(1.0 - spread)) + tf.reduce_sum(tf.square(covariance))


def hardest_triplets(net, x, y):
    outputs, labels = net(x), y[:, 0] > 0
    distances = tf.reduce_sum(tf.square(outputs[:, None] - outputs[None]), -1)
    same = labels[:, None] == labels[None]
    positive = tf.reduce_max(tf.where(same, distances, 0.0), 1)
    negative = tf.reduce_min(tf.where(same, 1e9, distances), 1)
    return tf.reduce_mean(tf.maximum(positive - negative + 1.0, 0.0))


def cox(net, x, y):
    """The partial likelihood of survival analysis: examples in the order of their times."""
    risk = tf.gather(net(x)[:, 0], tf.argsort(-y[:, 0]))
    return -tf.reduce_mean(risk - tf.math.log(tf.cumsum(tf.exp(risk))))


def class_weights(net, x, y):
    labels = tf.cast(y[:, 0] > 0, tf.int32)
    weights = 1.0 / (1.0 + tf.reduce_sum(tf.one_hot(labels, 2), 0))
    return tf.reduce_mean(errors(net, x, y) * tf.gather(weights, labels))


def errors(net, x, y):
    return tf.reduce_sum(tf.square(net(x) - y), 1)


def masked(net, x, y):
    mask = tf.cast(y[:, 0] > 0, tf.float32)
    return tf.reduce_sum(errors(net, x, y) * mask) / tf.maximum(tf.reduce_sum(mask), 1.0)


TOGETHER = {
    "a root of a mean": lambda *given: tf.sqrt(tf.reduce_mean(errors(*given))),
    "a mean over what a mask leaves": masked,
    "a mean over those chosen": lambda net, x, y: tf.reduce_mean(tf.boolean_mask(errors(net, x, y), y[:, 0] > 0)),
    "the largest": lambda *given: tf.reduce_max(errors(*given)),
    "a product of means": lambda *given: tf.reduce_mean(errors(*given)) * tf.reduce_mean(given[0](given[1])),
    "a weight by the largest": lambda *given: errors(*given) / (1.0 + tf.reduce_max(errors(*given))),
    "weights by the counts of classes": class_weights,
    "products by tensordot": lambda net, x, y: tf.reduce_sum(tf.tensordot(net(x), net(x), [[0], [0]]) ** 2) * 1e-3,
    "products by einsum": lambda net, x, y: tf.reduce_mean(tf.einsum("ni,mi->nm", net(x), net(x)) ** 2),
    "SimCLR": simclr,
    "SimCLR, negatives of both views": simclr_with_negatives_of_both_views,
    "CLIP": clip,
    "VICReg": vicreg,
    "the hardest triplets": hardest_triplets,
    "a likelihood of those at risk": cox,
}


class Together(keras.Model):
    """Differentiates, and returns in its logs, what `loss` makes of all examples."""

    compiled_loss = None

    def __init__(self, loss):
        super().__init__()
        self.net = keras.Sequential([keras.Input((4,)), layers.Dense(5, activation="tanh"), layers.Dense(3)])
        self.net.temperature = self.add_weight(shape=(), initializer="ones", name="temperature")
        self._loss_by_hand = loss

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self._loss_by_hand(self.net, x, y)
        found = zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True)
        self.optimizer.apply_gradients([(gradient, weight) for gradient, weight in found if gradient is not None])
        return {"by hand": tf.reduce_sum(loss)}


_rng = np.random.default_rng(0)
X = _rng.normal(size=(20, 4)).astype("float32")
Y = _rng.normal(size=(20, 3)).astype("float32")


def trained(contestant, make, epochs=2):
    strategy = start(contestant)
    with strategy.scope():
        model = make()
        model.compile(keras.optimizers.SGD(0.05), loss=model.compiled_loss, jit_compile=False)
    history = strategy.fit(model, X, Y, batch_size=6, epochs=epochs, shuffle=False, verbose=0).history
    return {"history": history, "weights": model.get_weights()}


@pytest.mark.thorough
@contestants.among(REPLICAS)
@pytest.mark.parametrize("name", TOGETHER)
def test_what_several_examples_make_together_is_made_of_all_of_them(name, same_as_stock):
    same_as_stock(lambda contestant: trained(contestant, lambda: Together(TOGETHER[name])))


class Averages(Together):
    """Keeps sums over the batch, their number, and the spread of the outputs, as a codebook and its like do."""

    def __init__(self):
        super().__init__(lambda *given: tf.reduce_mean(errors(*given)))
        self.sums = self.add_weight(shape=(3,), initializer="ones", trainable=False, name="sums")
        self.spread = self.add_weight(shape=(3,), initializer="ones", trainable=False, name="spread")
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False, name="seen")
        self.mean = tf.Variable([0.0, 0.0, 0.0], trainable=False)
        self.number = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="number")
        self.positive = tf.Variable([0, 0, 0], dtype=tf.int64, trainable=False)
        self.counts = [keras.metrics.Sum(name) for name in ("steps", "examples", "errors", "roots")]

    def train_step(self, data):
        outputs = self.net(data[0])
        self.sums.assign(0.9 * self.sums + 0.1 * tf.reduce_sum(outputs, 0))
        self.spread.assign(0.9 * self.spread + 0.1 * tf.math.reduce_std(outputs, 0))
        self.seen.assign_add(tf.cast(tf.shape(outputs)[0], tf.float32))
        self.number.assign_add(tf.shape(outputs)[0])
        self.positive.assign_add(tf.reduce_sum(tf.cast(outputs > 0, tf.int64), 0))
        self.mean.assign(tf.reduce_sum(outputs, 0) / tf.reduce_sum(tf.abs(outputs)))
        mean = tf.reduce_mean(outputs**2)
        for count, value in zip(self.counts, (1, tf.shape(outputs)[0], mean, tf.sqrt(mean)), strict=True):
            count.update_state(value)
        found = {"root": tf.sqrt(mean), "spread": self.spread[0], "largest": tf.reduce_max(outputs)}
        return super().train_step(data) | found | {count.name: count.result() for count in self.counts}


@pytest.mark.thorough
@contestants.among(REPLICAS)
def test_what_a_step_keeps_and_returns_of_the_batch_is_of_all_examples(same_as_stock):
    def run(contestant):
        made = []
        found = trained(contestant, lambda: made.append(Averages()) or made[0])
        return found | {"mean": made[0].mean.numpy(), "positive": made[0].positive.numpy()}

    same_as_stock(run)


class OwnNormalization(layers.Layer):
    def call(self, x):
        return (x - tf.reduce_mean(x, 0)) / tf.math.reduce_std(x, 0)


class Normalized(Together):
    def __init__(self, normalization):
        super().__init__(lambda *given: tf.reduce_mean(errors(*given)))
        self.net = keras.Sequential([keras.Input((4,)), layers.Dense(5), normalization, layers.Dense(3)])


class Compiled(Normalized):
    """Trained with Keras' own step."""

    compiled_loss = "mse"

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        return keras.Model.train_step(self, data)


@pytest.mark.thorough
@contestants.among(REPLICAS)
@pytest.mark.parametrize("model", [Normalized, Compiled])
@pytest.mark.parametrize("layer", [OwnNormalization, layers.BatchNormalization])
def test_a_layer_that_normalizes_by_the_batch_is_that_of_one_device(model, layer, contestant, same_as_stock):
    same_as_stock(lambda one: trained(one, lambda: model(layer()), epochs=1))


@pytest.mark.sampled(1)
@contestants.among({"custom": (2,), "mirrored": (2,)})
@pytest.mark.parametrize("model", [Normalized, Compiled])
def test_there_is_nothing_to_warn_of_where_the_step_is_that_of_one_device(model, contestant):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="A step computes")
        trained(contestant, lambda: model(OwnNormalization()), epochs=1)
