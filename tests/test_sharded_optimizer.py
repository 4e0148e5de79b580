"""How the state of an optimizer is divided over processes; tests/processes/test_sharded_jobs.py trains with it."""

import math

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from tfdist import spmd
from tfdist.groups.parts import Part
from tfdist.internals import tensorflow_graphs
from tfdist.spmd.process_mesh import Segments

SHAPES = st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple)


@hypothesis.given(shape=SHAPES, ranks=st.integers(2, 5))
def test_the_parts_make_up_the_whole_and_differ_by_one_row_at_most(shape, ranks):
    shard = spmd.Shard.evenly(shape, ranks)
    if max(shape) < ranks:
        assert shard is None
        return
    lengths = tuple(shard.lengths(shape[shard.axis]))
    assert sum(lengths) == shape[shard.axis]
    assert 0 < max(lengths) <= min(lengths) + 1
    parts = [Part(shape, lengths, rank, shard.axis) for rank in range(ranks)]
    whole = np.arange(math.prod(shape)).reshape(shape)
    found = [part.of(whole) for part in parts]
    assert [one.shape for one in found] == [part.shape for part in parts]
    np.testing.assert_array_equal(parts[0].joined([one.ravel() for one in found]), whole)


@pytest.mark.parametrize("shapes", [[(4, 6)], [(5,), (3, 7), (64, 2)], [(64, 32), (32,)], [(3, 3, 8)]])
@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_packed_for_all_processes_and_unpacked_by_each_is_the_whole(shapes, ranks):
    wholes = [tf.constant(np.random.default_rng(0).random(shape, "float32")) for shape in shapes]
    frame = Segments(shapes, [spmd.Shard.evenly(shape, ranks) for shape in shapes])
    buffer = frame.packed(wholes)
    mine = [frame.parts(segment, rank) for rank, segment in enumerate(tf.split(buffer, ranks))]
    segments = [frame.packed_parts(parts, rank) for rank, parts in enumerate(mine)]
    for found, whole in zip(frame.values(tf.concat(segments, 0)), wholes, strict=True):
        np.testing.assert_array_equal(found, whole)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_a_part_of_all_elements_has_the_shape_of_the_whole(shape):
    length = shape[0] if shape else 1
    assert Part(shape, (0, length), rank=1).shape == shape
    assert Part(shape, (0, length), rank=0).shape == (0, *shape[1:])
    assert Part(shape, (0, length), rank=0).size == 0


def test_a_graph_computes_a_tensor_after_another_unless_that_depends_on_it():
    @tf.function(autograph=False)
    def graph(x):
        first, second = tf.square(x), tf.reshape(tf.sin(x), [2])
        tensorflow_graphs.compute_after(second, first)
        tensorflow_graphs.compute_after(first, second + first)  # would be a circle
        return first + second

    made = graph.get_concrete_function(tf.TensorSpec([2])).graph
    before = {op.type: [one.type for one in op.control_inputs] for op in made.get_operations()}
    assert before["Sin"] == ["Square"]
    assert before["Square"] == []
    np.testing.assert_allclose(graph(tf.constant([0.0, 2.0])), [0.0, 4.0 + np.sin(2.0)], rtol=1e-6)
