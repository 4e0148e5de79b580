"""Whether a scalar of a graph is a mean or a sum over the examples, and what it is made of."""

import pytest
import tensorflow as tf
from keras import ops

from tests.graphs import while_traced
from tfdist.core import dependencies
from tfdist.core.dependence import Dependences
from tfdist.core.example_axes import ExampleAxes
from tfdist.core.means_and_sums import Degrees

WEIGHT = tf.Variable([[1.0], [2.0]])


def summands(scalar, x):
    axes = ExampleAxes([x])
    return Degrees(axes, Dependences(axes, [x])).summands(scalar)


def rate():
    return tf.constant(0.5)


SCALARS = {
    "a mean": (lambda x: tf.reduce_mean(x @ WEIGHT), [False]),
    "a sum": (lambda x: tf.reduce_sum(x @ WEIGHT), [True]),
    "a sum of sums of rows": (lambda x: tf.reduce_sum(tf.reduce_sum(x, 1)), [True]),
    "a sum divided by a constant": (lambda x: tf.reduce_sum(x) / 8.0, [True]),
    "a sum divided by its length": (lambda x: tf.reduce_sum(x) / tf.cast(tf.shape(x)[0], tf.float32), [False]),
    "a sum divided by its size": (lambda x: ops.sum(x) / ops.cast(ops.size(x), "float32"), [False]),
    "a sum of quotients": (lambda x: tf.reduce_sum(x / tf.cast(tf.shape(x)[0], tf.float32)), [False]),
    "half of the squares": (tf.nn.l2_loss, [True]),
    "what no example enters into": (lambda x: tf.reduce_sum(tf.square(WEIGHT)), [False]),
    "a root of a mean": (lambda x: tf.sqrt(tf.reduce_mean(x)), [False]),
    "a mean and a sum": (lambda x: tf.reduce_mean(x) + 0.1 * tf.reduce_sum(x), [False, True]),
    "a scaled difference": (lambda x: 4.0 * (tf.reduce_sum(x) - tf.reduce_mean(x)), [True, False]),
    "a sum of Python": (lambda x: sum([tf.reduce_mean(x), tf.reduce_sum(x)]), [False, True]),
    "a list that Keras adds": (lambda x: ops.sum([ops.mean(x), ops.sum(x)]), [False, True]),
    "what nobody can tell": (lambda x: tf.linalg.det(tf.transpose(x) @ x), [False]),
}


@pytest.mark.parametrize("name", SCALARS)
def test_a_scalar_is_taken_apart_into_means_and_sums(name):
    make, expected = SCALARS[name]
    found = []

    @tf.function(autograph=False)
    def step(x):
        scalar = make(x)
        parts = summands(scalar, x)
        found.extend(part.is_sum for part in parts)
        return scalar, tf.add_n([part.tensor * part.factor for part in parts])

    step.get_concrete_function(tf.TensorSpec([None, 2]))
    assert found == expected
    whole, joined = step(tf.constant([[1.0, 2.0], [4.0, 3.0], [0.5, 1.0]]))
    assert float(joined) == pytest.approx(float(whole), nan_ok=True)


def steps(x):
    return tf.cast(tf.shape(x)[1], tf.float32)


OF_SEQUENCES = {
    "a mean of sums over steps": (lambda x: tf.reduce_mean(tf.reduce_sum(x, 1)), False),
    "a sum over all": (tf.reduce_sum, True),
    "a sum divided by the steps": (lambda x: tf.reduce_sum(x) / steps(x), True),
    "a sum divided by the examples": (lambda x: tf.reduce_sum(x) / tf.cast(tf.shape(x)[0], tf.float32), False),
    "steps first": (lambda x: tf.reduce_mean(tf.reduce_sum(tf.transpose(x), 0)), False),
    "steps first, summed": (lambda x: tf.reduce_sum(tf.reduce_mean(tf.transpose(x), 0)), True),
    "a sum of means over the examples": (lambda x: tf.reduce_sum(tf.reduce_mean(x, 0)), False),
    "one row": (lambda x: tf.reduce_sum(tf.reshape(x, [-1])), True),
    "reshaped back": (
        lambda x: tf.reduce_mean(tf.reduce_sum(tf.reshape(tf.reshape(x, [-1, 1]), [-1, tf.shape(x)[1]]), 1)),
        False,
    ),
    "reshaped by both lengths": (
        lambda x: tf.reduce_sum(tf.reduce_mean(tf.reshape(x, tf.stack([tf.shape(x)[1], tf.shape(x)[0]])), 0)),
        True,
    ),
    "with new axes": (lambda x: tf.reduce_mean(tf.reduce_sum(x[:, None, :, None], [1, 2, 3])), False),
    "with an axis before": (lambda x: tf.reduce_sum(tf.reduce_mean(tf.expand_dims(x, 0), 1)), False),
    "and without it again": (lambda x: tf.reduce_sum(tf.squeeze(tf.expand_dims(x, 0), 0), [0])[0], True),
    "one example": (lambda x: tf.reduce_sum(x[0]), False),
    "the last step": (lambda x: tf.reduce_sum(x[:, -1]), True),
    "stacked": (lambda x: tf.reduce_mean(tf.reduce_sum(tf.stack([x, x], axis=1), [1, 2])), False),
    "concatenated": (lambda x: tf.reduce_mean(tf.reduce_sum(tf.concat([x, x], 1), 1)), False),
    "a weight for each step": (lambda x: tf.reduce_mean(tf.reduce_sum(x * tf.range(steps(x)), 1)), False),
    "a weight for each example": (
        lambda x: tf.reduce_sum(x[:, 0] * tf.range(tf.cast(tf.shape(x)[0], tf.float32))),
        True,
    ),
    "products with a table": (lambda x: tf.reduce_mean(tf.reduce_sum(x[..., None] @ [[1.0, 2.0]], [1, 2])), False),
    "products of steps": (lambda x: tf.reduce_mean(tf.reduce_sum(x[:, :, None] @ x[:, None, :], [1, 2])), False),
    "rows of a table": (
        lambda x: tf.reduce_mean(tf.reduce_sum(tf.gather(WEIGHT, tf.cast(x > 0, tf.int32))[..., 0], 1)),
        False,
    ),
    "a loop over steps": (
        lambda x: tf.reduce_mean(tf.reduce_sum(tf.transpose(tf.map_fn(lambda row: 2 * row, tf.transpose(x))), 1)),
        False,
    ),
}


@pytest.mark.parametrize("name", OF_SEQUENCES)
def test_what_is_summed_over_steps_is_no_sum_over_examples(name):
    make, is_sum = OF_SEQUENCES[name]
    parts = while_traced(lambda x: summands(make(x), x), tf.TensorSpec([None, None]))
    assert [part.is_sum for part in parts] == [is_sum]


INDICES = {
    "of the examples": (lambda x: tf.cast(x[:, 0], tf.int32), True),
    "of their number": (lambda x: tf.range(tf.shape(x)[0]), True),
    "drawn at random": (lambda x: tf.random.uniform([3], 0, 5, tf.int32), True),
    "a constant range": (lambda x: tf.range(7), False),
    "another length": (lambda x: tf.range(tf.shape(x)[1]), False),
    "of a variable": (lambda x: tf.cast(WEIGHT, tf.int32), False),
}


@pytest.mark.parametrize("name", INDICES)
def test_what_examples_enter_into_is_known_from_the_graph(name):
    make, expected = INDICES[name]
    found = while_traced(lambda x: dependencies.depends_on(make(x), [x]), tf.TensorSpec([None, 2]))
    assert found == expected
