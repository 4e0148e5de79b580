"""Steps with an operation that is drawn at random, partitioned for 2 and 3 replicas, are those of one device."""

import numpy as np
import pytest
import tensorflow as tf

from tests.spmd import drawn
from tests.spmd.on_replicas import rows_of, traced
from tfdist import spmd


def difference(one):
    """What differs between one device and several, in words; empty if nothing does."""
    expected = run(one, None)
    found = run(one, 2 + one.seed % 2)
    for name in expected:
        for number, (value, other) in enumerate(zip(expected[name], found[name], strict=True)):
            if not is_near(value, other, one.digits):
                return f"{one}: {name} {number} is {other} for {value}"
    return ""


def run(one, replicas):
    """The results, and the variables after a step."""
    try:
        return trained(one, replicas, gradient=True)
    except (LookupError, ValueError, TypeError, tf.errors.OpError):  # of an operation without a gradient
        return trained(one, replicas, gradient=False)


def trained(one, replicas, *, gradient):
    function, variables = drawn.step(one, gradient=gradient)
    graph = traced(function, drawn.batch())
    if replicas is not None:
        mesh = spmd.Mesh(["CPU:0"] * replicas)
        graph = spmd.partitioned(graph, mesh, rows_of(len(drawn.batch()), replicas))
    loss, outputs = graph(tf.constant(drawn.batch()))
    return {
        "loss": [loss.numpy()],
        "result": [output.numpy() for output in outputs],
        "variable": [variable.numpy() for variable in variables],
    }


def is_near(value, other, digits):
    value, other = np.asarray(value), np.asarray(other)
    if value.dtype.kind not in "fc":
        return np.array_equal(value, other)
    digits = digits if value.dtype.itemsize >= 8 else max(digits, 5e-4)
    finite = np.abs(value[np.isfinite(value)])
    return value.shape == other.shape and np.allclose(
        value, other, rtol=digits, atol=digits * max(1.0, finite.max(initial=0.0)), equal_nan=True
    )


@pytest.mark.sampled(15)
@pytest.mark.parametrize("seed", range(30))
def test_a_drawn_step_is_that_of_one_device(seed):
    (one,) = drawn.draws([seed])
    assert not difference(one)


@pytest.mark.exhaustive
@pytest.mark.parametrize("hundred", range(20))
def test_2000_drawn_steps_are_those_of_one_device(hundred):
    found = [difference(one) for one in drawn.draws(range(100 * hundred, 100 * (hundred + 1)))]
    assert not [one for one in found if one]
