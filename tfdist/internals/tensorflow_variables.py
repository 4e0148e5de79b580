"""Reads and fills variables without a second copy of a large one in memory.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import values
from tensorflow.python.ops import resource_variable_ops
from tensorflow.python.saved_model import save_context

_NUMBERS = {"__float__": float, "__int__": int, "__complex__": complex}


@functools.cache
def _with_numbers(kind: type) -> type:
    """A class of variables with copies, with what plain variables have: scalars convert to numbers of Python."""

    def converting(to: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda variable: to(variable.numpy())

    described = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind,), described | {name: converting(to) for name, to in _NUMBERS.items()})


@contextlib.contextmanager
def converting_to_numbers() -> Iterator[None]:
    """In this context, inside the scope of a strategy, `float` and `int` take the variables that are made.

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
    """A variable that belongs to no strategy and takes no memory before something is assigned to it."""
    lengths = list(shape)
    with tf.init_scope(), tf.device(device):
        return resource_variable_ops.UninitializedVariable(trainable=trainable, shape=lengths, dtype=dtype, name=name)


# Longer ones are slower: the C library asks the system for the memory of each, and every page of it is zeroed first.
PIECE_BYTES = 1 << 24


def in_words(dtype: Any, shape: Iterable[int]) -> str:
    """How messages and checkpoints describe a variable, such as "float32 [4,3]"."""
    return f"{tf.as_dtype(dtype).name} [{','.join(map(str, shape))}]"


def copies(variable: Any) -> list[Any]:
    """The plain variables behind a Keras variable or a `tf.Variable`: one copy per replica of this process."""
    value = getattr(variable, "_value", variable)
    if isinstance(value, tf.distribute.DistributedValues):
        return list(value.distribute_strategy.experimental_local_results(value))
    return [value]


def container(handle: tf.Tensor) -> Any:
    """The variable of a `tf.distribute.Strategy`, one of whose copies has this handle; `None` if there is none."""
    reference = getattr(handle, "_distributed_container", None)
    return None if reference is None else reference()


def is_sum_of_copies(variable: Any) -> bool:
    """Whether the value of a strategy's variable is the sum of its copies, as that of a metric is."""
    on_read, of_sum = tf.VariableSynchronization.ON_READ, tf.VariableAggregation.SUM
    return variable.synchronization == on_read and variable.aggregation == of_sum


@contextlib.contextmanager
def first_copies() -> Iterator[None]:
    """Code that is traced in this context reads and assigns the first copy of each variable of a strategy alone.

    It is the context in which TensorFlow exports a model for one device. Methods that TensorFlow has not written for a
    strategy's variables are those of the first copy meanwhile.
    """
    own = vars(values.DistributedVariable)
    with save_context.save_context(tf.saved_model.SaveOptions()), contextlib.ExitStack() as stack:
        for name in _OF_PLAIN_VARIABLES:
            if name not in own:
                setattr(values.DistributedVariable, name, _of_first_copy(name))
                stack.callback(delattr, values.DistributedVariable, name)
        yield


_OF_PLAIN_VARIABLES = (
    *("batch_scatter_update", "gather_nd", "scatter_nd_add", "scatter_nd_max", "scatter_nd_min", "scatter_nd_sub"),
    *("scatter_nd_update", "sparse_read", "count_up_to"),
)


def _of_first_copy(name: str) -> Any:
    def method(variable: Any, *arguments: Any, **named: Any) -> Any:
        return getattr(variable._primary, name)(*arguments, **named)

    return method


def size_bytes(variable: tf.Variable) -> int:
    """The size of its values."""
    return math.prod(variable.shape) * np.dtype(variable.dtype.as_numpy_dtype).itemsize


def read(variable: tf.Variable) -> np.ndarray:
    """The values. They may be in the memory of the variable: use them before it changes."""
    value = tf.convert_to_tensor(variable)
    return np.asarray(value if value.shape.rank else value.numpy())  # NumPy refuses scalars of bfloat16


def memory(values: np.ndarray) -> np.ndarray:
    """The memory of a C-contiguous array, as an array `[n]` of bytes."""
    return values.reshape(-1).view(np.uint8)


@contextlib.contextmanager
def filled(variable: tf.Variable) -> Iterator[np.ndarray]:
    """The context in which a new value is written, as an array `[n]` of bytes; the variable has it at the end.

    The old value is freed before, so that the two are not in memory together. An assignment of a part of a variable
    would not do: TensorFlow then copies all of it at each later read.
    """
    free(variable)
    with tf.device("CPU:0"):
        value = tf.raw_ops.Empty(shape=variable.shape.as_list(), dtype=variable.dtype)
    # The tensor is new and nobody else has it, so that its memory may be written to, which NumPy does not allow.
    yield np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes(variable)).from_address(_address(value)))
    _assign_any_shape(variable, value)


def free(variable: tf.Variable) -> None:
    """Frees the memory of a value that nobody reads any more."""
    _assign_any_shape(variable, tf.zeros([0], variable.dtype))


def _assign_any_shape(variable: tf.Variable, value: tf.Tensor) -> None:
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)


def _address(value: tf.Tensor) -> int:
    return int(np.asarray(value).ctypes.data)


def fill(variable: tf.Variable, values: np.ndarray) -> None:
    """Assigns `values`, which have its shape and dtype."""
    if values.nbytes <= PIECE_BYTES:
        variable.assign(values)
        return
    with filled(variable) as content:
        content[:] = memory(values)


def packs(variables: Iterable[Any], most_bytes: int) -> Iterator[list[Sequence[tf.Variable]]]:
    """The copies of all variables, in their order, in lists of at most `most_bytes`; a larger one is alone in its list.

    The size is that of one copy.
    """
    pack: list[Sequence[tf.Variable]] = []
    size = 0
    for held in map(copies, variables):
        if pack and size + size_bytes(held[0]) > most_bytes:
            yield pack
            pack, size = [], 0
        pack.append(held)
        size += size_bytes(held[0])
    if pack:
        yield pack
