"""Outputs of any kind travel as numbers and arrive as they were."""

import doctest

import numpy as np
import pytest
import tensorflow as tf

from tfdist.groups import structures


def test_the_synopsis_runs():
    assert doctest.testmod(structures).failed == 0


@pytest.mark.parametrize("in_a_graph", [False, True])
@pytest.mark.parametrize(
    "words", [[["", "é"], ["\0x", "a" * 300]], np.zeros([0, 2], "S1")], ids=["any letters", "no example"]
)
def test_strings_of_any_letters_keep_their_shape(words, in_a_graph):
    def gather(values):
        return structures.gathered(values, lambda tensor: tf.concat([tensor, tensor], 0), 0)

    words = tf.constant(words, tf.string)
    found = (tf.function(gather) if in_a_graph else gather)(words)
    np.testing.assert_array_equal(found, tf.concat([words, words], 0))
    assert found.shape.as_list()[1:] == [2]


def test_rows_of_a_sparse_tensor_come_after_those_of_the_replicas_before():
    def of_replica(index):
        def gather(tensor):  # the other replica has the same
            return tf.concat([tensor, tensor], 0)

        return structures.gathered(tf.sparse.from_dense([[0, 7], [8, 0]]), gather, index)

    assert of_replica(0).dense_shape.numpy().tolist() == [4, 2]
    assert of_replica(1).indices.numpy().tolist()[:2] == [[2, 1], [3, 0]]


def test_a_scalar_of_each_replica_becomes_an_element():
    assert structures.gathered(2.0, lambda tensor: tf.concat([tensor, tensor], 0), 0).numpy().tolist() == [2.0, 2.0]
