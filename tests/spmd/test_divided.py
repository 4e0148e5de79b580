"""Parts of a variable, one of each replica, make up the value that it has on one device."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist import spmd
from tfdist.errors import UsageError
from tfdist.spmd import meshes

ROWS = (2, 1)
BATCHES = [np.array([[1.0, 2.0], [3.0, 4.0], [5.0, -6.0]], "f"), np.array([[-1.0, 0.5], [2.0, 7.0], [0.0, 1.0]], "f")]
SHAPE = (2, 3)
BEGIN = np.array([[0.5, 1.0, -1.0], [2.0, 0.25, 0.0]], "f")


def gradient(weights, x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(x @ weights - 1.0))
    return tape.gradient(loss, weights)


def momentum(weights, slot, x):
    slot.assign(0.9 * slot + gradient(weights, x))
    weights.assign_sub(0.1 * slot)


def norms(weights, slot, x):
    found = gradient(weights, x)
    slot.assign_add(found / (1.0 + tf.norm(found)))
    weights.assign_sub(slot / (1.0 + tf.norm(slot)))
    return tf.norm(slot)


def clipped_norms(weights, slot, x):
    (found,), norm = tf.clip_by_global_norm([gradient(weights, x)], 0.1)
    slot.assign_sub(found)
    weights.assign_add(slot)
    return norm


def products(weights, slot, x):
    slot.assign_sub(gradient(weights, x))
    weights.assign(slot @ tf.transpose(slot) @ weights)


def means_of_rows_and_columns(weights, slot, x):
    slot.assign(tf.square(gradient(weights, x)) + 1.0)
    of_rows, of_columns = tf.reduce_mean(slot, 1, keepdims=True), tf.reduce_mean(slot, 0, keepdims=True)
    weights.assign_sub(weights / (of_rows * of_columns))


def every_second_step(weights, slot, x):
    found = gradient(weights, x)

    def applied():
        weights.assign_sub(slot + found)
        slot.assign(tf.zeros_like(slot))
        return tf.constant(True)

    def accumulated():
        slot.assign_add(found)
        return tf.constant(False)

    return tf.cond(x[0, 0] < 0, applied, accumulated)


def several_times(weights, slot, x):
    def body(number):
        slot.assign(0.5 * slot + gradient(weights, x))
        weights.assign_sub(0.1 * slot)
        return number + 1

    return tf.while_loop(lambda number: number < 3, body, [0])


def by_a_kernel(weights, slot, x):
    tf.raw_ops.ResourceApplyKerasMomentum(
        var=slot.beside.handle, accum=slot.handle, lr=0.1, grad=gradient(weights, x), momentum=0.9
    )
    weights.assign_add(slot.beside)


def is_read(weights, slot, x):
    slot.assign_add(gradient(weights, x))
    return slot[1, 1:], tf.reduce_max(slot), tf.linalg.svd(slot)[0]


STEPS = [
    *(momentum, norms, clipped_norms, products, means_of_rows_and_columns, every_second_step, several_times),
    *(by_a_kernel, is_read),
]


class InParts(spmd.Mesh):
    """Two replicas, each of which updates a part of variables."""

    def __init__(self):
        super().__init__(["CPU:0", "CPU:0"])
        self.scattered = 0

    def parts(self, shape):
        return spmd.Shard.evenly(shape, 2)

    def reduce_scatter(self, values, shards):
        self.scattered += len(values)
        return [
            [meshes.part_of(spmd.reduced(terms, "sum"), shard, replica) for replica in self.local]
            for terms, shard in zip(values, shards, strict=True)
        ]


def made():
    weights, slot, beside = tf.Variable(tf.ones(SHAPE)), tf.Variable(BEGIN), tf.Variable(2 * BEGIN)
    slot.beside = beside
    return weights, slot, beside


def traced(step, weights, slot):
    spec = tf.TensorSpec(BATCHES[0].shape, tf.float32)
    return tf.function(lambda x: step(weights, slot, x), autograph=False).get_concrete_function(spec)


def cut(variable, shard):
    return [tf.Variable(meshes.part_of(tf.convert_to_tensor(variable), shard, replica)) for replica in range(2)]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("step", STEPS, ids=lambda one: one.__name__)
def test_its_parts_make_up_the_value_of_one_device(step):
    expected, divided, shard = made(), made(), spmd.Shard.evenly(SHAPE, 2)
    assert shard.lengths(3) == [2, 1]
    graph, on_two, mesh = traced(step, *expected[:2]), traced(step, *divided[:2]), InParts()
    parts = {id(one.handle): cut(one, shard) for one in divided[1:]}
    assert not spmd.variables_needed_whole(on_two, dict.fromkeys(parts, shard))
    held = {key: spmd.Placed(shard, [one.handle for one in pair]) for key, pair in parts.items()}

    @tf.function(autograph=False)
    def on_replicas(first, second):
        batch = spmd.Placed(spmd.Shard.of_rows(ROWS), [first, second])
        return spmd.compute(on_two, mesh, [batch], ROWS, spmd.Cost(), variables=held)

    for batch in map(tf.constant, BATCHES):
        results, found = graph(batch), on_replicas(batch[:2], batch[2:])
        for one, other in zip(tf.nest.flatten(found), tf.nest.flatten(results), strict=True):
            if other is not None:
                np.testing.assert_allclose(one, other, rtol=1e-5)
        np.testing.assert_allclose(divided[0], expected[0], rtol=1e-5)
        for one, whole in zip(divided[1:], expected[1:], strict=True):
            joined = tf.concat(parts[id(one.handle)], shard.axis)
            np.testing.assert_allclose(joined, whole, rtol=1e-5, atol=1e-6)
    if step not in (every_second_step, several_times):  # which are traced more than once
        assert mesh.scattered == 1  # the gradient


def by_rows(weights, slot, x):
    slot.scatter_update(tf.IndexedSlices(x[:1, :1] * tf.ones([1, 3]), tf.constant([0])))


def test_an_operation_that_needs_the_whole_and_was_missed_is_named():
    weights, slot, _ = made()
    graph, shard = traced(by_rows, weights, slot), spmd.Shard(1, (2, 1))
    held = {id(slot.handle): spmd.Placed(shard, [one.handle for one in cut(slot, shard)])}

    @tf.function(autograph=False)
    def on_replicas(first, second):
        batch = spmd.Placed(spmd.Shard.of_rows(ROWS), [first, second])
        return spmd.compute(graph, InParts(), [batch], ROWS, spmd.Cost(), variables=held)

    x = tf.constant(BATCHES[0])
    with pytest.raises(
        UsageError, match=r"`ResourceScatterUpdate` in test_divided.py, line \d+ needs the whole of a slot"
    ):
        on_replicas(x[:2], x[2:])


def by_rows_in_a_condition(weights, slot, x):
    tf.cond(x[0, 0] > 0, lambda: (by_rows(weights, slot, x), 1)[1], lambda: 2)


def by_a_kernel_with_one_that_is_whole(weights, slot, x):
    tf.raw_ops.ResourceApplyKerasMomentum(
        var=weights.handle, accum=slot.handle, lr=0.1, grad=gradient(weights, x), momentum=0.9
    )


@pytest.mark.parametrize(
    "step", [by_rows, by_rows_in_a_condition, by_a_kernel_with_one_that_is_whole], ids=lambda one: one.__name__
)
def test_it_is_told_of_which_variable_the_whole_is_needed(step):
    weights, slot, _ = made()
    key = id(slot.handle)
    assert spmd.variables_needed_whole(traced(step, weights, slot), {key: spmd.Shard(1, (2, 1))}) == {key}
