"""How Keras variables are initialized, read by row, and protected from assignments."""

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
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR, global_seed_generator
from tensorflow.python.ops import resource_variable_ops

from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.internals import tensorflow_functions
from tfdist.internals.keras import containers_of, optimizers, set_tf_variable, tf_variable


@contextlib.contextmanager
def looking_up_rows() -> Iterator[None]:
    """In this context Keras reads only the rows of an embedding that it looks up, and not the whole table.

    The result is the same. But after a sparse update TensorFlow copies a variable each time all of it is read. Contexts
    may overlap, on several threads too: Keras has its own function again after the last of them.
    """
    _lookups.begin()
    try:
        yield
    finally:
        _lookups.end()


class _Lookups:
    """Counts the contexts of `looking_up_rows`, and replaces Keras' function while there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._contexts = 0
        self._original: Any = None

    def begin(self) -> None:
        with self._lock:
            self._contexts += 1
            if self._contexts == 1:
                self._original = tensorflow_numpy.take
                tensorflow_numpy.take = _row_by_row(self._original)

    def end(self) -> None:
        with self._lock:
            self._contexts -= 1
            if not self._contexts:
                tensorflow_numpy.take = self._original


_lookups = _Lookups()


def _row_by_row(original: Any) -> Any:
    @functools.wraps(original)
    def take(x: Any, indices: Any, axis: int | None = None) -> Any:
        value = _readable_by_row(x) if axis == 0 and tf.is_tensor(indices) else None
        if value is None or isinstance(indices, tf.SparseTensor | tf.RaggedTensor):
            return original(x, indices, axis=axis)
        rows = tf.gather(value, tf.where(indices < 0, indices + value.shape[0], indices))
        return x._maybe_autocast(rows)

    return take


@functools.cache
def look_up_rows() -> None:
    """From now on, Keras reads only the rows of an embedding that it looks up; see `looking_up_rows`."""
    _lookups.begin()


# From this size on, the saved memory is worth tracing a graph.
_LARGE_BYTES = 1 << 26
# Up to this size variables such as counters and seeds are made as ever.
_SMALL_BYTES = 1 << 12


@functools.cache
def fill_large_variables_in_place() -> None:
    """From now on Keras initializes a large variable without other tensors of its size.

    The value is the same. But eagerly each operation of an initializer allocates its result, so that random numbers
    take three times the memory of the variable, and TensorFlow does not give memory back. In a graph an operation
    overwrites its input, unless constant folding keeps it.
    """
    original = backend.Variable._initialize_with_initializer

    @functools.wraps(original)
    def initialize(self: Any, initializer: Any) -> None:
        size_bytes = np.prod(self._shape) * tf.as_dtype(self._dtype).size
        if size_bytes < _LARGE_BYTES or not tf.executing_eagerly():
            original(self, initializer)
            return
        with tensorflow_functions.optimized(constant_folding=False):
            original(self, _in_place(initializer))
        _unshare_copies(self._value)

    backend.Variable._initialize_with_initializer = initialize


@contextlib.contextmanager
def without_memory() -> Iterator[None]:
    """In this context Keras makes large variables that have a shape and a dtype, and no memory; they cannot be read."""
    original = backend.Variable._initialize_with_initializer

    def initialize(self: Any, initializer: Any) -> None:
        if np.prod(self._shape) * tf.as_dtype(self._dtype).size < _SMALL_BYTES:
            original(self, initializer)
            return
        with tf.init_scope():
            self._value = resource_variable_ops.UninitializedVariable(
                trainable=self.trainable, name=self.name, shape=self._shape, dtype=self._dtype
            )

    backend.Variable._initialize_with_initializer = initialize
    try:
        yield
    finally:
        backend.Variable._initialize_with_initializer = original


def _in_place(initializer: Any) -> Any:
    if isinstance(initializer, RandomInitializer):
        return tf.function(initializer, autograph=False)
    if isinstance(initializer, keras.initializers.Constant) and np.ndim(initializer.value) == 0:
        return lambda shape, dtype: tf.fill(shape, tf.cast(initializer.value, dtype))
    return initializer


def _unshare_copies(variable: Any) -> None:
    """Gives each copy of a variable on the CPU its own tensor.

    At first the copies share one tensor. Replicas that update their first rows at the same time would each find it
    shared and copy it, even the last one.
    """
    for copy in tf.distribute.get_strategy().experimental_local_results(variable)[1:]:
        if "CPU" in copy.device:
            copy.assign(tf.raw_ops.DeepCopy(x=copy.value()))


def _readable_by_row(x: Any) -> Any:
    """The `tf.Variable` from which the rows of a Keras variable can be read; `None` if there is none."""
    if not isinstance(x, backend.Variable):
        return None
    scope = global_state.get_global_attribute("stateless_scope")
    value = None if scope is None else scope.get_current_value(x)
    value = tensorflow_internals.local_copy(x._value if value is None else value)
    return value if hasattr(value, "sparse_read") else None


@contextlib.contextmanager
def on_plain_variables(model: Any, variables: Sequence[Any]) -> Iterator[None]:
    """In this context Keras `variables` are plain ones with the same values, and the optimizers have no strategy.

    Training in this context does not change the model's own variables, however many copies they have. The same holds
    for a `tf.Variable` with copies in an attribute of a layer, or in a list or dict there.

    Args:
        model: the model.
        variables: all variables of the model and its optimizers.
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
    """Sets an item without the tracking of Keras' containers."""
    (dict if isinstance(container, dict) else list).__setitem__(container, key, value)


class _Thread(threading.local):
    assigns = True


_thread = _Thread()


@functools.cache
def _patch_assign() -> None:
    assign = backend.Variable._direct_assign

    @functools.wraps(assign)
    def assign_if_enabled(variable: Any, value: Any) -> None:
        if _thread.assigns:
            assign(variable, value)

    backend.Variable._direct_assign = assign_if_enabled


@contextlib.contextmanager
def assigning_nothing() -> Iterator[None]:
    """In this context assignments to Keras variables have no effect."""
    _patch_assign()
    _thread.assigns = False
    try:
        yield
    finally:
        _thread.assigns = True


@contextlib.contextmanager
def in_place_of(variables: Sequence[Any], others: Sequence[Any]) -> Iterator[None]:
    """In this context, Keras `variables` stand for `others`, `tf.Variable`s of the same shapes."""
    before = list(map(tf_variable, variables))
    for variable, other in zip(variables, others, strict=True):
        set_tf_variable(variable, other)
    try:
        yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            set_tf_variable(variable, value)


def generator_of_unseeded() -> Any:
    """Keras' seed generator for draws without a seed; `None` before the first of them."""
    return global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)


def made_generator_of_unseeded() -> Any:
    """Keras' seed generator for draws without a seed, made if need be: outside of all graphs, and of no strategy."""
    with tf.init_scope(), tensorflow_internals.without_strategy():
        return global_seed_generator()


def forget_generator_of_unseeded() -> None:
    """Keras makes another generator at the next draw without a seed."""
    global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, None)


class _Unmade:
    """Stands for Keras' generator, which is made when it is first drawn from."""

    def __getattr__(self, name: str) -> Any:
        if generator_of_unseeded() is self:
            forget_generator_of_unseeded()
        return getattr(made_generator_of_unseeded(), name)


def _keep_in_one_copy(generator: Any) -> None:
    """Gives a generator, which the scope of a strategy of TensorFlow may have made, a variable of no strategy.

    It outlives that strategy: the steps of another one would read and update a copy on each device of the former.
    """
    if isinstance(tf_variable(generator.state), tf.distribute.DistributedValues):
        with tf.init_scope(), tensorflow_internals.without_strategy():
            copy = tensorflow_internals.local_copy(tf_variable(generator.state))
            with tf.device(copy.device):
                set_tf_variable(generator.state, tf.Variable(copy, trainable=False, name=copy.name.split(":")[0]))


@contextlib.contextmanager
def drawing_in_graphs() -> Iterator[None]:
    """In this context, and this thread, the first draw without a seed may be in a graph, also within a loop of it.

    Keras makes its generator at that draw, with a number from Python's `random`: not before, since the weights that it
    draws afterwards would be others. Its variable cannot be made in a loop of a graph.
    """
    made = generator_of_unseeded()
    if made is not None:
        if not isinstance(made, _Unmade):
            _keep_in_one_copy(made)
        yield
        return
    global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, _Unmade())
    try:
        yield
    finally:
        if isinstance(generator_of_unseeded(), _Unmade):
            forget_generator_of_unseeded()


@contextlib.contextmanager
def drawing_from(generator: Any) -> Iterator[None]:
    """In this context, and this thread, Keras' random functions without a seed draw from a seed `generator`."""
    before = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, generator)
    try:
        yield
    finally:
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, before)
