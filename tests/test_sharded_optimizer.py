"""How the state of an optimizer is divided over processes; tests/processes/test_sharded_jobs.py trains with it."""

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from tfdist.communicators.parts import Part
from tfdist.core.optimizer_layout import UNIT, Sharing, parts
from tfdist.core.segments import Segments
from tfdist.internals import tensorflow as tensorflow_internals

SHAPES = st.lists(st.lists(st.integers(1, 40), max_size=3).map(tuple), min_size=1, max_size=8)


@hypothesis.given(shapes=SHAPES, ranks=st.integers(2, 5))
def test_the_parts_make_up_the_whole_and_the_largest_share_is_an_nth_and_one_unit(shapes, ranks):
    of_each = [parts(shapes, [Sharing.SPLIT] * len(shapes), rank, ranks) for rank in range(ranks)]
    for index, shape in enumerate(shapes):
        whole = np.arange(np.prod(shape)).reshape(shape)
        found = [of_rank[index].of(whole).reshape(-1) for of_rank in of_each]
        np.testing.assert_array_equal(np.concatenate(found), whole.reshape(-1))
    shares = [sum(part.size for part in of_rank) for of_rank in of_each]
    assert max(shares) <= sum(shares) / ranks + UNIT


def test_whole_variables_are_placed_so_that_the_shares_are_alike():
    shapes = [(9,), (10,), (11,), (30,)]
    of_each = [parts(shapes, [Sharing.PLACED] * 4, rank, 2) for rank in range(2)]
    assert [sum(part.size for part in of_rank) for of_rank in of_each] == [30, 30]
    assert all(part.size in (0, *part.whole_shape) for of_rank in of_each for part in of_rank)


@pytest.mark.parametrize("shapes", [[(4, 6)], [(5,), (3, 7), ()], [(64, 32), (32,)]])
@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_packed_for_all_processes_and_unpacked_by_each_is_the_whole(shapes, ranks):
    wholes = [np.random.default_rng(0).random(shape, "float32") for shape in shapes]
    segments = []
    for rank in range(ranks):
        frame = Segments(parts(shapes, [Sharing.SPLIT] * len(shapes), rank, ranks))
        buffer = frame.packed([tf.reshape(whole, [-1]) for whole in wholes])
        mine = frame.own(tf.split(buffer, ranks)[rank], rank)
        segments.append(frame.packed_own([tf.reshape(one, [-1]) for one in mine], tf.float32))
    for found, whole in zip(frame.wholes(tf.concat(segments, 0)), wholes, strict=True):
        np.testing.assert_array_equal(found, whole)


def test_a_part_of_all_elements_has_the_shape_of_the_whole():
    assert Part((2, 3), (0, 6), rank=1).shape == (2, 3)
    assert Part((2, 3), (0, 6), rank=0).shape == (0,)


def test_a_graph_computes_a_tensor_after_another_unless_that_depends_on_it():
    @tf.function(autograph=False)
    def graph(x):
        first, second = tf.square(x), tf.reshape(tf.sin(x), [2])
        tensorflow_internals.compute_after(second, first)
        tensorflow_internals.compute_after(first, second + first)  # would be a circle
        return first + second

    made = graph.get_concrete_function(tf.TensorSpec([2])).graph
    before = {op.type: [one.type for one in op.control_inputs] for op in made.get_operations()}
    assert before["Sin"] == ["Square"]
    assert before["Square"] == []
    np.testing.assert_allclose(graph(tf.constant([0.0, 2.0])), [0.0, 4.0 + np.sin(2.0)], rtol=1e-6)
