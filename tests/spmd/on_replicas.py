"""Functions computed on one device, and partitioned for several replicas, beside each other."""

import numpy as np
import tensorflow as tf

from tfdist import spmd
from tfdist.data.input.division import Division


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


_DIGITS = {"float64": 1e-12, "complex128": 1e-12, "float32": 2e-6, "complex64": 2e-6, "float16": 1e-2}


def assert_equal(found, expected, least=0.0):
    """Structures of tensors that differ by rounding at most, in float64 by 1e-12, or by `least`."""
    tf.nest.assert_same_structure(found, expected)
    pairs = zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True)
    for one, other in (map(np.asarray, pair) for pair in pairs):
        assert one.dtype == other.dtype and one.shape == other.shape
        if one.dtype.kind in "fc":
            digits = max(least, _DIGITS[one.dtype.name])
            np.testing.assert_allclose(one, other, rtol=digits, atol=digits)
        else:
            np.testing.assert_array_equal(one, other)
