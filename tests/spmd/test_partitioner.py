"""A partitioned function computes what it does on one device: loops, conditions, effects, unknown lengths, calls."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf

from tests.spmd.on_replicas import assert_equal, both, rows_of, traced
from tfdist import spmd
from tfdist.internals import tensorflow as tensorflow_internals

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(7, 4))
WEIGHTS = tf.constant(RANDOM.normal(size=(4, 4)))


def in_loop(x):
    return tf.while_loop(lambda i, z: i < 3, lambda i, z: (i + 1, tf.tanh(z @ WEIGHTS)), (0, x))[1]


def sum_in_loop(x):
    """A sum over examples that a loop carries."""

    def body(i, total):
        return i + 1, total + tf.reduce_sum(x * tf.cast(i, x.dtype), 0)

    return tf.while_loop(lambda i, total: i < 3, body, (0, tf.zeros(4, x.dtype)))[1]


def until_small(x):
    """A loop that ends by what all examples say."""
    return tf.while_loop(lambda z: tf.reduce_max(tf.abs(z)) > 0.1, lambda z: (z * 0.7,), (x,))[0]


def growing(x):
    def body(i, z):
        return i + 1, tf.concat([z, x], 0)

    shapes = tf.TensorShape([]), tf.TensorShape([None, 4])
    return tf.while_loop(lambda i, z: i < 2, body, (0, x), shape_invariants=shapes)[1]


def lists(x):
    """A list that is filled step by step, and differentiated."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        states = tf.scan(lambda state, step: tf.tanh(state + step), tf.transpose(x), initializer=x[:, 0] * 0)
        loss = tf.reduce_mean(tf.square(states))
    return loss, tape.gradient(loss, x)


def lists_over_examples(x):
    return tf.map_fn(lambda row: tf.reduce_logsumexp(row) * row, x)


def branches(x):
    return tf.cond(tf.reduce_mean(x) > 0, lambda: x * 2, lambda: tf.reverse(x, [0]))


def sums_of_branches(x):
    return tf.cond(tf.reduce_mean(x) > 0, lambda: tf.reduce_sum(x, 0), lambda: tf.reduce_mean(x, 0))


def cases_of_a_switch(x):
    return tf.switch_case(
        tf.argmax(tf.reduce_sum(x, 0), output_type=tf.int32), [lambda: x, lambda: x + 1, lambda: -x, lambda: x * 2]
    )


def functions(x):
    inner = tf.function(lambda a, b: tf.nn.softmax(a, axis=0) * b, autograph=False)
    return inner(x, tf.reduce_sum(x, 1, keepdims=True))


def own_gradient(x):
    @tf.custom_gradient
    def scaled(z):
        return z, lambda upstream: upstream / tf.norm(upstream)

    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(tf.square(scaled(x)))
    return tape.gradient(loss, x)


def second_derivatives(x):
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            loss = tf.reduce_mean(x**3)
        first = inner.gradient(loss, x)
    return outer.gradient(tf.reduce_sum(first**2), x)


def by_python(x):
    return tf.ensure_shape(tf.numpy_function(lambda values: np.sort(values, 0), [x], x.dtype), x.shape)


def two_views(x):
    """SimCLR: two views, one after the other along the axis of examples."""
    views = tf.math.l2_normalize(tf.concat([x @ WEIGHTS, x[:, ::-1]], 0), 1)
    return tf.nn.log_softmax(views @ tf.transpose(views))


def split_views(x):
    first, second = tf.split(tf.concat([x, 2 * x], 0), 2)
    return first * second


def repeated_rows(x):
    return tf.reshape(tf.repeat(x, 3, axis=0), [7, 3, 4]), tf.tile(x, [2, 1])


FUNCTIONS = [
    *(in_loop, sum_in_loop, until_small, growing, lists, lists_over_examples, branches, sums_of_branches),
    *(cases_of_a_switch, functions, own_gradient, second_derivatives, by_python, two_views, split_views, repeated_rows),
]
# Whose computation of the whole batch is repeated by each replica, at least a part of it.
REPEATED = {growing, lists_over_examples, branches, cases_of_a_switch, functions, by_python}


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda one: one.__name__)
def test_a_function_is_that_of_one_device(function, replicas):
    expected, found, cost = both(function, X, replicas=replicas)
    assert_equal(found, expected)
    assert not cost.refused or function in REPEATED
    assert bool(cost.repeated) <= (function in REPEATED)


@pytest.mark.parametrize("length", [1, 5])
def test_lengths_that_are_not_known_while_the_graph_is_made_are_followed(length):
    def step(x):
        flat = tf.reshape(x, [-1, x.shape[-1]]) @ WEIGHTS
        steps = tf.reshape(flat, tf.concat([tf.shape(x)[:-1], [2, 2]], 0))
        masked = (
            steps * tf.cast(tf.sequence_mask(tf.range(tf.shape(x)[0]) % 3, tf.shape(x)[1]), x.dtype)[..., None, None]
        )
        return tf.reduce_mean(masked, [1, 2, 3]), tf.reduce_sum(masked) / tf.cast(tf.size(x), x.dtype)

    one = tf.function(step, autograph=False).get_concrete_function(tf.TensorSpec([7, None, 4], tf.float64))
    cost = spmd.Cost()
    several = spmd.partitioned(one, spmd.Mesh(["CPU:0"] * 3), rows_of(7, 3), cost)
    batch = tf.constant(RANDOM.normal(size=(7, length, 4)))
    graph = several.get_concrete_function(tf.TensorSpec([7, None, 4], tf.float64))
    assert_equal(graph(batch), one(batch))
    assert not cost.repeated


@pytest.fixture(params=[None, 3], ids=["unseeded", "seeded"])
def global_seed(request):
    before = tensorflow_internals.global_seed()
    tf.random.set_seed(request.param)
    yield
    tf.random.set_seed(before)


def test_what_has_effects_runs_once_for_all_replicas(global_seed):
    calls, counted = [], tf.Variable(0, dtype=tf.int64)

    def step(x):
        noted = tf.numpy_function(lambda total: calls.append(float(total)) or total, [tf.reduce_sum(x)], x.dtype)
        counted.assign_add(1)
        drawn = tf.random.normal([7, 4], dtype=x.dtype)
        return noted + 0 * tf.reduce_sum(x), drawn

    one = traced(step, X)
    several = spmd.partitioned(one, spmd.Mesh(["CPU:0"] * 3), rows_of(7, 3))
    _, drawn = several(tf.constant(X))
    assert calls == [pytest.approx(X.sum())]
    assert counted.numpy() == 1
    assert len(np.unique(drawn)) == 28  # each example has numbers of its own


def test_assignments_and_reads_keep_their_order():
    variable = tf.Variable(tf.zeros(4, tf.float64))

    def step(x):
        before = variable.read_value()
        variable.assign_add(tf.reduce_mean(x, 0))
        middle = variable.read_value()
        variable.assign(tf.concat([tf.reduce_max(x, 0)[:2], middle[2:]], 0))
        return before, middle, variable.read_value()

    one = traced(step, X)
    several = spmd.partitioned(one, spmd.Mesh(["CPU:0"] * 2), rows_of(7, 2))
    expected = one(tf.constant(X))
    variable.assign(tf.zeros(4, tf.float64))
    assert_equal(several(tf.constant(X)), expected)


def test_gradients_are_added_in_one_exchange_together_with_what_else_waits():
    exchanges = []

    class Counting(spmd.Mesh):
        def all_reduce(self, values, reduction, gradients=False):
            exchanges.append((len(values), gradients))
            return super().all_reduce(values, reduction, gradients)

    weights = [tf.Variable(RANDOM.normal(size=(4, 4))) for _ in range(3)]

    def step(x):
        with tf.GradientTape() as tape:
            for weight in weights:
                x = tf.tanh(x @ weight)
            loss = tf.reduce_mean(x)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(gradient)
        return loss

    several = spmd.partitioned(traced(step, X), Counting(["CPU:0"] * 2), rows_of(7, 2))
    several(tf.constant(X))
    assert sorted(exchanges) == [(1, False), (3, True)]


def losses_and_their_gradients(x):
    weight, bias = tf.constant(RANDOM.normal(size=(4, 3))), tf.constant(RANDOM.normal(size=(3,)))
    with tf.GradientTape() as tape:
        tape.watch([weight, bias])
        outputs = x @ weight + tf.concat([bias[:1], bias[1:]], 0)
        loss = sum([tf.reduce_mean(outputs**2), 3 * tf.reduce_mean(outputs)])
        regularized = loss + 0.1 * tf.reduce_sum(weight**2)
    return loss, tape.gradient(regularized, [weight, bias])


def a_recurrence_and_its_gradients(x):
    kernel, bias = tf.constant(RANDOM.normal(size=(4, 4))), tf.constant(RANDOM.normal(size=(2, 4)))
    with tf.GradientTape() as tape:
        tape.watch([kernel, bias])
        _, state = tf.while_loop(
            lambda i, state: i < 5,
            lambda i, state: (i + 1, tf.tanh(state @ kernel + bias[0]) * tf.sigmoid(bias[1])),
            (tf.constant(0), x),
        )
        loss = tf.reduce_sum(state**3)
    return loss, tape.gradient(loss, [kernel, bias])


@pytest.mark.parametrize("step", [losses_and_their_gradients, a_recurrence_and_its_gradients])
def test_losses_and_gradients_that_are_added_up_take_one_exchange(step):
    exchanges = []

    class Noting(spmd.Mesh):
        def exchanging(self):
            exchanges.append(tf.compat.v1.get_default_graph().name)
            return super().exchanging()

    graph = traced(step, X)
    found = spmd.partitioned(graph, Noting(["CPU:0"] * 2), rows_of(7, 2))(tf.constant(X))
    assert_equal(found, graph(tf.constant(X)))
    assert exchanges == ["on_replicas"]


def test_a_rule_whose_parts_do_not_add_up_is_not_followed(monkeypatch):
    from tfdist.spmd.rules import OpSharding, registry

    wrong = lambda operation, index, shard: OpSharding([shard.axis, None], [0])  # noqa: E731
    monkeypatch.setitem(registry.RULES, "Sum", (wrong, frozenset(["keep_dims"])))
    expected, found, cost = both(lambda x: tf.reduce_sum(x, 0), np.ones((8, 4)))
    assert_equal(found, expected)
    assert cost.refused == ["Sum"]


def test_an_operation_without_a_rule_is_computed_whole_and_counted(monkeypatch):
    from tfdist.spmd.rules import registry

    monkeypatch.delitem(registry.RULES, "MatMul")
    expected, found, cost = both(lambda x: tf.tanh(x @ WEIGHTS), X)
    assert_equal(found, expected)
    assert [operation.type for operation, _ in cost.repeated] == ["MatMul"]
    assert 0 < cost.repeated_share < 1
    assert cost.gathers == 2  # of its input, and of the result


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_of_half_precision_are_made_in_float32(dtype):
    values = np.full((4096, 1), 1.0)
    values[0] = 4096.0

    def step(x):
        return tf.reduce_sum(tf.cast(x, dtype))

    _, found, _ = both(step, values, replicas=3)
    assert float(found) == pytest.approx(8191, rel=1e-2)


def test_the_doubles_of_a_value_are_made_once():
    def step(x):
        return tf.linalg.svd(x, compute_uv=False), tf.linalg.qr(x)[1], tf.reverse(x, [0])

    _, _, cost = both(step, X)
    assert cost.gathers == 1


def test_what_is_held_back_waits_on_each_replica():
    """So that what is computed again for a backward pass is computed late."""

    def step(x):
        late = tf.tanh(x @ WEIGHTS)
        with tf.control_dependencies([late]):
            held = tf.raw_ops.PreventGradient(input=x, message="")
        return tf.reduce_sum(late) + tf.reduce_sum(held)

    several = spmd.partitioned(traced(step, X), spmd.Mesh(["CPU:0"] * 2), rows_of(7, 2))
    graph = several.get_concrete_function(tf.TensorSpec(X.shape, tf.float64)).graph
    held = [operation for operation in graph.get_operations() if operation.type == "PreventGradient"]
    assert len(held) == 2
    assert all(one.type == "Tanh" for operation in held for one in operation.control_inputs)
    assert all(operation.control_inputs for operation in held)


def test_nothing_of_tensorflow_is_replaced():
    before = {name: getattr(tf.raw_ops, name) for name in dir(tf.raw_ops)}
    with contextlib.suppress(StopIteration):
        both(in_loop, X)
    assert all(getattr(tf.raw_ops, name) is value for name, value in before.items())
