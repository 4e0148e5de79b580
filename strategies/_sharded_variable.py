"""Variables too large for one server: each server has some of the rows.

    Table                                a variable in parts, where Keras expects one
        read          the parts of the servers, one after the other
        look rows up  each server gathers its own, and sends no others
        gradient      that of the parts, in the rows of the whole; sparse where those of the parts are
    above(size)                          a larger variable is made in parts
    by_part(optimizer)                   each server updates its part, and those of the optimizer's slots, by itself

What is not done by part is done on the whole table, which is slower and gives the same.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.internals import keras as keras_internals
from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.internals import tensorflow_patches
from tfdist.internals.keras import tf_variable

FIRST_SERVER = "/job:ps/task:0/device:CPU:0"

# Those that compute each element of an update from the same element of gradient, variable and slots alone. The others
# take norms, means or products over a variable.
BY_ELEMENT: tuple[type, ...] = (
    keras.optimizers.SGD,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.Adamax,
    keras.optimizers.Nadam,
    keras.optimizers.RMSprop,
    keras.optimizers.Adagrad,
    keras.optimizers.Adadelta,
    keras.optimizers.Ftrl,
    keras.optimizers.Lion,
)


class _GradientOfParts:
    """How TensorFlow's tape takes the gradient of a `Table`."""

    def get_gradient_components(self, table: Table) -> list[tf.Tensor]:
        """What the tape knows instead."""
        return [part.handle for part in table.variables]

    def replace_gradient_components(self, table: Table, gradients: Sequence[Any]) -> Any:
        """The gradient of the whole from those of the parts."""
        if all(gradient is None for gradient in gradients):
            return None
        of_parts = list(zip(gradients, table.variables, table.first_rows, strict=True))
        if not all(gradient is None or isinstance(gradient, tf.IndexedSlices) for gradient in gradients):
            dense = [tf.zeros(part.shape, part.dtype) if g is None else g for g, part, _ in of_parts]
            return tf.concat([tf.convert_to_tensor(gradient) for gradient in dense], 0)
        sparse = [(g.values, tf.cast(g.indices, tf.int64) + first) for g, _, first in of_parts if g is not None]
        values, rows = (tf.concat(pieces, 0) for pieces in zip(*sparse, strict=True))
        return tf.IndexedSlices(values, rows, tf.constant(table.shape.as_list()))


class Table(tensorflow_internals.ShardedVariable):
    """A variable, `[rows, ...]`, of which each part has some of the rows and lies on another server.

    Args:
        parts: with equal numbers of rows but for one, the larger ones first.
        name: of the whole.
    """

    __composite_gradient__ = _GradientOfParts()

    def __init__(self, parts: Sequence[tf.Variable], name: str):
        super().__init__(list(parts), name=name)
        for part in parts:  # so that Keras' optimizers know whose slots they are to take
            tensorflow_internals.set_container(part, self)

    @property
    def first_rows(self) -> list[int]:
        """The number of the first row of each part."""
        return tensorflow_internals.first_rows(self)

    @property
    def handle(self) -> Table:
        """What Keras gives to the tape in the place of a variable."""
        return self

    @property
    def device(self) -> str:
        """That of the first part."""
        return str(self.variables[0].device)

    def sparse_read(self, indices: tf.Tensor, name: str | None = None) -> tf.Tensor:
        """The rows `indices`, int of any shape."""
        return tf.nn.embedding_lookup(self.variables, indices, name=name)

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return tf.convert_to_tensor(tf.concat(self.variables, 0, name=name or "concat"), dtype)

    def __array__(self, dtype: Any = None) -> np.ndarray:
        return np.concatenate([part.numpy() for part in self.variables]).astype(dtype or self.dtype.as_numpy_dtype)

    def split(self, value: Any) -> list[Any]:
        """What each part needs of `value`: its rows if it has the shape of the whole, else all of it."""
        if isinstance(value, Table):
            return value.variables
        if isinstance(value, tf.IndexedSlices):
            slices = zip(tensorflow_internals.slices_by_part(self, value), self.variables, strict=True)
            return [tf.IndexedSlices(s.values, s.indices, tf.constant(part.shape.as_list())) for s, part in slices]
        if tf.is_tensor(value) and self.shape == value.shape:
            return tf.split(value, [part.shape[0] for part in self.variables])
        return [value] * len(self.variables)


class _Thread(threading.local):
    largest_bytes = math.inf  # of a variable that is left whole
    slots: Sequence[Any] | None = None  # of the optimizer whose update is made by part


_thread = _Thread()


@contextlib.contextmanager
def above(size_bytes: float) -> Iterator[None]:
    """A variable that is made in this context is a `Table` if it is larger."""
    before = _thread.largest_bytes
    _thread.largest_bytes = size_bytes
    try:
        yield
    finally:
        _thread.largest_bytes = before


@contextlib.contextmanager
def by_part(optimizer: Any) -> Iterator[None]:
    """While an update is traced in this context, `optimizer` updates each part of a table, where its formula allows."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if type(inner) in BY_ELEMENT:
        _thread.slots = [slot for slot in inner.variables if isinstance(tf_variable(slot), Table)]
    try:
        yield
    finally:
        _thread.slots = None


@contextlib.contextmanager
def _reduced_to(part: int, table: Table) -> Iterator[None]:
    """Meanwhile the optimizer finds in the slots of `table` those of one part."""
    slots = [slot for slot in _thread.slots or () if tf_variable(slot).shape == table.shape]
    wholes = [(slot, tf_variable(slot)) for slot in slots]
    for slot, whole in wholes:
        keras_internals.set_tf_variable(slot, whole.variables[part])
    try:
        yield
    finally:
        for slot, whole in wholes:
            keras_internals.set_tf_variable(slot, whole)


def install(strategy: tf.distribute.ParameterServerStrategy, parts: int) -> None:
    """From now on `strategy` makes a `Table` of up to `parts` parts of a large variable (see `above`)."""

    def create(make: Callable[..., Any], *, initial_value: Any, name: str | None = None, **arguments: Any) -> Any:
        # Made as a whole, so that the values are those of one device, and not here, where no table is to be.
        with tf.device(FIRST_SERVER):
            value = initial_value() if callable(initial_value) else initial_value
            value = tf.convert_to_tensor(value, arguments.get("dtype"))
        beside = arguments.get("colocate_with")
        if isinstance(beside, Table):
            del arguments["colocate_with"]
            placements = [{"colocate_with": part} for part in beside.variables] if beside.shape == value.shape else None
        else:
            large = value.shape.rank and value.shape.num_elements() * value.dtype.size > _thread.largest_bytes
            placements = [{}] * min(parts, value.shape[0]) if large and beside is None else None
        if not placements or len(placements) < 2:
            return make(initial_value=value, name=name, **arguments)
        name = name or "table"
        ends = np.cumsum([len(rows) for rows in np.array_split(np.arange(value.shape[0]), len(placements))])
        made: list[tf.Variable] = []
        for number, (first, end) in enumerate(zip([0, *ends], ends, strict=False)):
            with tf.device(FIRST_SERVER):
                rows = value[first:end]
            made.append(make(initial_value=rows, name=f"{name}/part_{number}", **arguments, **placements[number]))
        return Table(made, name)

    def update(apply: Callable[..., Any], variable: Any, function: Any, arguments: Sequence[Any]) -> Any:
        if not isinstance(variable, Table):
            return apply(variable, function, arguments)
        if _thread.slots is None:
            return function(variable, *arguments)
        with tf.device(None):  # where the gradient is: a server gets the rows of its part alone
            pieces = [variable.split(argument) for argument in arguments]
        for number, part in enumerate(variable.variables):
            with _reduced_to(number, variable):
                apply(part, function, [of_each[number] for of_each in pieces])
        return None

    tensorflow_patches.around_variables(strategy, create, update)
