"""Every rule of the partitioner: what it claims of an operation is compared, in float64, with the whole operation.

An operation is given inputs that are sharded along each of their axes in turn. Whatever the rule answers, the result is
that of one device; and the table says for which axes nothing is computed whole.
"""

import numpy as np
import pytest
import tensorflow as tf

from tests.spmd.on_replicas import assert_equal, both
from tfdist.spmd import rules

RANDOM = np.random.default_rng(0)
REAL = RANDOM.normal(size=(6, 6, 6))

# For each case: a function of one array [6, 6, 6], and the axes along which that can be sharded without gathering.
CASES = {
    "Tanh": (tf.tanh, {0, 1, 2}),
    "AddV2 of a row": (lambda x: x + x[:1, :1], {2}),
    "Sum": (lambda x: tf.reduce_sum(x, 1), {0, 1, 2}),
}


@pytest.mark.parametrize("axis", range(3))
@pytest.mark.parametrize("name", CASES)
def test_a_rule_computes_what_one_device_does(name, axis):
    function, local = CASES[name]
    array = np.moveaxis(REAL, axis, 0)  # the first axis is sharded, and moved to its place

    def moved(x):
        return function(tf.transpose(x, np.argsort([axis, *(a for a in range(3) if a != axis)])))

    expected, found, cost = both(moved, array, replicas=3)
    assert_equal(found, expected)
    assert not cost.refused
    assert (not cost.repeated) == (axis in local)


def test_each_type_of_operation_has_one_rule():
    assert len(rules.types()) > 200
