"""Reads and writes variables without a second copy of a large one in memory, and finds the copies of a variable.

Synopsis:

    >>> variable = tf.Variable([1.0, 2.0])
    >>> read(variable)
    array([1., 2.], dtype=float32)
    >>> with filled(variable) as content:
    ...     content[:] = 0
    >>> read(variable)
    array([0., 0.], dtype=float32)
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import values
from tensorflow.python.ops import resource_variable_ops
from tensorflow.python.saved_model import save_context
from tensorflow.python.trackable import base

_NUMBERS = {"__float__": float, "__int__": int, "__complex__": complex}


@functools.cache
def _with_numbers(kind: type) -> type:
    """A class of mirrored variables whose scalars, like those of plain variables, convert to Python numbers."""

    def converting(to: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda variable: to(variable.numpy())

    metadata = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind,), metadata | {name: converting(to) for name, to in _NUMBERS.items()})


@contextlib.contextmanager
def converting_to_numbers() -> Iterator[None]:
    """Variables that are made in this context, inside the scope of a strategy, can be converted by `float` and `int`.

    So `float(optimizer.learning_rate)` works in a callback, as it does with a plain variable.
    """

    def make(next_creator: Callable[..., Any], **options: Any) -> Any:
        variable = next_creator(**options)
        if isinstance(variable, tf.distribute.DistributedValues) and not hasattr(type(variable), "__float__"):
            kind: Any = type(variable)
            variable.__class__ = _with_numbers(kind)
        return variable

    with tf.variable_creator_scope(make):
        yield


def without_value(
    shape: Sequence[int], dtype: tf.DType, device: str, name: str | None = None, trainable: bool = False
) -> tf.Variable:
    """A variable without a strategy, which takes no memory until a value is assigned."""
    lengths = list(shape)
    with tf.init_scope(), tf.device(device):
        return resource_variable_ops.UninitializedVariable(trainable=trainable, shape=lengths, dtype=dtype, name=name)


# Larger pieces are slower: the C library allocates each from the system, which zeroes every page first.
PIECE_BYTES = 1 << 24


def in_words(dtype: Any, shape: Iterable[int]) -> str:
    """The description of a variable in messages and checkpoints, such as "float32 [4,3]"."""
    return f"{tf.as_dtype(dtype).name} [{','.join(map(str, shape))}]"


def initial(value: Any, dtype: tf.DType | None) -> tf.Tensor:
    """The tensor of an `initial_value` of `tf.Variable`, which may be a function, or come from a checkpoint."""
    value = value() if callable(value) else value
    if isinstance(value, base.CheckpointInitialValue):
        value = value.wrapped_value
    return tf.convert_to_tensor(value, dtype)


def copies(variable: Any) -> list[Any]:
    """The plain variables behind a Keras variable or a `tf.Variable`: one copy per replica of this process."""
    value = getattr(variable, "_value", variable)
    if isinstance(value, tf.distribute.DistributedValues):
        return list(value.distribute_strategy.experimental_local_results(value))
    return [value]


def container(handle: tf.Tensor) -> Any:
    """The variable of a `tf.distribute.Strategy` that has a copy with this handle; `None` if there is none."""
    reference = getattr(handle, "_distributed_container", None)
    return None if reference is None else reference()


def set_container_of_copies(variable: Any) -> None:
    """Makes `container` find `variable` by the handles of its copies, as it does unless a `tf.function` has made it."""
    value = getattr(variable, "_value", variable)
    if isinstance(value, values.DistributedVariable):
        for copy in copies(value):
            if container(copy.handle) is None:
                copy.handle._distributed_container = weakref.ref(value)


def is_sum_of_copies(variable: Any) -> bool:
    """Whether the value of a strategy's variable is the sum of its copies, as for the variables of metrics."""
    on_read, of_sum = tf.VariableSynchronization.ON_READ, tf.VariableAggregation.SUM
    return variable.synchronization == on_read and variable.aggregation == of_sum


@contextlib.contextmanager
def first_copies() -> Iterator[None]:
    """Code that is traced in this context reads and assigns only the first copy of each variable of a strategy.

    It is the context in which TensorFlow exports a model for one device. Methods that a strategy's variables lack are
    those of the first copy meanwhile.
    """
    existing = vars(values.DistributedVariable)
    with save_context.save_context(tf.saved_model.SaveOptions()), contextlib.ExitStack() as stack:
        for name in _PLAIN_METHODS:
            if name not in existing:
                setattr(values.DistributedVariable, name, _of_first_copy(name))
                stack.callback(delattr, values.DistributedVariable, name)
        yield


_PLAIN_METHODS = (
    *("batch_scatter_update", "gather_nd", "scatter_nd_add", "scatter_nd_max", "scatter_nd_min", "scatter_nd_sub"),
    *("scatter_nd_update", "sparse_read", "count_up_to"),
)


def _of_first_copy(name: str) -> Any:
    def method(variable: Any, *arguments: Any, **named: Any) -> Any:
        return getattr(variable._primary, name)(*arguments, **named)

    return method


def size_bytes(variable: tf.Variable) -> int:
    """The size of a variable's value."""
    return math.prod(variable.shape) * np.dtype(variable.dtype.as_numpy_dtype).itemsize


def read(variable: tf.Variable) -> np.ndarray:
    """The value of a variable, which may share the memory of the variable: use it before the variable changes."""
    value = tf.convert_to_tensor(variable)
    return np.asarray(value if value.shape.rank else value.numpy())  # NumPy rejects bfloat16 scalars


def memory(values: np.ndarray) -> np.ndarray:
    """The memory of a C-contiguous array, as an array `[n]` of bytes."""
    return values.reshape(-1).view(np.uint8)


@contextlib.contextmanager
def filled(variable: tf.Variable) -> Iterator[np.ndarray]:
    """Yields an array `[n]` of bytes for a new value, which is assigned at the end of the context.

    The old value is freed first, so that the two are never in memory together. Assigning slices of a variable would not
    do, because TensorFlow would then copy all of it at each later read.
    """
    free(variable)
    with tf.device("CPU:0"):
        value = tf.raw_ops.Empty(shape=variable.shape.as_list(), dtype=variable.dtype)
    # The tensor is new and not shared, so its memory may be written to, although NumPy does not allow it.
    yield np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes(variable)).from_address(np.asarray(value).ctypes.data))
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)


def free(variable: tf.Variable) -> None:
    """Frees the memory of a value that is no longer read."""
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=tf.zeros([0], variable.dtype))


def fill(variable: tf.Variable, values: np.ndarray) -> None:
    """Assigns `values`, which have the shape and dtype of the variable."""
    if values.nbytes <= PIECE_BYTES:
        variable.assign(values)
        return
    with filled(variable) as content:
        content[:] = memory(values)


def packs(variables: Iterable[Any], most_bytes: int) -> Iterator[list[Sequence[tf.Variable]]]:
    """Groups variables, given as their copies and in order, into lists of at most `most_bytes`.

    The size of a variable is that of one copy; a larger variable has a list of its own.
    """
    pack: list[Sequence[tf.Variable]] = []
    size = 0
    for variable_copies in map(copies, variables):
        if pack and size + size_bytes(variable_copies[0]) > most_bytes:
            yield pack
            pack, size = [], 0
        pack.append(variable_copies)
        size += size_bytes(variable_copies[0])
    if pack:
        yield pack
