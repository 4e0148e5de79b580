"""Every rule of the partitioner: what it claims of an operation is compared, in float64, with the whole operation.

An operation is given inputs that are sharded along each of their axes in turn, and in pairs; see `one_operation.py`.
Whatever the rule answers, the result is that of one device. The cases say for which axes nothing is computed whole, so
that a rule that answers no more is noticed as well.
"""

import zlib

import numpy as np
import pytest
import tensorflow as tf

from tests.spmd import one_operation
from tests.spmd.cases import (
    contractions,
    elementwise,
    images,
    indexing,
    lists,
    matrices,
    neural,
    reductions,
    shapes,
    strings,
)
from tests.spmd.on_replicas import assert_equal, traced
from tfdist import spmd
from tfdist.spmd import linear, rules
from tfdist.spmd.placements import Partial, Shard

FAMILIES = (contractions, elementwise, images, indexing, lists, matrices, neural, reductions, shapes, strings)
CASES = [case for family in FAMILIES for case in family.CASES]


@pytest.fixture(autouse=True, scope="module")
def graphs_as_they_are():
    """Grappler is as right for a replica as it is for one device, and takes half of the time."""
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": before["disable_meta_optimizer"]})


def assert_is_whole(case, traced, ways, replicas):
    """The operation gives in all ways what it gives on one device; returns what was found."""
    expected = [tensor.numpy() for tensor in tf.nest.flatten(traced(*map(tf.constant, case.arrays)))]
    found = one_operation.partitioned(case, traced, ways, replicas)
    for one in found:
        assert not one.cost.refused, one.given
        try:
            assert_equal(one.values, expected, case.digits)
        except AssertionError as error:
            raise AssertionError(f"inputs placed as {one.given}: {error}") from error
    return found


def local_axes(case, found):
    """Per input, the axes that were sharded, in one block and no other input's, without anything computed whole."""
    axes = [set() for _ in case.arrays]
    for one in found:
        shards = [(index, shard) for index, shard in enumerate(one.given) if isinstance(shard, Shard)]
        if len(shards) == 1 and shards[0][1].blocks == 1 and not one.cost.repeated:
            axes[shards[0][0]].add(shards[0][1].axis)
    return " ".join("".join(map(str, sorted(one))) or "-" for one in axes)


def replicas_of(case):
    """2 or 3."""
    return 2 + zlib.crc32(str(case).encode()) % 2


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_rule_computes_what_one_device_does(case):
    replicas = replicas_of(case)
    found = assert_is_whole(case, case.traced(), list(one_operation.sharded(case, replicas)), replicas)
    assert case.local in ("", local_axes(case, found))


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_rule_computes_what_one_device_does_for_all_pairs_of_axes(case):
    replicas = 5 - replicas_of(case)
    ways = [*one_operation.sharded(case, replicas), *one_operation.sharded(case, replicas, pairs=True)]
    for begin in range(0, len(ways), 20):
        assert_is_whole(case, case.traced(), ways[begin : begin + 20], replicas)


UNKNOWN = [case for case in CASES if not case.of_known_lengths]
OF_LENGTHS = [
    *(case for case in contractions.CASES if case.kind == "Einsum"),
    *indexing.CASES,
    *shapes.CASES,
    *elementwise.BROADCAST,
]


@pytest.mark.sampled(40)
@pytest.mark.parametrize(
    "case",
    [case if case in OF_LENGTHS else pytest.param(case, marks=pytest.mark.exhaustive) for case in UNKNOWN],
    ids=str,
)
def test_a_rule_computes_what_one_device_does_where_lengths_are_unknown(case):
    """All lengths, that is, but those that can be divided over the replicas, as the first axis of a batch."""
    replicas = 5 - replicas_of(case)
    lengths = [array.shape for array in case.arrays]
    traced = case.traced(lambda index, axis: lengths[index][axis] % one_operation.ROWS != 0)
    assert_is_whole(case, traced, list(one_operation.sharded(case, replicas)), replicas)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", UNKNOWN, ids=str)
def test_a_rule_computes_what_one_device_does_where_only_the_sharded_axes_have_known_lengths(case):
    replicas = replicas_of(case)
    for given in one_operation.sharded(case, replicas):
        traced = case.traced(lambda index, axis, given=given: getattr(given[index], "axis", None) != axis)
        assert_is_whole(case, traced, [given], replicas)


ADDED = [
    case
    for case in CASES
    if case.kind in {*linear.INPUTS, *linear.ADDITIVE, "Relu", "Square", "Maximum", "Max"}
    and all(array.dtype not in (np.float16, np.float32) for array in case.arrays)  # the test's own terms are rounded
]


@pytest.mark.sampled(100)
@pytest.mark.parametrize("case", ADDED, ids=str)
def test_an_operation_on_terms_of_a_sum_computes_what_one_device_does(case):
    for one in assert_is_whole(case, case.traced(), list(one_operation.terms(case)), 2):
        assert not one.cost.repeated
        (index,) = [index for index, placement in enumerate(one.given) if placement == Partial()]
        if index in linear.INPUTS.get(case.kind, ()) and case.kind not in ("Cast", "Mean") and case.function is None:
            assert one.placements == [Partial()]


def large_and_small(x):
    few, many = tf.reduce_sum(x, 0), tf.reduce_sum(x)
    return few * many, many * tf.ones([1 << 15], x.dtype)


def test_what_would_make_an_exchange_large_is_computed_after_it():
    batch, sent = np.random.default_rng(0).normal(size=(4, 3)), []

    class Noting(spmd.Mesh):
        def all_reduce(self, values, reduction, gradients=False):
            sent.extend(terms[0].shape.num_elements() for terms in values)
            return super().all_reduce(values, reduction, gradients)

    graph = traced(large_and_small, batch)
    found = spmd.partitioned(graph, Noting(["CPU:0"] * 2), [2, 2])(tf.constant(batch))
    assert_equal(found, graph(tf.constant(batch)))
    assert max(sent) <= 3


def joined_and_stacked(x):
    first, second = tf.reduce_sum(x, 0), tf.reduce_sum(tf.sin(x), 0)
    return tf.tanh(tf.concat([first, second], 0)), tf.tanh(tf.stack([first, second], 1))


def test_terms_of_sums_are_joined_before_they_are_exchanged():
    batch, sent = np.random.default_rng(0).normal(size=(4, 3)), []

    class Noting(spmd.Mesh):
        def all_reduce(self, values, reduction, gradients=False):
            sent.append([terms[0].shape.as_list() for terms in values])
            return super().all_reduce(values, reduction, gradients)

    graph = traced(joined_and_stacked, batch)
    found = spmd.partitioned(graph, Noting(["CPU:0"] * 2), [2, 2])(tf.constant(batch))
    assert_equal(found, graph(tf.constant(batch)))
    assert sent == [[[6], [3, 2]]]


def test_each_type_of_operation_that_has_a_rule_has_a_case():
    kinds = {case.kind for case in CASES}
    for case in CASES:
        if case.function is not None:
            kinds |= {operation.type for operation in case.traced().graph.get_operations()}
    assert not set(rules.types()) - kinds


def test_a_type_of_operation_has_one_rule():
    with pytest.raises(ValueError, match="two rules for `Sum`"):
        rules.rule("Sum")(lambda operation, index, shard: None)
