"""The whole of what replicas have parts of, put together from the rows that processes gather."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist import spmd
from tfdist.spmd import meshes


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_parts_are_joined_along_the_axis_that_is_cut(axis, blocks):
    whole = np.arange(6 * 12 * 18, dtype="f").reshape(6, 12, 18)
    shard = spmd.Shard(axis, (2, 1), blocks)
    parts = [meshes.part_of(tf.constant(whole), shard, replica) for replica in (0, 1)]
    assert [part.shape[axis] for part in parts] == shard.lengths(whole.shape[axis])
    for found in (spmd.joined(parts, shard), *spmd.gathered_by_rows(parts, shard, lambda rows: [tf.concat(rows, 0)])):
        np.testing.assert_array_equal(found, whole)


def test_rows_of_unknown_rank_are_joined():
    whole = np.arange(30, dtype="f").reshape(3, 5, 2)

    @tf.function(input_signature=[tf.TensorSpec(None)] * 2, autograph=False)
    def join(first, second):
        shard = spmd.Shard(0, (2, 1))
        return spmd.gathered_by_rows([first, second], shard, lambda rows: [tf.concat(rows, 0)])

    np.testing.assert_array_equal(join(whole[:2], whole[2:])[0], whole)
