"""Variables are shared bit by bit, whatever their dtype and size, in pieces."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist.interface import variables as shared_variables
from tfdist.internals import tensorflow_variables

DTYPES = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
DTYPES += ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")


def bits(variable):
    return np.asarray(variable.numpy()).tobytes()


def drawn(shape, dtype, seed):
    """A variable with any bits, those of infinities and of numbers that are not numbers included."""
    numbers = np.random.default_rng(seed)
    size = int(np.prod(shape)) * tf.as_dtype(dtype).size
    raw = numbers.integers(0, 2 if dtype == "bool" else 256, size, "uint8")
    return tf.Variable(raw.view(tf.as_dtype(dtype).as_numpy_dtype).reshape(shape))


def shared(chief, other):
    """What the `other` process has after a broadcast of the variables of the chief, and the sizes of the messages."""
    sent = []

    def send(values):
        sent.append(values.copy())
        return values

    shared_variables.broadcast_variables(chief, send, is_chief=True)
    messages = iter(sent)
    shared_variables.broadcast_variables(other, lambda values: next(messages), is_chief=False)
    return [len(message) for message in sent]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_arrives_as_it_was(dtype):
    chief = [drawn((3, 5), dtype, 0), drawn((), dtype, 1), drawn((0, 2), dtype, 2)]
    before = [bits(variable) for variable in chief]
    other = [drawn(variable.shape, dtype, 3) for variable in chief]
    shared(chief, other)
    assert [bits(variable) for variable in other] == before == [bits(variable) for variable in chief]


@pytest.mark.parametrize("shape", [(40, 3), (2, 100), (1, 3, 70, 1), (7,)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool"])
def test_large_variables_are_sent_in_pieces(shape, dtype, monkeypatch):
    monkeypatch.setattr(shared_variables, "PIECE_BYTES", 64)
    chief, other = [drawn(shape, dtype, 0), drawn((2,), dtype, 1)], [drawn(shape, dtype, 2), drawn((2,), dtype, 3)]
    sizes = shared(chief, other)
    assert max(sizes) <= 64
    assert sum(sizes) == sum(len(bits(variable)) for variable in chief)
    assert [bits(variable) for variable in other] == [bits(variable) for variable in chief]


def test_small_variables_travel_together():
    chief, other = ([tf.Variable(np.full(3, value, "float32")) for _ in range(50)] for value in (1, 2))
    assert shared(chief, other) == [600]


def test_a_large_variable_is_filled_where_it_is_and_read_and_updated_there_afterwards():
    variable, values = tf.Variable(tf.zeros([1 << 23])), np.arange(1 << 23, dtype="float32")
    tensorflow_variables.fill(variable, values)
    address = tensorflow_variables.read(variable).ctypes.data
    np.testing.assert_array_equal(variable.numpy(), values)
    variable.assign_add(tf.ones_like(variable))
    assert tensorflow_variables.read(variable).ctypes.data == address
    np.testing.assert_array_equal(variable.numpy(), values + 1)
