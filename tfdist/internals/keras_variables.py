"""How Keras variables are initialized, read by row, and protected from assignments, and how Keras draws seeds."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src import backend
from keras.src.backend.common import global_state
from keras.src.backend.tensorflow import numpy as tensorflow_numpy
from keras.src.initializers.random_initializers import RandomInitializer
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR, global_seed_generator
from tensorflow.python.ops import resource_variable_ops

from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.internals import tensorflow_graphs
from tfdist.internals.keras import containers_of, optimizers, set_tf_variable, tf_variable, with_inner
from tfdist.internals.patching import SharedPatch, surround, surrounded, with_attributes


@contextlib.contextmanager
def looking_up_rows() -> Iterator[None]:
    """Within this context Keras reads only the rows of an embedding that it looks up, and not the whole table.

    The result is the same. But after a sparse update TensorFlow copies a variable each time all of it is read. Contexts
    may overlap, also in several threads.
    """
    with _lookups:
        yield


@functools.cache
def look_up_rows() -> None:
    """From now on Keras reads only the rows of an embedding that it looks up; see `looking_up_rows`."""
    _lookups.__enter__()


def _take(original: Callable[..., Any], x: Any, indices: Any, axis: int | None = None) -> Any:
    value = _readable_by_row(x) if axis == 0 and tf.is_tensor(indices) else None
    if value is None or isinstance(indices, tf.SparseTensor | tf.RaggedTensor):
        return original(x, indices, axis=axis)
    rows = tf.gather(value, tf.where(indices < 0, indices + value.shape[0], indices))
    return x._maybe_autocast(rows)


_lookups = SharedPatch(lambda: surround(tensorflow_numpy, "take", _take))


def _readable_by_row(x: Any) -> Any:
    """The `tf.Variable` from which the rows of a Keras variable can be read; `None` if there is none."""
    if not isinstance(x, backend.Variable):
        return None
    scope = global_state.get_global_attribute("stateless_scope")
    value = None if scope is None else scope.get_current_value(x)
    value = tensorflow_internals.local_copy(x._value if value is None else value)
    return value if hasattr(value, "sparse_read") else None


# From this size on, the saved memory is worth tracing a graph.
_LARGE_BYTES = 1 << 26
# Smaller variables, such as counters and seeds, are always initialized.
_SMALL_BYTES = 1 << 12


@functools.cache
def fill_large_variables_in_place() -> None:
    """From now on Keras initializes a large variable without temporary tensors of its size.

    The value is the same. But eagerly each operation of an initializer allocates its result, so that random numbers
    take three times the memory of the variable, and TensorFlow does not return memory to the system. In a graph an
    operation overwrites its input, unless constant folding keeps it.
    """

    def initialize(original: Callable[..., None], variable: Any, initializer: Any) -> None:
        size_bytes = np.prod(variable._shape) * tf.as_dtype(variable._dtype).size
        if size_bytes < _LARGE_BYTES or not tf.executing_eagerly():
            original(variable, initializer)
            return
        with tensorflow_graphs.optimized(constant_folding=False):
            original(variable, _in_place(initializer))
        _unshare_copies(variable._value)

    surround(backend.Variable, "_initialize_with_initializer", initialize)


@contextlib.contextmanager
def without_memory() -> Iterator[None]:
    """Within this context large Keras variables have a shape and a dtype but no memory, and cannot be read."""

    def initialize(original: Callable[..., None], variable: Any, initializer: Any) -> None:
        if np.prod(variable._shape) * tf.as_dtype(variable._dtype).size < _SMALL_BYTES:
            original(variable, initializer)
            return
        with tf.init_scope():
            variable._value = resource_variable_ops.UninitializedVariable(
                trainable=variable.trainable, name=variable.name, shape=variable._shape, dtype=variable._dtype
            )

    with surrounded(backend.Variable, "_initialize_with_initializer", initialize):
        yield


def _in_place(initializer: Any) -> Any:
    if isinstance(initializer, RandomInitializer):
        return tf.function(initializer, autograph=False)
    if isinstance(initializer, keras.initializers.Constant) and np.ndim(initializer.value) == 0:
        return lambda shape, dtype: tf.fill(shape, tf.cast(initializer.value, dtype))
    return initializer


def _unshare_copies(variable: Any) -> None:
    """Gives each copy of a variable on the CPU its own tensor.

    At first the copies share one tensor. Replicas that update their first rows at the same time would all consider it
    shared and copy it, even the last one.
    """
    for copy in tf.distribute.get_strategy().experimental_local_results(variable)[1:]:
        if "CPU" in copy.device:
            copy.assign(tf.raw_ops.DeepCopy(x=copy.value()))


@contextlib.contextmanager
def backed_by(variables: Sequence[Any], values: Sequence[Any]) -> Iterator[None]:
    """Within this context Keras `variables` are backed by other `tf.Variable`s, which may have other shapes."""
    previous = [(variable._value, variable._shape) for variable in variables]
    try:
        for variable, value in zip(variables, values, strict=True):
            set_tf_variable(variable, value)
        yield
    finally:
        for variable, (value, shape) in zip(variables, previous, strict=True):
            variable._value, variable._shape = value, shape


@contextlib.contextmanager
def on_plain_variables(model: Any, variables: Sequence[Any]) -> Iterator[None]:
    """Within this context Keras `variables` are plain ones with the same values, and the optimizers have no strategy.

    Training in this context does not change the model's variables, even if they have several copies. The same holds
    for a `tf.Variable` with copies in an attribute of a layer, or in a list or dict there.

    Args:
        model: the model.
        variables: all variables of the model and its optimizers.
    """
    mirrored = [
        (container, key, container[key])
        for container, key in containers_of(model, tf.distribute.DistributedValues)
        if isinstance(container, dict | list)
    ]
    plain = {
        id(value): tf.Variable(value.numpy(), dtype=value.dtype, trainable=value.trainable) for *_, value in mirrored
    }
    values = [
        tf.Variable(variable._value.numpy(), dtype=variable._value.dtype, trainable=variable.trainable)
        for variable in variables
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(backed_by(variables, values))
        for container, key, value in mirrored:
            stack.callback(_put, container, key, value)
            _put(container, key, plain[id(value)])
        for optimizer in (part for outer in optimizers(model) for part in with_inner(outer)):
            indices = {optimizer._var_key(v): index for index, v in enumerate(optimizer._trainable_variables)}
            attributes = {
                "_distribution_strategy": tf.distribute.get_strategy(),
                "_trainable_variables_indices": indices,
            }
            stack.enter_context(with_attributes(optimizer, attributes))
        yield


def _put(container: Any, key: Any, value: Any) -> None:
    """Sets an item without the tracking of Keras' containers."""
    (dict if isinstance(container, dict) else list).__setitem__(container, key, value)


def generator_of_unseeded() -> Any:
    """Keras' seed generator for draws without a seed; `None` before the first of them."""
    return global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)


def made_generator_of_unseeded() -> Any:
    """Keras' seed generator for draws without a seed; if there is none, made outside of all graphs and strategies."""
    with tf.init_scope(), tensorflow_internals.without_strategy():
        return global_seed_generator()


def forget_generator_of_unseeded() -> None:
    """Makes Keras create another generator at the next draw without a seed."""
    global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, None)


class _LazyGenerator:
    """A stand-in for Keras' generator, which is made at the first draw."""

    def __getattr__(self, name: str) -> Any:
        if generator_of_unseeded() is self:
            forget_generator_of_unseeded()
        return getattr(made_generator_of_unseeded(), name)


def _keep_in_one_copy(generator: Any) -> None:
    """Gives a generator that was made in the scope of a TensorFlow strategy a variable without a strategy.

    The generator outlives that strategy, and the steps of another strategy would read and update a copy on each device
    of the former.
    """
    if isinstance(tf_variable(generator.state), tf.distribute.DistributedValues):
        with tf.init_scope(), tensorflow_internals.without_strategy():
            copy = tensorflow_internals.local_copy(tf_variable(generator.state))
            with tf.device(copy.device):
                set_tf_variable(generator.state, tf.Variable(copy, trainable=False, name=copy.name.split(":")[0]))


@contextlib.contextmanager
def drawing_in_graphs() -> Iterator[None]:
    """Within this context and thread the first draw without a seed may be in a graph, also within a loop of it.

    Keras makes its generator at that draw, from a number of Python's `random`. Making it earlier would change the
    weights that Python's `random` seeds afterwards, and its variable cannot be made in a loop of a graph.
    """
    generator = generator_of_unseeded()
    if generator is not None:
        if not isinstance(generator, _LazyGenerator):
            _keep_in_one_copy(generator)
        yield
        return
    global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, _LazyGenerator())
    try:
        yield
    finally:
        if isinstance(generator_of_unseeded(), _LazyGenerator):
            forget_generator_of_unseeded()


@contextlib.contextmanager
def drawing_from(generator: Any) -> Iterator[None]:
    """Within this context and thread Keras' random functions without a seed draw from a seed `generator`."""
    previous = generator_of_unseeded()
    global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, generator)
    try:
        yield
    finally:
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, previous)
