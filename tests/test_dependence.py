"""How values of a graph depend on the examples of a batch: by rows, in totals, or of several examples together."""

import keras
import pytest
import tensorflow as tf
from keras import layers, ops

from tests import zoo
from tests.graphs import while_traced
from tfdist import models
from tfdist.core.dependence import ALIKE, JOINT, LENGTH, MIXED, ROWS, TOTAL, Dependences
from tfdist.core.example_axes import ExampleAxes

WEIGHT = tf.Variable([[1.0, 2.0], [3.0, 4.0]])
keras.utils.set_random_seed(0)
MODELS = {
    "dense": keras.Sequential([keras.Input((None, 2)), layers.Dense(3, activation="gelu"), layers.Dense(2)]),
    "lstm": keras.Sequential([keras.Input((None, 2)), layers.LSTM(3, return_sequences=True), layers.Dense(2)]),
    "attention": keras.Sequential(
        [keras.Input((None, 2)), layers.LayerNormalization(), layers.Dense(4), layers.Reshape((-1, 2, 2))]
    ),
    "convolution": keras.Sequential(
        [keras.Input((None, 2)), layers.Conv1D(3, 2, padding="same"), layers.GroupNormalization(1), layers.Dropout(0.5)]
    ),
}


def heads(x):
    scores = tf.nn.softmax(x @ tf.transpose(x, [0, 2, 1]))
    return scores @ x


def positions(length):
    return tf.cast(tf.range(length), tf.float32)


def number(x):
    return tf.cast(tf.shape(x)[0], tf.float32)


# Of sequences x, [n, steps, 2].
FOUND = {
    "a weight": (lambda x: WEIGHT * 2.0, ALIKE),
    "the number of steps": (lambda x: tf.range(tf.shape(x)[1]), ALIKE),
    "the number of examples": (lambda x: 2 * tf.shape(x)[0], LENGTH),
    "an example": (lambda x: x, ROWS),
    "its square": (tf.square, ROWS),
    "its largest step": (lambda x: tf.reduce_max(x, 1), ROWS),
    "its attention": (heads, ROWS),
    "its steps by each other": (lambda x: x[:, None] - x[:, :, None], ROWS),
    "noise": (lambda x: x + tf.random.normal(tf.shape(x)), ROWS),
    "labels of ones": (lambda x: tf.ones(tf.shape(x)[:1]) - x[:, 0, 0], ROWS),
    "positions of its steps": (lambda x: x[..., 0] * tf.range(tf.cast(tf.shape(x)[1], tf.float32)), ROWS),
    "chosen features": (lambda x: tf.gather(x, [1], axis=2), ROWS),
    "rows of a table": (lambda x: tf.gather(WEIGHT, tf.cast(x[..., 0] > 0, tf.int32)), ROWS),
    "one of its steps": (lambda x: tf.gather(x, tf.argmax(x[..., 0], 1), batch_dims=1), ROWS),
    "two blocks": (lambda x: tf.concat([x, x], 0), ROWS),
    "one of two blocks": (lambda x: tf.concat([x, x], 0)[tf.shape(x)[0] :], ROWS),
    "half of two blocks": (lambda x: tf.split(tf.concat([x, 2 * x], 0), 2)[1], ROWS),
    "the last of its steps": (
        lambda x: tf.gather_nd(x, tf.stack([tf.range(tf.shape(x)[0]), tf.argmax(x[..., 0], 1, tf.int32)], 1)),
        ROWS,
    ),
    "along an axis": (lambda x: ops.take_along_axis(x, tf.argsort(x, 1), axis=1), ROWS),
    "positions of its steps, by all lengths": (lambda x: x[..., 0] + positions(tf.unstack(tf.shape(x))[1]), ROWS),
    "examples in an order drawn at random": (
        lambda x: tf.gather(x, tf.random.shuffle(tf.range(tf.shape(x)[0]))),
        ROWS,
    ),
    "the nearest of a codebook": (lambda x: tf.argmin(tf.reduce_sum((x[:, 0, None] - WEIGHT) ** 2, -1), 1), ROWS),
    "a sum": (tf.reduce_sum, TOTAL),
    "a mean": (lambda x: 3.0 * tf.reduce_mean(x) + 1.0, TOTAL),
    "a sum over its number": (lambda x: tf.reduce_sum(x) / number(x), TOTAL),
    "a mean of each feature": (lambda x: tf.reduce_mean(x, [0, 1]), TOTAL),
    "two means side by side": (lambda x: tf.stack([tf.reduce_mean(x), tf.reduce_sum(x)]), TOTAL),
    "a product summed over the examples": (lambda x: tf.transpose(x[:, 0]) @ x[:, 1], TOTAL),
    "squares": (tf.nn.l2_loss, TOTAL),
    "an example and a mean": (lambda x: x + tf.reduce_mean(x), MIXED),
    "the mean of these": (lambda x: tf.reduce_mean(x - tf.reduce_mean(x)), TOTAL),
    "the root of a mean": (lambda x: tf.sqrt(tf.reduce_mean(x)), JOINT),
    "a product of means": (lambda x: tf.reduce_mean(x) * tf.reduce_sum(x), JOINT),
    "a ratio of sums": (lambda x: tf.reduce_sum(x) / tf.reduce_sum(tf.abs(x)), JOINT),
    "an example by a mean": (lambda x: x / tf.reduce_mean(x), JOINT),
    "the largest": (tf.reduce_max, JOINT),
    "the first": (lambda x: x[0, 0, 0], JOINT),
    "all but the first": (lambda x: x[1:], JOINT),
    "in reverse": (lambda x: x[::-1], JOINT),
    "reversed": (lambda x: tf.reverse(x, [0]), JOINT),
    "by each other": (lambda x: x[None] - x[:, None], JOINT),
    "products with each other": (lambda x: x[:, 0] @ tf.transpose(x[:, 0]), JOINT),
    "products by einsum": (lambda x: tf.einsum("nsi,msi->nm", x, x), JOINT),
    "labels equal or not": (lambda x: x[:, 0, 0] == x[:, 0, :1], JOINT),
    "probabilities among examples": (lambda x: tf.nn.softmax(x[:, 0, 0]), JOINT),
    "sorted": (lambda x: tf.sort(x[:, 0, 0]), JOINT),
    "sums so far": (tf.cumsum, JOINT),
    "those of a mask": (lambda x: tf.boolean_mask(x, x[:, 0, 0] > 0), JOINT),
    "positions of examples, by all lengths": (
        lambda x: x[:, 0, 0] + positions(tf.unstack(tf.shape(x))[0]),
        JOINT,
    ),
    "another's steps": (lambda x: tf.gather_nd(x, tf.where(x[..., 0] > 0)), JOINT),
    "positions of examples": (lambda x: x[:, 0, 0] * tf.range(number(x)), JOINT),
    "Keras' deviation": (lambda x: ops.std(x, axis=0), JOINT),
    "an own normalization": (lambda x: (x - tf.reduce_mean(x, 0)) * WEIGHT[0], MIXED),
    "a function of each example": (lambda x: tf.map_fn(tf.reduce_max, x), ROWS),
    "a function of each step": (lambda x: tf.map_fn(lambda step: 2.0 * step, tf.transpose(x, [1, 0, 2])), ROWS),
    **{f"a model: {name}": (model, ROWS) for name, model in MODELS.items()},
    "a loss of Keras": (lambda x: keras.losses.MeanSquaredError()(x, 0.0 * x), TOTAL),
}


def dependence(made, *examples):
    return Dependences(ExampleAxes(examples), examples).of(made)


@pytest.mark.parametrize("name", FOUND)
def test_the_graph_shows_how_a_value_depends_on_the_examples(name):
    make, expected = FOUND[name]
    assert while_traced(lambda x: dependence(make(x), x), tf.TensorSpec([None, None, 2])) is expected


Y_TRUE, Y_PRED = tf.TensorSpec([None, 3]), tf.TensorSpec([None, 3])
LOSSES = sorted(
    name
    for name, loss in vars(keras.losses).items()
    if isinstance(loss, type) and issubclass(loss, keras.losses.Loss) and loss is not keras.losses.Loss
)


@pytest.mark.parametrize("name", LOSSES)
def test_keras_losses_are_totals_of_the_examples_but_for_those_of_the_whole_batch(name):
    # Hinge losses look whether all labels of the batch are 0 or 1.
    whole = name in ("Dice", "Tversky", "Circle", "Hinge", "SquaredHinge")
    sparse = name in ("SparseCategoricalCrossentropy", "CategoricalGeneralizedCrossEntropy")

    def of_loss(y, p):
        target = tf.cast(y, tf.int32) if name == "CTC" else y[:, 0] if sparse or name == "Circle" else y
        given = tf.tile(p[:, None], [1, 5, 1]) if name == "CTC" else p
        return dependence(getattr(keras.losses, name)()(target, given), y, p)

    assert while_traced(of_loss, Y_TRUE, Y_PRED) is (JOINT if whole else TOTAL)


@pytest.mark.parametrize("case", zoo.SMALL)
def test_the_models_of_the_zoo_compute_each_example_by_itself(case):
    small = zoo.SMALL[case]
    model = models.build(zoo.name_of(case), small.spec, **small.options)
    x, _ = zoo.data(case, zoo.STREAMS)

    def of_outputs(*inputs):
        outputs = model(tf.nest.pack_sequence_as(x, inputs))
        return {dependence(output, *inputs) for output in tf.nest.flatten(outputs)}

    specs = [tf.TensorSpec([None, *one.shape[1:]], one.dtype) for one in tf.nest.flatten(x)]
    assert while_traced(of_outputs, *specs) == {ROWS}
