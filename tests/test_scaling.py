"""Whether a scalar of a graph is a mean or a sum over the examples, and what it is made of."""

import pytest
import tensorflow as tf
from keras import ops

from tfdist.core import dependencies, means_and_sums

WEIGHT = tf.Variable([[1.0], [2.0]])


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
        parts = means_and_sums.summands(scalar, [x])
        found.extend(part.is_sum for part in parts)
        return scalar, tf.add_n([part.tensor * part.factor for part in parts])

    step.get_concrete_function(tf.TensorSpec([None, 2]))
    assert found == expected
    whole, joined = step(tf.constant([[1.0, 2.0], [4.0, 3.0], [0.5, 1.0]]))
    assert float(joined) == pytest.approx(float(whole), nan_ok=True)


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
    found = []

    @tf.function(autograph=False)
    def step(x):
        found.append(dependencies.depends_on(make(x), [x]))

    step.get_concrete_function(tf.TensorSpec([None, 2]))
    assert found == [expected]
