"""The terms of a variable, one for each replica, add up to the value that it has on one device."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist import spmd
from tfdist.internals import tensorflow_graphs
from tfdist.spmd import replica_variables

ROWS = (2, 1)
BATCHES = [np.array([[1.0, 2.0], [3.0, 4.0], [5.0, -6.0]], "f"), np.array([[-1.0, 0.5], [2.0, 7.0], [0.0, 1.0]], "f")]


def adds(state, x):
    state.assign(state + tf.reduce_sum(x, 0))


def adds_what_all_have(state, x):
    state.assign_add(tf.reduce_sum(x, 0))
    state.assign(state + tf.cast(tf.shape(x), tf.float32) + [1.0, 2.0])
    state.assign_sub([0.5, 0.25])


def keeps_the_largest(state, x):
    state.assign(tf.maximum(state, tf.reduce_max(x, 0)))


def keeps_a_moving_mean(state, x):
    state.assign(0.9 * state + 0.1 * tf.reduce_mean(x, 0))


def forgets(state, x):
    state.assign(tf.reduce_sum(x, 0))


def is_returned(state, x):
    state.assign(state + tf.reduce_sum(x, 0))
    return state / tf.reduce_sum(state)


STEPS = [adds, adds_what_all_have, keeps_the_largest, keeps_a_moving_mean, forgets, is_returned]


class Apart(spmd.Mesh):
    """Two replicas, and what they exchange."""

    def __init__(self):
        super().__init__(["CPU:0", "CPU:0"])
        self.exchanged = 0

    def all_reduce(self, values, reduction, gradients=False):
        self.exchanged += len(values)
        return super().all_reduce(values, reduction, gradients)


def traced(step, state):
    spec = tf.TensorSpec(BATCHES[0].shape, tf.float32)
    return tf.function(lambda x: step(state, x), autograph=False).get_concrete_function(spec)


@pytest.mark.parametrize("step", STEPS, ids=lambda one: one.__name__)
def test_its_terms_add_up_to_the_value_of_one_device(step):
    one_device, *terms = (tf.Variable([0.5, 1.0]), tf.Variable([0.25, -1.0]), tf.Variable([0.25, 2.0]))
    graph, mesh = traced(step, one_device), Apart()
    handles = {id(one_device.handle): spmd.Placed(spmd.Partial(), [term.handle for term in terms])}
    assert replica_variables.usable_as_accumulators(graph, handles) == set(handles)

    @tf.function(autograph=False)
    def on_replicas(first, second):
        batch = spmd.Placed(spmd.Shard.of_rows(ROWS), [first, second])
        return spmd.compute(graph, mesh, [batch], ROWS, spmd.Cost(), variables=handles)

    for batch in BATCHES:
        expected, found = graph(tf.constant(batch)), on_replicas(batch[:2], batch[2:])
        np.testing.assert_allclose(sum(term.numpy() for term in terms), one_device.numpy(), rtol=1e-6)
        if expected is not None:
            np.testing.assert_allclose(found, expected, rtol=1e-6)
    if step in (adds, adds_what_all_have, forgets):
        assert not mesh.exchanged
    assert (terms[0].numpy() != terms[1].numpy()).any()


def is_taken_from(state, x):
    state.assign(tf.reduce_sum(x, 0) - state)


def is_doubled(state, x):
    state.assign(state + state + tf.reduce_sum(x, 0))


@pytest.mark.parametrize("step", [*STEPS, is_taken_from, is_doubled], ids=lambda one: one.__name__)
def test_only_what_is_added_to_can_be_added_afterwards(step):
    state = tf.Variable([0.5, 1.0])
    graph, handles = traced(step, state), {id(state.handle)}
    before = state.numpy()
    state.assign([0.0, 0.0])
    graph(tf.constant(BATCHES[0]))
    added = before + state.numpy()
    state.assign(before)
    result = graph(tf.constant(BATCHES[0]))
    is_alone = replica_variables.only_added_to(graph, handles) == handles
    assert is_alone == (step in (adds, adds_what_all_have))
    if is_alone:
        assert result is None
        np.testing.assert_allclose(added, state.numpy(), rtol=1e-6)


def in_a_loop(state, x):
    tf.while_loop(lambda i: i < 2, lambda i: (state.assign_add(x[0]), i + 1)[1:], (tf.constant(0),))


def by_rows(state, x):
    state.scatter_update(tf.IndexedSlices(tf.reduce_max(x, 0)[:1], tf.constant([0])))


@pytest.mark.parametrize("step", [in_a_loop, by_rows], ids=lambda one: one.__name__)
def test_a_variable_that_is_used_otherwise_stays_whole(step):
    state = tf.Variable([0.5, 1.0])
    graph = traced(step, state)
    assert id(state.handle) in {id(handle) for handle in tensorflow_graphs.variables_of(graph.graph)}
    assert replica_variables.usable_as_accumulators(graph, {id(state.handle)}) == set()
