"""Point 2, for steps, losses and metrics that users write: what a step does to variables, in its order, and what it
computes of a whole batch, is what one device does and computes. Where that cannot be, a sentence says so."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfdist
from tests.contract import contestants
from tests.contract.comparison import start
from tfdist.internals import tensorflow_variables

# Halves with one copy of the variables, thirds with a copy each.
REPLICAS = contestants.OF_THE_JOB | {"mirrored": (3,), "custom": (2,), "stock_mirrored": (2,)}
ONE_TOO = REPLICAS | {"single": (1,)}
EXAMPLES, BATCH = 19, 8  # the last batch has three
_rng = np.random.default_rng(0)
X = _rng.normal(size=(EXAMPLES, 4)).astype("float32")
Y = _rng.normal(size=(EXAMPLES, 1)).astype("float32")
TOKENS = _rng.integers(0, 11, (EXAMPLES, 7)).astype("int32")


class Regression(keras.Model):
    """A step of its own, in the pieces that the cases put together anew."""

    def __init__(self):
        super().__init__()
        self.net = keras.Sequential([keras.Input((4,)), layers.Dense(3, activation="tanh"), layers.Dense(1)])
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.loss_tracker]

    @property
    def kernel(self):
        return self.net.layers[0].kernel

    def call(self, x):
        return self.net(x)

    def gradients(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(self.net(x) - y))
        return loss, tape.gradient(loss, self.net.trainable_variables)

    def update(self, gradients):
        self.optimizer.apply_gradients(zip(gradients, self.net.trainable_variables, strict=True))

    def logs(self, loss):
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def train_step(self, data):
        loss, gradients = self.gradients(data)
        self.update(gradients)
        return self.logs(loss)


class DecayBeforeUpdate(Regression):
    def train_step(self, data):
        loss, gradients = self.gradients(data)
        for weight in self.net.trainable_variables:
            weight.assign(weight * 0.99)
        self.update(gradients)
        return self.logs(loss)


class RateBeforeUpdate(Regression):
    def train_step(self, data):
        loss, gradients = self.gradients(data)
        self.optimizer.learning_rate.assign(0.3 / (1.0 + ops.cast(self.optimizer.iterations, "float32")))
        self.update(gradients)
        return self.logs(loss)


class CriticSteps(Regression):
    """WGAN's: several updates per batch, the weights clipped after each."""

    def train_step(self, data):
        for _ in range(3):
            loss, gradients = self.gradients(data)
            self.update(gradients)
            for weight in self.net.trainable_variables:
                weight.assign(ops.clip(weight, -0.3, 0.3))
        return self.logs(loss)


class NormedWeights(Regression):
    def train_step(self, data):
        self.kernel.assign(self.kernel / ops.norm(self.kernel))
        return super().train_step(data)


class Pruned(Regression):
    def train_step(self, data):
        logs = super().train_step(data)
        self.kernel.assign(self.kernel * ops.cast(ops.abs(self.kernel) > 0.2, "float32"))
        return logs


class SharpnessAware(Regression):
    """SAM: the weights are moved along the gradient, and put back."""

    def train_step(self, data):
        loss, gradients = self.gradients(data)
        norm = tf.linalg.global_norm(gradients)
        for weight, gradient in zip(self.net.trainable_variables, gradients, strict=True):
            weight.assign_add(0.05 * gradient / norm)
        _, moved = self.gradients(data)
        for weight, gradient in zip(self.net.trainable_variables, gradients, strict=True):
            weight.assign_sub(0.05 * gradient / norm)
        self.update(moved)
        return self.logs(loss)


class ClippedByNorm(Regression):
    def train_step(self, data):
        loss, gradients = self.gradients(data)
        self.update(tf.clip_by_global_norm(gradients, 0.1)[0])
        return self.logs(loss)


class WithoutOptimizer(Regression):
    def train_step(self, data):
        loss, gradients = self.gradients(data)
        for weight, gradient in zip(self.net.trainable_variables, gradients, strict=True):
            weight.assign_sub(0.1 * gradient)
        return self.logs(loss)


class LossesPerExample(Regression):
    """As the siamese network of keras.io: a tape differentiates the sum of what it is given."""

    def gradients(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.square(self.net(x) - y)[:, 0] / BATCH
        return loss, tape.gradient(loss, self.net.trainable_variables)


class SumOverBatchSize(Regression):
    """As TensorFlow's tutorials of distribution: a sum over the examples, divided by the size of the global batch."""

    def gradients(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            losses = ops.square(self.net(x) - y)[:, 0]
            loss = ops.sum(losses) / BATCH + 0.01 * tf.nn.l2_loss(self.kernel)
            loss = self.optimizer.scale_loss(loss)
        return loss, tape.gradient(loss, self.net.trainable_variables)


class SumOverItsOwnLength(Regression):
    def gradients(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            losses = ops.square(self.net(x) - y)
            loss = ops.sum(losses) / ops.cast(ops.size(losses), "float32") + ops.sum(
                losses / ops.cast(ops.shape(x)[0], "float32")
            )
        return loss, tape.gradient(loss, self.net.trainable_variables)


class SumOfExamples(Regression):
    """Returned as it is, and not by a metric."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            error = tf.reduce_sum(tf.square(self.net(x) - y)) * 0.02
            loss = error + ops.mean(ops.abs(self.net(x)))
        self.update(tape.gradient(loss, self.net.trainable_variables))
        return {"loss": loss, "error": error}


class SummedPenalty(layers.Layer):
    def call(self, x):
        self.add_loss(0.01 * ops.sum(ops.square(x)))
        return x


class GradientOfGradient(Regression):
    """One step of MAML: the update of a copy of the weights is differentiated."""

    def gradients(self, data):
        x, y = data
        kernel, bias, *rest = self.net.trainable_variables
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = ops.mean(ops.square(self.net(x) - y))
            moved = kernel - 0.1 * inner.gradient(loss, kernel)
            hidden = ops.tanh(x @ moved + bias)
            loss = ops.mean(ops.square(hidden @ rest[0] + rest[1] - y))
        return loss, outer.gradient(loss, self.net.trainable_variables)


class InAFunction(Regression):
    """As TensorFlow's tutorials write it."""

    @tf.function
    def helper(self, data):
        loss, gradients = self.gradients(data)
        if tf.reduce_sum(data[0]) > 1e9:  # AutoGraph's
            loss = loss + 1.0
        self.update(gradients)
        return loss

    @tf.function
    def train_step(self, data):
        return self.logs(self.helper(data))


class TensorFlowVariables(Regression):
    def __init__(self):
        super().__init__()
        self.first = tf.Variable(0.0, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
        self.total = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)
        self.mean = tf.Variable(0.0, aggregation=tf.VariableAggregation.MEAN)
        self.seen = self.add_weight(shape=(3,), initializer="zeros", trainable=False, name="seen")

    def train_step(self, data):
        logs = super().train_step(data)
        self.first.assign_add(1.0)
        self.total.assign_add(tf.reduce_sum(data[0]))
        self.mean.assign(0.9 * self.mean + 0.1 * tf.reduce_mean(data[0]))
        self.seen.assign(tf.stack([self.first, self.total, self.mean]))
        return logs


class Contrastive(Regression):
    """SimCLR's loss: each example against all others of the batch."""

    def gradients(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            one, other = (tfdist.gather(self.net.layers[0](view)) for view in (x, x + 0.1))
            loss = ops.mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(one)[0]), one @ tf.transpose(other))
            )
        return loss, [g for g in tape.gradient(loss, self.net.trainable_variables) if g is not None]

    def update(self, gradients):
        self.optimizer.apply(gradients, self.net.trainable_variables[: len(gradients)])


class RaggedAndSparse(Regression):
    """A loss over the whole batch of what is neither of one length nor dense."""

    def gradients(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            outputs = self.net(x)
            lengths = 1 + ops.cast(x[:, 0] > 0, "int32")
            ragged = tfdist.gather(tf.RaggedTensor.from_row_lengths(tf.repeat(outputs[:, 0], lengths), lengths))
            rows = tf.range(tf.shape(x)[0], dtype=tf.int64)
            indices = tf.stack([rows, ops.cast(x[:, 1] > 0, "int64")], axis=1)
            shape = tf.stack([tf.shape(x, tf.int64)[0], 2])
            sparse = tfdist.gather(tf.SparseTensor(indices, outputs[:, 0], shape))
            loss = tf.math.reduce_std(ragged.to_tensor()) + tf.math.reduce_std(tf.sparse.to_dense(sparse), axis=0)[0]
        return loss, tape.gradient(loss, self.net.trainable_variables)


class Codebook(Regression):
    """Sums over the batch that one device keeps averages of, as vector quantization does."""

    def __init__(self):
        super().__init__()
        self.sums = self.add_weight(shape=(4,), initializer="ones", trainable=False, name="sums")
        self.count = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="count")

    def train_step(self, data):
        total = tfdist.all_reduce(ops.sum(ops.square(data[0]), axis=0))
        self.sums.assign(0.9 * self.sums + 0.1 * total)
        self.count.assign_add(tfdist.all_reduce(tf.shape(data[0])[0]))
        return super().train_step(data)


class Normalizing(keras.optimizers.SGD):
    def apply(self, grads, trainable_variables=None):
        norm = tf.linalg.global_norm(grads)
        return super().apply([gradient / norm for gradient in grads], trainable_variables)


def adam():
    return keras.optimizers.Adam(0.05)


def decaying():
    return keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.3, 1, 0.7))


STEPS = {
    "decay by hand before the update": (DecayBeforeUpdate, None),
    "a rate that is set before the update": (RateBeforeUpdate, None),
    "weights clipped after each of several updates": (CriticSteps, None),
    "several updates of Adam": (CriticSteps, adam),
    "several updates of a schedule": (CriticSteps, decaying),
    "weights normalized before the forward pass": (NormedWeights, None),
    "weights pruned after the update": (Pruned, None),
    "sharpness-aware minimization": (SharpnessAware, None),
    "gradients clipped by their norm": (ClippedByNorm, None),
    "an optimizer that normalizes gradients": (Regression, lambda: Normalizing(0.1)),
    "weights updated by hand": (WithoutOptimizer, None),
    "a loss per example": (LossesPerExample, None),
    "a loss summed over the examples": (SumOverBatchSize, None),
    "a scaled loss summed over the examples": (
        SumOverBatchSize,
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0),
    ),
    "a loss divided by its own length": (SumOverItsOwnLength, None),
    "sums and means in the logs": (SumOfExamples, None),
    "a gradient of a gradient": (GradientOfGradient, None),
    "steps in functions of TensorFlow": (InAFunction, adam),
    "variables of TensorFlow": (TensorFlowVariables, None),
    "a loss over pairs": (Contrastive, None),
    "a loss over what is ragged and sparse": (RaggedAndSparse, None),
    "sums over the batch": (Codebook, None),
}


def trained(contestant, make, x=X, y=Y, optimizer=None, **fit):
    strategy = start(contestant)
    with strategy.scope():
        model = make()
        if not model.compiled:
            model.build((None, 4))
            chosen = (optimizer or (lambda: keras.optimizers.SGD(0.1)))()
            chosen.build(model.trainable_variables)
            model.compile(chosen, jit_compile=False)
    fit = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0} | fit
    history = strategy.fit(model, x, y, **fit).history
    return {"history": history, "weights": model.get_weights()}


@pytest.mark.sampled(7)
@contestants.among(ONE_TOO)
@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_the_users_own_does_what_it_does_on_one_device(name, same_as_stock):
    make, optimizer = STEPS[name]
    same_as_stock(lambda contestant: trained(contestant, make, optimizer=optimizer))


@contestants.among({"mirrored": (2,)})
@pytest.mark.parametrize("makes", ["weights", "slots"])
def test_each_replica_updates_its_copy_of_variables_that_a_function_of_tensorflow_has_made(makes, contestant):
    strategy = start(contestant)
    with strategy.scope():
        model = keras.Sequential([layers.Dense(3), layers.Dense(1)]) if makes == "weights" else InAFunction()
        tf.function(model)(X) if makes == "weights" else model.build((None, 4))
        model.compile(keras.optimizers.Adam(0.1), "mse", jit_compile=False)
    strategy.fit(model, X, Y, batch_size=BATCH, verbose=0)
    for variable in [*model.trainable_variables, *model.optimizer.variables]:
        first, second = (copy.numpy() for copy in tensorflow_variables.copies(variable))
        np.testing.assert_array_equal(first, second)


class TokensAndPositions(layers.Layer):
    def __init__(self, shared):
        super().__init__()
        self.tokens = layers.Embedding(11, 4)
        self.positions = self.tokens if shared else layers.Embedding(7, 4)

    def call(self, x):
        return self.tokens(x) + self.positions(ops.arange(ops.shape(x)[1]))


class PositionsOfExamples(TokensAndPositions):
    """Each example has its own list of positions, so that rows come once per example."""

    def call(self, x):
        return self.tokens(x) + self.positions(ops.cumsum(ops.ones_like(x), -1) - 1)


def compiled(model, optimizer="sgd", loss="mse", **options):
    # XLA would only make stock Keras slower to start.
    model.compile(optimizer, loss, **{"jit_compile": False} | options)
    return model


@pytest.mark.thorough
@pytest.mark.parametrize("optimizer", [adam, lambda: keras.optimizers.Adagrad(0.1)], ids=["adam", "adagrad"])
@pytest.mark.parametrize(
    "lookup",
    [lambda: TokensAndPositions(False), lambda: TokensAndPositions(True), lambda: PositionsOfExamples(False)],
    ids=["a table of its own", "the table of the tokens", "positions of each example"],
)
def test_what_is_looked_up_by_position_is_updated_as_on_one_device(lookup, optimizer, same_as_stock):
    def make():
        stack = [keras.Input((7,), dtype="int32"), lookup(), layers.GlobalAveragePooling1D(), layers.Dense(1)]
        return compiled(keras.Sequential(stack), optimizer())

    same_as_stock(lambda contestant: trained(contestant, make, TOKENS))


@pytest.mark.thorough
def test_a_penalty_summed_over_the_batch_is_that_of_one_device(same_as_stock):
    def make():
        stack = [keras.Input((4,)), layers.Dense(3), SummedPenalty(), layers.Dense(1, activity_regularizer="l2")]
        return compiled(keras.Sequential(stack))

    for examples in (16, EXAMPLES):  # batches of one size, and a remainder
        same_as_stock(lambda contestant, n=examples: trained(contestant, make, X[:n], Y[:n]))


@pytest.mark.sampled(1)
def test_a_normalized_layer_trains_as_on_one_device(same_as_stock):
    def make():
        layer = layers.SpectralNormalization(layers.Dense(8, activation="tanh"))
        return compiled(keras.Sequential([keras.Input((4,)), layer, layers.Dense(1)]), keras.optimizers.SGD(0.5))

    same_as_stock(lambda contestant: trained(contestant, make))


class LargestError(keras.metrics.Metric):
    start = 0.0

    def __init__(self):
        super().__init__(name="largest")
        self.largest = self.add_variable((), keras.initializers.Constant(self.start), name="largest")

    def update_state(self, y, p, sample_weight=None):
        self.largest.assign(ops.maximum(self.largest, ops.max(ops.abs(y - p))))

    def result(self):
        return self.largest + 0.0  # of the variable itself Keras would log what it holds after the validation


class SmallestError(LargestError):
    start = 100.0

    def update_state(self, y, p, sample_weight=None):
        self.largest.assign(ops.minimum(self.largest, ops.min(ops.abs(y - p))))

    def reset_state(self):
        self.largest.assign(self.start)


class MeanOfBatchMeans(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="of_means")
        self.total = self.add_variable((), "zeros", name="total")
        self.batches = self.add_variable((), "zeros", name="batches")

    def update_state(self, y, p, sample_weight=None):
        self.total.assign_add(ops.mean(ops.abs(y - p)))
        self.batches.assign_add(1.0)

    def result(self):
        return self.total / self.batches


class Additive(MeanOfBatchMeans):
    additive = True

    def update_state(self, y, p, sample_weight=None):
        self.total.assign_add(ops.sum(ops.abs(y - p)))
        self.batches.assign_add(ops.cast(ops.size(y), "float32"))


def largest(y, p):
    return ops.max(ops.abs(y - p))


def per_example(y, p):
    return ops.abs(y - p)[:, 0]


@pytest.mark.thorough
@contestants.among(ONE_TOO)
@pytest.mark.parametrize("metric", [LargestError, SmallestError, MeanOfBatchMeans, Additive, None])
def test_a_metric_of_the_users_own_says_what_it_says_on_one_device(metric, contestant, same_as_stock):
    def make():
        metrics = [metric()] if metric else [largest, per_example]
        return compiled(keras.Sequential([keras.Input((4,)), layers.Dense(1)]), metrics=metrics)

    def both(contestant):
        strategy = start(contestant)
        with strategy.scope():
            model = make()
        # A last batch of one example leaves the other replicas none.
        fit = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0}
        history = strategy.fit(model, X[:17], Y[:17], **fit, validation_data=(X, Y)).history
        return history, strategy.evaluate(model, X, Y, batch_size=2, verbose=0)

    same_as_stock(both)


class StepOfTheGuide(keras.Model):
    """Keras' guide on `fit`: a step that returns the results of all metrics, those of `compile` under one name."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


@pytest.mark.sampled(1)
@contestants.among(ONE_TOO)
def test_a_step_that_returns_all_results_returns_those_of_all_replicas(same_as_stock):
    def make():
        inputs = keras.Input((4,))
        return compiled(StepOfTheGuide(inputs, layers.Dense(1)(inputs)), metrics=["mae"])

    same_as_stock(lambda contestant: trained(contestant, make))


def dice_by_hand(y, p):
    return 1 - (2 * ops.sum(y * p) + 1) / (ops.sum(y) + ops.sum(p) + 1)


class DiceByHand(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return dice_by_hand(y_true, y_pred)


LOSSES = {
    "dice": keras.losses.Dice,
    "dice of each channel": lambda: keras.losses.Dice(axis=(0,)),
    "tversky": lambda: keras.losses.Tversky(alpha=0.3, beta=0.7),
    "circle": keras.losses.Circle,
    "a function": lambda: dice_by_hand,
    "a class": DiceByHand,
    "by name": lambda: "dice",
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_the_whole_batch_is_that_of_one_device(name, same_as_stock):
    x, y = X[:17], (X[:17, :3] > 0).astype("float32")  # a last batch of one example
    if name == "circle":
        x, y = X[:16], np.arange(16) % 3

    def make():
        model = keras.Sequential([keras.Input((4,)), layers.Dense(3, activation="sigmoid")])
        return compiled(model, keras.optimizers.SGD(0.5), LOSSES[name]())

    same_as_stock(lambda contestant: trained(contestant, make, x, y))


def root_mean_square(y_true, y_pred):
    return ops.sqrt(ops.mean(ops.square(y_true - y_pred)))


@pytest.mark.thorough
@pytest.mark.parametrize("weighted", [False, True])
def test_each_of_several_losses_of_the_whole_batch_is_that_of_one_device(weighted, same_as_stock):
    """What the first of them asks of the other replicas does not answer for the second."""
    x, y = X[:17], {"one": Y[:17], "other": -2 * Y[:17]}
    weights = {name: 0.5 + np.arange(17) % 3 for name in y} if weighted else None

    def make():
        inputs = keras.Input((4,))
        hidden = layers.Dense(3, activation="tanh")(inputs)
        model = keras.Model(inputs, {name: layers.Dense(1, name=name)(hidden) for name in y})
        return compiled(model, keras.optimizers.SGD(0.1), dict.fromkeys(y, root_mean_square))

    same_as_stock(lambda contestant: trained(contestant, make, x, y, sample_weight=weights))


PICTURES = np.random.default_rng(1).normal(size=(5, 8, 8, 1)).astype("float32")
STACKS = {
    "convolutions": ((8, 8, 1), lambda: [layers.Conv2D(2, 3), layers.MaxPooling2D(), layers.Conv2D(2, 2)]),
    "transposed": ((8, 8, 1), lambda: [layers.Conv2DTranspose(2, 3, strides=2), layers.GlobalAveragePooling2D()]),
    "recurrent": ((8, 8), lambda: [layers.Bidirectional(layers.LSTM(2))]),
    "normalized": ((8, 8, 1), lambda: [layers.BatchNormalization(synchronized=True), layers.GroupNormalization(1)]),
    "map": ((8, 8), lambda: [layers.Lambda(lambda x: tf.map_fn(lambda row: row * 2, x))]),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", STACKS)
def test_no_model_sees_an_empty_batch(name, same_as_stock):
    shape, stack = STACKS[name]
    x = PICTURES.reshape(-1, *shape)
    y = np.ones((len(x), 1), "float32")

    def run(contestant):
        strategy = start(contestant)
        with strategy.scope():
            model = compiled(keras.Sequential([keras.Input(shape), *stack(), layers.Flatten(), layers.Dense(1)]))
        predicted = strategy.predict(model, x, batch_size=1, verbose=0)
        scores = strategy.evaluate(model, x, y, batch_size=1, verbose=0)
        loss = strategy.fit(model, x, y, batch_size=2, shuffle=False, verbose=0).history["loss"]
        return predicted, scores, loss, model.get_weights()

    same_as_stock(run, tolerance=2e-4)


@pytest.mark.sampled(1)
def test_a_part_without_examples_never_counts_not_even_its_nan(contestant):
    class SpreadOfBatch(Regression):
        def gradients(self, data):
            x, y = data
            with tf.GradientTape() as tape:  # of one example alone the derivative of the square root is infinite
                spread = tf.math.reduce_std(tfdist.gather(self.net(x))) + tf.math.reduce_std(self.net(x) * 0.0)
                loss = ops.mean(ops.square(self.net(x) - y)) + 0.0 * spread
            return loss, tape.gradient(loss, self.net.trainable_variables)

    found = trained(contestant, SpreadOfBatch, X[:16], Y[:16], batch_size=8)
    assert np.isfinite(found["history"]["loss"]).all() or contestant[1] == 1


class Noise(keras.Model):
    """Draws for each example, for all of them alike, and without a seed of its own."""

    def __init__(self):
        super().__init__()
        self.drop = layers.Dropout(0.5, seed=3)
        self.generator = keras.random.SeedGenerator(1)

    def call(self, x):
        rows = ops.shape(x)[0]
        return {
            "dropout": self.drop(x, training=True),
            "drawn": keras.random.normal((rows, 50), seed=self.generator),
            "unseeded": keras.random.uniform(tf.shape(x)),
            "tensorflow": tf.random.normal((rows, 50)),
            "alike": keras.random.normal((1, 50), seed=5) + 0 * x,
        }


@pytest.mark.sampled(1)
@contestants.among(contestants.FEW)
def test_what_is_drawn_for_examples_is_drawn_for_each_and_repeatable(contestant):
    def draw():
        strategy = start(contestant)
        with strategy.scope():
            model = Noise()
        return strategy.predict(model, np.ones((6, 50), "float32"), batch_size=6, verbose=0)

    found, again = draw(), draw()
    alike = found.pop("alike")
    assert (alike == alike[0]).all()
    for name, rows in found.items():
        assert len(np.unique(rows, axis=0)) == 6, name
        if name != "tensorflow":
            np.testing.assert_array_equal(rows, again[name], err_msg=name)


class UpdateInABranch(Regression):
    def train_step(self, data):
        loss, gradients = self.gradients(data)
        tf.cond(tf.math.is_finite(loss), lambda: (self.update(gradients), 0)[1], lambda: 0)
        return self.logs(loss)


class StepsInALoop(Regression):
    def train_step(self, data):
        def body(i):
            loss, gradients = self.gradients(data)
            self.update(gradients)
            self.loss_tracker.update_state(loss)
            return [i + 1]

        tf.while_loop(lambda i: i < 2, body, [tf.constant(0)])
        return {"loss": self.loss_tracker.result()}


class AssignmentInABranch(Regression):
    def train_step(self, data):
        logs = super().train_step(data)
        tf.cond(self.optimizer.iterations % 2 == 0, lambda: (self.kernel.assign(self.kernel * 0.5), 0)[1], lambda: 0)
        return logs


class CountOfExamples(Regression):
    def __init__(self):
        super().__init__()
        self.count = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="count")

    def train_step(self, data):
        self.count.assign_add(tf.reshape(tf.numpy_function(len, [data[0]], tf.int64), []))
        return super().train_step(data)


IN_BRANCHES = [UpdateInABranch, StepsInALoop, AssignmentInABranch, CountOfExamples]


@pytest.mark.sampled(1)
@contestants.among(contestants.FEW)
@pytest.mark.parametrize("make", IN_BRANCHES)
def test_what_a_step_does_in_a_branch_or_a_loop_is_that_of_one_device(make, contestant, same_as_stock):
    if contestant[0] == "stock_mirrored":
        pytest.skip("it refuses updates there")
    with contestants.in_one_stage():
        same_as_stock(lambda one: trained(one, make))


def graphs():
    """Batches of nodes and edges, of which there are not equally many."""
    signature = (
        {name: tf.TensorSpec([None, size]) for name, size in (("nodes", 4), ("edges", 2))},
        tf.TensorSpec([None, 1]),
    )
    sizes = [(8, 5), (8, 8), (5, 12)]
    batches = [({"nodes": X[:nodes], "edges": X[:edges, :2]}, Y[:nodes]) for nodes, edges in sizes]
    return tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature)


def of_graphs():
    inputs = {"nodes": keras.Input((4,), name="nodes"), "edges": keras.Input((2,), name="edges")}
    sent = layers.Lambda(lambda given: given[0] + ops.mean(given[1]), output_shape=(3,))
    return compiled(keras.Model(inputs, layers.Dense(1)(sent([layers.Dense(3)(inputs["nodes"]), inputs["edges"]]))))


@pytest.mark.sampled(1)
@contestants.among({"custom": (2,), "mirrored": (2,), "pipeline": (3,)})
def test_a_batch_whose_tensors_have_different_lengths_trains_as_on_one_device(same_as_stock):
    def run(contestant):
        strategy = start(contestant)
        with strategy.scope():
            model = of_graphs()
        history = strategy.fit(model, graphs(), epochs=2, verbose=0).history
        return {"history": history, "weights": model.get_weights()}

    same_as_stock(run)


@pytest.mark.sampled(1)
@contestants.among({"custom": (2,), "mirrored": (2,), "pipeline": (3,)})
def test_a_model_with_a_fixed_batch_size_is_that_of_one_device(same_as_stock):
    def run(contestant):
        strategy = start(contestant)
        with strategy.scope():
            model = compiled(keras.Sequential([keras.Input(batch_shape=(8, 4)), layers.Dense(3), layers.Dense(1)]))
        history = strategy.fit(model, X[:16], Y[:16], batch_size=8, epochs=2, shuffle=False, verbose=0).history
        return {"history": history, "predicted": strategy.predict(model, X[:16], batch_size=8, verbose=0)}

    same_as_stock(run)
