"""What seeded operations of `tf.random` draw in a partitioned step is what they draw on one device."""

import numpy as np
import pytest
import tensorflow as tf

from tests.spmd.on_replicas import rows_of
from tfdist import spmd
from tfdist.spmd import draws

DRAWS = {
    "uniform": lambda shape: tf.random.uniform(shape, seed=3),
    "normal": lambda shape: tf.random.normal(shape, seed=4, dtype=tf.float64),
    "truncated": lambda shape: tf.random.truncated_normal(shape, seed=5),
    "shuffle": lambda shape: tf.random.shuffle(tf.range(shape[0]), seed=7),
    "categorical": lambda shape: tf.random.categorical(tf.zeros(shape), 2, seed=8),
    "gamma": lambda shape: tf.random.gamma(shape, 2.0, seed=9),
    "whole numbers": lambda shape: tf.random.uniform(shape, maxval=9, dtype=tf.int32, seed=10),
    "half": lambda shape: tf.random.normal(shape, seed=6, dtype=tf.float16),
}


@pytest.mark.parametrize("name", DRAWS)
def test_the_graphs_of_several_batch_sizes_draw_from_one_stream(name):
    def step(x):
        return DRAWS[name]([tf.shape(x)[0], 3])

    traced = tf.function(step, autograph=False).get_concrete_function(tf.TensorSpec([None], tf.float32))
    streams = draws.Streams()

    def on_replicas(examples):
        @tf.function(autograph=False)
        def partitioned(x):
            rows = rows_of(examples, 2)
            parts = tf.split(x, rows)
            batch = spmd.Placed(spmd.Shard.of_rows(rows), parts)
            return spmd.compute(traced, spmd.Mesh(["CPU:0"] * 2), [batch], rows, spmd.Cost(), streams)

        return partitioned(tf.zeros(examples))

    for examples in (7, 4, 7, 5):
        np.testing.assert_array_equal(on_replicas(examples), traced(tf.zeros(examples)))
    assert len(streams.counters) + len(streams.kernels) == 1
