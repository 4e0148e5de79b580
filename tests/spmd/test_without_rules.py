"""A rule that is missing costs time only: with each rule taken out in turn, training steps give the same numbers."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.spmd.on_replicas import assert_equal, rows_of
from tfdist import spmd
from tfdist.internals import tensorflow_graphs
from tfdist.spmd import linear
from tfdist.spmd.rules import registry

EXAMPLES = 7


def dense():
    layers = [keras.layers.Dense(5, "gelu"), keras.layers.LayerNormalization(), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((4,)), *layers]), real(4)


def convolution():
    layers = [
        keras.layers.Conv2D(3, 3, padding="same", activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.MaxPooling2D(),
        keras.layers.DepthwiseConv2D(2),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(3),
    ]
    return keras.Sequential([keras.Input((6, 6, 2)), *layers]), real(6, 6, 2)


def embedding():
    layers = [
        keras.layers.Embedding(9, 4, mask_zero=True),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(3),
    ]
    return keras.Sequential([keras.Input((5,), dtype="int32"), *layers]), words()


def recurrent():
    layers = [keras.layers.Embedding(9, 4, mask_zero=True), keras.layers.LSTM(3, dropout=0.5), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((5,), dtype="int32"), *layers]), words()


def attention():
    tokens = keras.Input((5,), dtype="int32")
    x = keras.layers.Embedding(9, 4)(tokens)
    x = keras.layers.Add()([x, keras.layers.MultiHeadAttention(2, 2, dropout=0.5)(x, x, use_causal_mask=True)])
    x = keras.layers.Flatten()(keras.layers.LayerNormalization()(x))
    return keras.Model(tokens, keras.layers.Dense(3)(x)), words()


STEPS = {step.__name__: step for step in (dense, convolution, embedding, recurrent, attention)}


def real(*shape):
    return np.random.default_rng(0).normal(size=(EXAMPLES, *shape))


def words():
    return np.random.default_rng(0).integers(0, 9, (EXAMPLES, 5)).astype(np.int32)


class Step:
    """A model's training step in float64, traced, with the state from which it starts, and its result on one device."""

    def __init__(self, name):
        keras.utils.set_random_seed(1)
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy("float64")
        self.model, x = STEPS[name]()
        keras.config.set_dtype_policy(before)
        self.batch = (x, np.arange(EXAMPLES) % 3)
        # Otherwise the loss, and so each gradient, is computed in float32.
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, dtype="float64")
        self.model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"], jit_compile=False)
        self.model.train_on_batch(*self.batch)
        metrics = [variable for metric in self.model.metrics for variable in metric.variables]
        self.variables = [*self.model.variables, *self.model.optimizer.variables, *metrics]
        self.before = [variable.numpy() for variable in self.variables]
        specs = [tf.TensorSpec(array.shape, array.dtype) for array in self.batch]
        step = tf.function(lambda x, y: self.model.train_step((x, y)), autograph=False)
        self.traced = step.get_concrete_function(*specs)
        self.expected = self.after(self.traced)

    def after(self, function):
        """The results and the variables after one step."""
        for variable, value in zip(self.variables, self.before, strict=True):
            variable.assign(value)
        results = function(*map(tf.constant, self.batch))
        return tf.nest.flatten(results), [variable.numpy() for variable in self.variables]

    def on_replicas(self, replicas):
        """The results and the variables after one partitioned step, and its cost."""
        cost = spmd.Cost()
        rows = rows_of(EXAMPLES, replicas)
        function = spmd.partitioned(self.traced, spmd.Mesh(["CPU:0"] * replicas), rows, cost)
        return self.after(function), cost

    @property
    def kinds(self):
        """The types of operations of the step, with those of the functions that it calls."""
        found, graphs = set(), [self.traced.graph]
        while graphs:
            for operation in graphs.pop().get_operations():
                found.add(operation.type)
                graphs += [
                    tensorflow_graphs.body(operation, name)
                    for name in ("f", "body", "cond", "then_branch", "else_branch")
                    if name in operation.node_def.attr and operation.node_def.attr[name].HasField("func")
                ]
        return found


@pytest.fixture(scope="module")
def step():
    """The steps by name."""
    return functools.cache(Step)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_that_of_one_device_with_all_rules(step, name):
    found, cost = step(name).on_replicas(2)
    assert_equal(found, step(name).expected, 1e-10)
    assert cost.repeated_share < 0.02 and not cost.refused


def test_no_step_needs_a_rule(step, monkeypatch):
    monkeypatch.setattr(registry, "RULES", {})
    monkeypatch.setattr(linear, "INPUTS", {})
    monkeypatch.setattr(linear, "ADDITIVE", frozenset())
    found, cost = step("dense").on_replicas(3)
    assert_equal(found, step("dense").expected, 1e-10)
    assert cost.repeated_share > 0.8


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_the_same_without_one_of_the_rules(step, name, monkeypatch):
    kinds = sorted(step(name).kinds & set(registry.types()))
    assert len(kinds) > 15
    for kind in kinds:
        with monkeypatch.context() as without:
            without.delitem(registry.RULES, kind)
            found, cost = step(name).on_replicas(2)
        assert_equal(found, step(name).expected, 1e-10)
        assert cost is not None, kind


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_the_same_without_one_of_the_linear_operations(step, name, monkeypatch):
    for kind in sorted(step(name).kinds & {*linear.INPUTS, *linear.ADDITIVE}):
        with monkeypatch.context() as without:
            without.setattr(linear, "INPUTS", {one: of for one, of in linear.INPUTS.items() if one != kind})
            without.setattr(linear, "ADDITIVE", linear.ADDITIVE - {kind})
            found, _ = step(name).on_replicas(2)
        assert_equal(found, step(name).expected, 1e-10)
