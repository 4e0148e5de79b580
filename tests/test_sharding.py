"""A table of several parts is one variable to Keras: read, looked up, differentiated and assigned as a whole."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.internals import keras_variables
from tfdist.parameter_server import sharded_variable

VALUES = np.arange(14, dtype="float32").reshape(7, 2)


@pytest.fixture
def table():
    parts = np.split(VALUES, [3, 5])  # as the first parts have the rows that are left over
    return sharded_variable.Table([tf.Variable(part) for part in parts], "table")


@pytest.fixture
def keras_variable(table):
    variable = keras.Variable(VALUES, name="table")
    variable._value = table
    return variable


def test_it_is_read_as_a_whole(table, keras_variable):
    for found in (tf.convert_to_tensor(table), np.asarray(table), table.numpy(), keras_variable.numpy(), table[:]):
        assert np.array_equal(found, VALUES)
    assert np.array_equal(keras.ops.matmul(keras_variable, [[1.0], [2.0]]), VALUES @ [[1.0], [2.0]])


def test_rows_are_looked_up_in_any_order_and_shape(keras_variable):
    keras_variables.look_up_rows()
    indices = tf.constant([[6, 0, 6], [2, 3, -1]])
    assert np.array_equal(keras.ops.take(keras_variable, indices, axis=0), VALUES[indices.numpy()])
    with pytest.raises(tf.errors.InvalidArgumentError, match="is not in"):
        keras.ops.take(keras_variable, tf.constant([0, 9]), axis=0)


def test_what_is_assigned_reaches_each_part(table, keras_variable):
    keras_variable.assign(2 * VALUES)
    keras_variable.assign_add(VALUES)
    assert np.array_equal(table.numpy(), 3 * VALUES)
    assert np.array_equal(table.variables[1].numpy(), 3 * VALUES[3:5])


@pytest.mark.parametrize("traced", [False, True])
def test_its_gradient_is_sparse_where_rows_were_looked_up(keras_variable, traced):
    keras_variables.look_up_rows()
    indices = tf.constant([5, 0, 5])

    def gradients():
        with tf.GradientTape(persistent=True) as tape:
            rows = tf.reduce_sum(keras.ops.take(keras_variable, indices, axis=0) ** 2)
            whole = tf.reduce_sum(keras_variable**2)
            both = rows + whole
            neither = tf.constant(0.0)
        # As Keras' own `train_step` asks, and as people do.
        return [tape.gradient(target, [keras_variable])[0] for target in (rows, whole, both, neither)] + [
            tape.gradient(rows, keras_variable.value)
        ]

    rows, whole, both, neither, of_value = tf.function(gradients)() if traced else gradients()
    expected = np.zeros_like(VALUES)
    np.add.at(expected, indices.numpy(), 2 * VALUES[indices.numpy()])
    assert isinstance(rows, tf.IndexedSlices) and isinstance(of_value, tf.IndexedSlices)
    assert rows.values.shape[0] == 3  # and no row that was not looked up
    assert np.array_equal(tf.convert_to_tensor(rows), expected)
    assert np.array_equal(tf.convert_to_tensor(of_value), expected)
    assert np.array_equal(whole, 2 * VALUES)
    assert np.array_equal(tf.convert_to_tensor(both), expected + 2 * VALUES)
    assert neither is None


def test_its_gradient_crosses_a_function(keras_variable):
    keras_variables.look_up_rows()
    look_up = tf.function(lambda indices: keras.ops.take(keras_variable, indices, axis=0))
    with tf.GradientTape() as tape:
        found = tf.reduce_sum(look_up(tf.constant([6, 1])))
    gradient = tf.convert_to_tensor(tape.gradient(found, [keras_variable])[0])
    assert np.array_equal(np.nonzero(gradient.numpy().any(axis=1))[0], [1, 6])


def test_each_part_gets_its_rows_of_a_gradient(table):
    slices = tf.IndexedSlices(tf.constant([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]), tf.constant([6, 0, 3]), [7, 2])
    for value in (slices, tf.convert_to_tensor(slices)):
        parts = table.split(value)
        joined = tf.concat([tf.convert_to_tensor(part) for part in parts], 0)
        assert np.array_equal(joined, tf.convert_to_tensor(slices))
    assert [type(part) for part in table.split(slices)] == [tf.IndexedSlices] * 3
    assert table.split(0.5) == [0.5] * 3
