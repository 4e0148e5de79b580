"""How Keras variables are filled, read by row, and kept from being changed."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src import backend
from keras.src.backend.common import global_state
from keras.src.backend.tensorflow import numpy as tensorflow_numpy
from keras.src.initializers.random_initializers import RandomInitializer

from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.internals.keras import containers_of, optimizers


@functools.cache
def look_up_rows() -> None:
    """Lets Keras read of an embedding the rows that it takes, from here on, and not the whole table.

    The result is the same. But TensorFlow copies a variable at each reading of the whole, once it has updated some of
    its rows alone.
    """
    original = tensorflow_numpy.take

    @functools.wraps(original)
    def take(x: Any, indices: Any, axis: int | None = None) -> Any:
        value = _readable_by_row(x) if axis == 0 and tf.is_tensor(indices) else None
        if value is None or isinstance(indices, tf.SparseTensor | tf.RaggedTensor):
            return original(x, indices, axis=axis)
        rows = tf.gather(value, tf.where(indices < 0, indices + value.shape[0], indices))
        return x._maybe_autocast(rows)

    tensorflow_numpy.take = take


# From this size on, what is saved is worth tracing a graph.
_LARGE_BYTES = 1 << 26


@functools.cache
def fill_large_variables_in_place() -> None:
    """Lets Keras make the first value of a large variable without further tensors of its size, from here on.

    The value is the same. But done one by one each operation of an initializer has a result of its own, so that random
    numbers take three times the variable, and TensorFlow keeps what it once took. In a graph an operation writes over
    what it read, unless constant folding holds on to that.
    """
    original = backend.Variable._initialize_with_initializer

    @functools.wraps(original)
    def initialize(self: Any, initializer: Any) -> None:
        size_bytes = np.prod(self._shape) * tf.as_dtype(self._dtype).size
        if size_bytes < _LARGE_BYTES or not tf.executing_eagerly():
            original(self, initializer)
            return
        with _without_constant_folding():
            original(self, _in_place(initializer))
        _take_apart(self._value)

    backend.Variable._initialize_with_initializer = initialize


def _in_place(initializer: Any) -> Any:
    if isinstance(initializer, RandomInitializer):
        return tf.function(initializer, autograph=False)
    if isinstance(initializer, keras.initializers.Constant) and np.ndim(initializer.value) == 0:
        return lambda shape, dtype: tf.fill(shape, tf.cast(initializer.value, dtype))
    return initializer


def _take_apart(variable: Any) -> None:
    """Gives each copy of a variable on the CPU a tensor of its own.

    They begin with one for all. Replicas that change its first rows at the same moment would each find it shared and
    copy it, the last one too.
    """
    for copy in tf.distribute.get_strategy().experimental_local_results(variable)[1:]:
        if "CPU" in copy.device:
            copy.assign(tf.raw_ops.DeepCopy(x=copy.value()))


@contextlib.contextmanager
def _without_constant_folding() -> Iterator[None]:
    before = tf.config.optimizer.get_experimental_options().get("constant_folding", True)
    tf.config.optimizer.set_experimental_options({"constant_folding": False})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({"constant_folding": before})


def _readable_by_row(x: Any) -> Any:
    """The variable behind a Keras variable, where that is what it stands for here."""
    if not isinstance(x, backend.Variable):
        return None
    scope = global_state.get_global_attribute("stateless_scope")
    value = None if scope is None else scope.get_current_value(x)
    value = tensorflow_internals.local_copy(x._value if value is None else value)
    return value if hasattr(value, "sparse_read") else None


@contextlib.contextmanager
def on_plain_variables(model: Any, variables: Sequence[Any]) -> Iterator[None]:
    """Meanwhile Keras `variables` are plain ones with the same values, and the optimizers know no strategy.

    What is trained in this context leaves the model's own variables as they are, however many copies they have. That
    also holds for a `tf.Variable` with copies that is an attribute of a layer, or in a list or a dict of one.

    Args:
        model: whose optimizers.
        variables: all that the model and its optimizers have.
    """
    own = [variable._value for variable in variables]
    held = containers_of(model, tf.distribute.DistributedValues)
    places = [(container, key) for container, key in held if isinstance(container, dict | list)]
    raw = [container[key] for container, key in places]
    inside = [part for o in optimizers(model) for part in (o, getattr(o, "inner_optimizer", None)) if part is not None]
    strategies = [optimizer._distribution_strategy for optimizer in inside]
    indices = [optimizer._trainable_variables_indices for optimizer in inside]
    plain = {id(one): tf.Variable(one.numpy(), dtype=one.dtype, trainable=one.trainable) for one in raw}
    try:
        for variable in variables:
            value = variable._value.numpy()
            variable._value = tf.Variable(value, dtype=variable._value.dtype, trainable=variable.trainable)
        for place, one in zip(places, raw, strict=True):
            _put(*place, plain[id(one)])
        for optimizer in inside:
            optimizer._distribution_strategy = tf.distribute.get_strategy()
            known = enumerate(optimizer._trainable_variables)
            optimizer._trainable_variables_indices = {optimizer._var_key(one): index for index, one in known}
        yield
    finally:
        for variable, value in zip(variables, own, strict=True):
            variable._value = value
        for place, one in zip(places, raw, strict=True):
            _put(*place, one)
        for optimizer, strategy, of_variables in zip(inside, strategies, indices, strict=True):
            optimizer._distribution_strategy = strategy
            optimizer._trainable_variables_indices = of_variables


def _put(container: Any, key: Any, value: Any) -> None:
    """Sets an item past what Keras' containers make of it."""
    (dict if isinstance(container, dict) else list).__setitem__(container, key, value)


class _Thread(threading.local):
    assigns = True


_thread = _Thread()


@functools.cache
def _patch_assign() -> None:
    assign = backend.Variable._direct_assign

    @functools.wraps(assign)
    def assign_unless_told(variable: Any, value: Any) -> None:
        if _thread.assigns:
            assign(variable, value)

    backend.Variable._direct_assign = assign_unless_told


@contextlib.contextmanager
def assigning_nothing() -> Iterator[None]:
    """Keras variables keep their values meanwhile, whatever is assigned to them."""
    _patch_assign()
    _thread.assigns = False
    try:
        yield
    finally:
        _thread.assigns = True
