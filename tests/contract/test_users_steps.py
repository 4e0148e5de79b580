"""Point 2, for training steps as people write them: what they compute of several examples, in any way, is exact.

Each of them differed from one device, without a word, on replicas that compute the step of their part of a batch.
"""

import sys
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tests.contract import contestants
from tests.contract.comparison import start

EXAMPLES, BATCH = 13, 6
_rng = np.random.default_rng(0)
X = _rng.normal(size=(EXAMPLES, 4)).astype("float32")
LABELS = _rng.integers(0, 3, EXAMPLES).astype("int32")

REPLICAS = contestants.OF_THE_JOB | {"single": (1,), "custom": (2, 3), "mirrored": (2,)}


WITH_STREAMS = {"mixed_in_an_order_of_its_own", "dropout_and_statistics_by_hand"}


class Step(keras.Model):
    """A model that is trained on what `loss_of(x, labels)` returns; `after` may assign to variables."""

    def __init__(self):
        super().__init__()
        self.net = keras.Sequential([keras.Input((4,)), layers.Dense(5, activation="tanh"), layers.Dense(3)])
        self.bank = tf.Variable(tf.zeros((EXAMPLES, 3)), trainable=False)
        self.counts = tf.Variable(tf.zeros(3), trainable=False)
        self.accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
        self.mean = keras.metrics.Mean(name="mean")

    def loss_of(self, x, labels):
        return ops.mean(keras.losses.sparse_categorical_crossentropy(labels, self.net(x, training=True), True))

    def after(self, x, labels):
        pass

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(*data)
        variables = self.net.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        self.after(*data)
        self.mean.update_state([loss])
        return {"loss": loss, "mean": self.mean.result(), "accuracy": self.accuracy.result()}


def step(method):
    """A class with `method` as one of its methods."""
    name = "after" if method.__name__.startswith("after") else "loss_of"
    return type(method.__name__, (Step,), {name: method})


@step
def queue(self, x, labels):
    keys = tf.math.l2_normalize(self.net(x), 1)
    loss = tf.reduce_mean(tf.reduce_logsumexp(keys @ tf.transpose(self.bank), 1))
    self.bank.assign(tf.concat([keys, self.bank[: -tf.shape(keys)[0]]], 0))
    return loss


@step
def average_loss_of_tensorflow(self, x, labels):
    per_example = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, self.net(x))
    weights = tf.nn.scale_regularization_loss(tf.nn.l2_loss(self.net.trainable_variables[0]))
    return tf.nn.compute_average_loss(per_example, global_batch_size=BATCH) + 0.01 * weights


@step
def gradients_of_inputs(self, x, labels):
    def loss_of(inputs):
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, self.net(inputs)))

    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = loss_of(x)
    return loss + loss_of(x + 0.3 * tf.stop_gradient(tape.gradient(loss, x)))


@step
def similarities_in_a_metric(self, x, labels):
    left, right = (tf.math.l2_normalize(self.net(one), 1) for one in (x, x[:, ::-1]))
    similarities = tf.matmul(left, right, transpose_b=True) / 0.1
    own = tf.range(tf.shape(similarities)[0])
    self.accuracy.update_state(own, similarities)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(own, similarities))


@step
def two_views_in_one_batch(self, x, labels):
    views = tf.math.l2_normalize(self.net(tf.concat([x, x + keras.random.normal(tf.shape(x), seed=3)], 0)), 1)
    count = tf.shape(x)[0]
    similarities = tf.matmul(views, views, transpose_b=True) - 1e9 * tf.eye(2 * count)
    other = tf.concat([tf.range(count, 2 * count), tf.range(count)], 0)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(other, similarities))


@step
def cox(self, x, labels):
    risk = tf.gather(self.net(x)[:, 0], tf.argsort(x[:, 0]))
    return -tf.reduce_mean(risk - tf.math.cumulative_logsumexp(risk))


@step
def singular_values(self, x, labels):
    outputs = self.net(x)
    products = tf.matmul(outputs, outputs, transpose_a=True) + tf.linalg.diag([0.1, 0.2, 0.3])
    return tf.reduce_sum(tf.linalg.svd(products, compute_uv=False)) + tf.reduce_sum(tf.linalg.qr(products)[1] ** 2)


@step
def dropout_and_statistics_by_hand(self, x, labels):
    hidden = tf.nn.dropout(self.net(x), 0.3, seed=5)
    hidden = (hidden - tf.reduce_mean(hidden, 0)) / (tf.math.reduce_std(hidden, 0) + 1e-3)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, hidden))


@step
def hardest_examples(self, x, labels):
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, self.net(x))
    return tf.reduce_mean(tf.math.top_k(losses, tf.shape(losses)[0] // 2 + 1).values)


@step
def vectorized_over_examples(self, x, labels):
    return tf.reduce_mean(tf.vectorized_map(lambda row: tf.reduce_sum(row[:, None] * row[None]), self.net(x)))


@step
def characters_of_frames(self, x, labels):  # with functions in the manner of TensorFlow 1
    frames = tf.stack([self.net(scale * x) for scale in (1.0, 2.0, -1.0, 0.5)])  # [time, batch, classes]
    lengths = tf.fill(tf.shape(labels), 4)
    losses = tf.nn.ctc_loss(1 + labels[:, None] % 2, frames, tf.ones_like(labels), lengths, blank_index=0)
    return tf.reduce_mean(losses)


@step
def mixed_in_an_order_of_its_own(self, x, labels):
    order = tf.random.shuffle(tf.range(tf.shape(x)[0]), seed=3)
    share = tf.random.uniform((tf.shape(x)[0], 1), seed=4)
    outputs = self.net(share * x + (1 - share) * tf.gather(x, order))
    drawn = tf.cast(tf.random.categorical(outputs, 2, seed=5), tf.float32)
    return tf.reduce_mean(outputs**2 + drawn[:, :1]) + tf.random.normal((), seed=6)


@step
def after_whole_numbers_beside_others(self, x, labels):
    count, total = tf.reduce_sum(labels), tf.reduce_sum(x[:, :3] ** 2, 0)
    self.counts.assign(tf.sqrt(total) * tf.cast(tf.maximum(count, 1), tf.float32))


@step
def two_gradients_of_a_list_that_grows(self, x, labels):
    def listed(rows):
        return tf.while_loop(
            lambda i, rows_so_far: i < tf.shape(x)[0],
            lambda i, rows_so_far: (i + 1, rows_so_far.write(i, tf.tanh(rows[i]))),
            (0, tf.TensorArray(tf.float32, size=0, dynamic_size=True)),
        )[1].stack()

    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        of_list = tf.reduce_mean(listed(self.net(x)) ** 2)
        both = of_list + tf.reduce_mean(x**2)
    return of_list + tf.reduce_mean(tape.gradient(both, x)) + tf.reduce_mean(tape.gradient(of_list, x) ** 2)


@step
def by_numpy(self, x, labels):
    order = tf.ensure_shape(tf.numpy_function(lambda a: np.sort(a, 0), [x], tf.float32), x.shape)
    return tf.reduce_mean(self.net(order) ** 2)


@step
def after_printing_the_loss_alone(self, x, labels):
    tf.print(tf.reduce_mean(self.net(x) ** 2), output_stream="file:///dev/null")
    tf.print(tf.reduce_max(x, 0), output_stream="file:///dev/null")


@step
def after_scatter_of_rows(self, x, labels):
    self.bank.scatter_nd_update(labels[:, None], self.net(x))


@step
def after_scatter_of_differences(self, x, labels):
    centers = tf.gather(self.bank, labels)
    _, index, count = tf.unique_with_counts(labels)
    scale = 1 / (1 + tf.cast(tf.gather(count, index), tf.float32))[:, None]
    self.bank.scatter_sub(tf.IndexedSlices(scale * (centers - self.net(x)), labels))


@step
def after_counts(self, x, labels):
    self.counts.assign_add(tf.math.bincount(labels, minlength=3, maxlength=3, dtype=tf.float32))


@step
def after_statistics_of_classes(self, x, labels):
    self.counts.assign(0.9 * self.counts + 0.1 * tf.math.unsorted_segment_mean(x[:, 0], labels, 3))


@step
def after_the_first_and_the_median(self, x, labels):
    self.counts.assign(tf.stack([x[0, 0], tf.sort(x[:, 0])[tf.shape(x)[0] // 2], tf.reduce_max(x)]))


@step
def after_a_condition_on_the_batch(self, x, labels):
    tf.cond(
        tf.reduce_mean(x) > 0, lambda: self.counts.assign_add([1.0, 0, 0]), lambda: self.counts.assign_add([0.0, 1, 0])
    )


STEPS = [one for one in list(vars(sys.modules[__name__]).values()) if isinstance(one, type) and issubclass(one, Step)][
    1:
]


def trained(contestant, make):
    strategy = start(contestant)
    with strategy.scope():
        model = make()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), jit_compile=False)
    data = tf.data.Dataset.from_tensor_slices((X, LABELS)).batch(BATCH)
    history = strategy.fit(model, data, epochs=2, verbose=0).history
    kept = [tf.convert_to_tensor(one).numpy() for one in (model.bank, model.counts)]
    return {"history": history, "weights": model.net.get_weights(), "kept": kept}


@pytest.mark.sampled(6)
@contestants.among(REPLICAS)
@pytest.mark.parametrize("make", STEPS, ids=lambda one: one.__name__)
def test_a_step_is_that_of_one_device(make, contestant, same_as_stock):
    if contestant[0] == "parameter_server" and make.__name__ in WITH_STREAMS:
        pytest.skip("each worker has streams of random numbers of its own")
    same_as_stock(lambda one: trained(one, make))


@pytest.mark.thorough
@contestants.among(REPLICAS)
@pytest.mark.parametrize("last", [3, 5])
def test_a_replica_may_have_a_single_example_where_others_have_more(last, same_as_stock):
    x = np.random.default_rng(1).normal(size=(8 + last, 6, 4)).astype("float32")

    def run(contestant):
        strategy = start(contestant)
        with strategy.scope():
            stack = [layers.Conv1D(3, 2), layers.Bidirectional(layers.GRU(2, return_sequences=True)), layers.LSTM(2)]
            model = keras.Sequential([keras.Input((6, 4)), *stack])
            model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
        history = strategy.fit(model, x, x[:, 0, :2], batch_size=8, epochs=2, shuffle=False, verbose=0).history
        return {"history": history, "weights": model.get_weights()}

    same_as_stock(run)


def functions():
    """The functions of TensorFlow and Keras, by their places."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in ("tensorflow", "keras") or module is None:
            continue
        for key, value in list(vars(module).items()):
            if isinstance(value, types.FunctionType):
                found[name, key] = value
            elif isinstance(value, type) and value.__module__.partition(".")[0] in ("tensorflow", "keras"):
                found |= {(value, part): one for part, one in list(vars(value).items()) if callable(one)}
    return found


@pytest.mark.sampled(1)
@contestants.among({"single": (1,), "custom": (2,), "mirrored": (2,), "custom_recompute": (2,)})
@pytest.mark.parametrize("fails", [False, True])
def test_no_function_of_tensorflow_or_keras_is_another_one_after_a_training(contestant, fails):
    def fail(values):
        raise ValueError("planted")

    @step
    def failing(self, x, labels):
        failed = tf.ensure_shape(tf.numpy_function(fail, [x], tf.float32), [])
        return tf.reduce_mean(self.net(x)) + failed

    strategy = start(contestant)
    before = functions()
    with strategy.scope():
        model = (failing if fails else dropout_and_statistics_by_hand)()
        model.compile("adam", jit_compile=False)
    strategy.prepare(model)
    if fails:
        with pytest.raises(Exception, match="planted"):
            model.fit(X, LABELS, batch_size=BATCH, verbose=0)
    else:
        model.fit(X, LABELS, batch_size=BATCH, verbose=0)
    after = functions()
    assert [place for place, one in before.items() if place in after and after[place] is not one] == []
