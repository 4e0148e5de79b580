"""Functions computed on one device, and partitioned for several replicas, beside each other."""

import numpy as np
import tensorflow as tf

from tfdist import spmd
from tfdist.data.pipeline.division import Division


def rows_of(examples, replicas):
    """The number of examples of each replica."""
    bounds = [Division(replicas).part(examples, index) for index in range(replicas)]
    return [end - begin for begin, end in bounds]


def traced(function, *batch):
    """The graph of a function for a batch of arrays, as one device traces it."""
    specs = tf.nest.map_structure(lambda one: tf.TensorSpec(np.shape(one), tf.as_dtype(np.asarray(one).dtype)), batch)
    return tf.function(function, autograph=False).get_concrete_function(*specs)


def both(function, *batch, replicas=2):
    """The results on one device, those on several replicas, and the cost of the partitioned function."""
    examples = len(batch[0])
    cost = spmd.Cost()
    one = traced(function, *batch)
    several = spmd.partitioned(one, spmd.Mesh(["CPU:0"] * replicas), rows_of(examples, replicas), cost)
    tensors = [tf.convert_to_tensor(array) for array in batch]
    return one(*tensors), several(*tensors), cost


def assert_equal(found, expected, dtype_digits=None):
    """Structures of tensors that differ by rounding at most; in float64 that is 1e-12."""
    tf.nest.assert_same_structure(found, expected)
    arrays = [[np.asarray(one) for one in tf.nest.flatten(structure)] for structure in (found, expected)]
    for one, other in zip(*arrays, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        if one.dtype.kind in "fc":
            digits = dtype_digits or (1e-12 if one.dtype.itemsize >= 8 and one.dtype != np.complex64 else 2e-6)
            np.testing.assert_allclose(one, other, rtol=digits, atol=digits)
        else:
            np.testing.assert_array_equal(one, other)
