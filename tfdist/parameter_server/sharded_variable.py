"""Variables too large for one server: each server stores some of the rows.

    Table                a variable in parts, where Keras expects a single variable
        read             concatenates the parts
        lookup           each server gathers and sends only its own rows
        gradient         combines the gradients of the parts; sparse if they are sparse
    above(size)          context in which larger variables are created as tables
    by_part(optimizer)   context in which each server updates its part of a table and of the optimizer's slots

An update that cannot be made by part is made on the whole table, which is slower and has the same result.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_optimizers
from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.internals.keras import tf_variable

FIRST_SERVER = "/job:ps/task:0/device:CPU:0"


class _GradientOfParts:
    """Tells TensorFlow's tape how to take the gradient of a `Table`."""

    def get_gradient_components(self, table: Table) -> list[tf.Tensor]:
        """Returns the tensors that the tape records in place of `table`."""
        return [part.handle for part in table.variables]

    def replace_gradient_components(self, table: Table, gradients: Sequence[Any]) -> Any:
        """Returns the gradient of the table from the gradients of its parts."""
        if all(gradient is None for gradient in gradients):
            return None
        parts = list(zip(gradients, table.variables, table.first_rows, strict=True))
        if not all(gradient is None or isinstance(gradient, tf.IndexedSlices) for gradient in gradients):
            dense = [tf.zeros(part.shape, part.dtype) if g is None else g for g, part, _ in parts]
            return tf.concat([tf.convert_to_tensor(gradient) for gradient in dense], 0)
        sparse = [(g.values, tf.cast(g.indices, tf.int64) + first) for g, _, first in parts if g is not None]
        values, rows = (tf.concat(pieces, 0) for pieces in zip(*sparse, strict=True))
        return tf.IndexedSlices(values, rows, tf.constant(table.shape.as_list()))


class Table(tensorflow_internals.ShardedVariable):
    """A variable `[rows, ...]` that is split by rows into parts on different servers.

    Args:
        parts: the parts; their numbers of rows differ by at most 1, the larger parts first.
        name: the name of the table.
    """

    __composite_gradient__ = _GradientOfParts()

    def __init__(self, parts: Sequence[tf.Variable], name: str):
        super().__init__(list(parts), name=name)
        for part in parts:  # so that Keras' optimizers find the slots of the table
            tensorflow_internals.set_container(part, self)

    @property
    def first_rows(self) -> list[int]:
        """The index of the first row of each part."""
        return tensorflow_internals.first_rows(self)

    @property
    def handle(self) -> Table:
        """The object that Keras passes to the tape for a variable."""
        return self

    @property
    def device(self) -> str:
        """The device of the first part."""
        return str(self.variables[0].device)

    def sparse_read(self, indices: tf.Tensor, name: str | None = None) -> tf.Tensor:
        """Returns the rows `indices`, an int tensor of any shape."""
        return tf.nn.embedding_lookup(self.variables, indices, name=name)

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return tf.convert_to_tensor(tf.concat(self.variables, 0, name=name or "concat"), dtype)

    def __array__(self, dtype: Any = None) -> np.ndarray:
        return np.concatenate([part.numpy() for part in self.variables]).astype(dtype or self.dtype.as_numpy_dtype)

    def split(self, value: Any) -> list[Any]:
        """Returns `value` for each part: the part's rows if `value` has the table's shape, else all of `value`."""
        if isinstance(value, Table):
            return value.variables
        if isinstance(value, tf.IndexedSlices):
            slices = zip(tensorflow_internals.slices_by_part(self, value), self.variables, strict=True)
            return [tf.IndexedSlices(s.values, s.indices, tf.constant(part.shape.as_list())) for s, part in slices]
        if tf.is_tensor(value) and self.shape == value.shape:
            return tf.split(value, [part.shape[0] for part in self.variables])
        return [value] * len(self.variables)


class _ThreadState(threading.local):
    largest_bytes = math.inf  # larger variables are created as tables
    slots: Sequence[Any] | None = None  # slots of the optimizer that updates by part; `None` outside `by_part`


_thread = _ThreadState()


@contextlib.contextmanager
def above(size_bytes: float) -> Iterator[None]:
    """Within this context, variables larger than `size_bytes` are created as `Table`s."""
    previous = _thread.largest_bytes
    _thread.largest_bytes = size_bytes
    try:
        yield
    finally:
        _thread.largest_bytes = previous


@contextlib.contextmanager
def by_part(optimizer: Any) -> Iterator[None]:
    """Within this context, updates are traced by part if the optimizer's formula is elementwise."""
    inner = keras_internals.inner(optimizer)
    if type(inner) in keras_optimizers.ELEMENTWISE:
        _thread.slots = [slot for slot in inner.variables if isinstance(tf_variable(slot), Table)]
    try:
        yield
    finally:
        _thread.slots = None


@contextlib.contextmanager
def _reduced_to(part: int, table: Table) -> Iterator[None]:
    """Within this context, the optimizer's slots for `table` are reduced to those of one part."""
    slots = [(slot, tf_variable(slot)) for slot in _thread.slots or () if tf_variable(slot).shape == table.shape]
    for slot, slot_table in slots:
        keras_internals.set_tf_variable(slot, slot_table.variables[part])
    try:
        yield
    finally:
        for slot, slot_table in slots:
            keras_internals.set_tf_variable(slot, slot_table)


def install(strategy: tf.distribute.ParameterServerStrategy, parts: int) -> None:
    """Lets `strategy` create large variables (see `above`) as `Table`s of up to `parts` parts."""

    def create(make: Callable[..., Any], *, initial_value: Any, name: str | None = None, **arguments: Any) -> Any:
        # The initial value is computed as a whole, to equal that of one device, on a server, since it may not fit here.
        with tf.device(FIRST_SERVER):
            value = initial_value() if callable(initial_value) else initial_value
            value = tf.convert_to_tensor(value, arguments.get("dtype"))
        neighbour = arguments.get("colocate_with")
        if isinstance(neighbour, Table):
            del arguments["colocate_with"]
            same_shape = neighbour.shape == value.shape
            placements = [{"colocate_with": part} for part in neighbour.variables] if same_shape else None
        else:
            large = value.shape.rank and value.shape.num_elements() * value.dtype.size > _thread.largest_bytes
            placements = [{}] * min(parts, value.shape[0]) if large and neighbour is None else None
        if not placements or len(placements) < 2:
            return make(initial_value=value, name=name, **arguments)
        name = name or "table"
        ends = np.cumsum([len(rows) for rows in np.array_split(np.arange(value.shape[0]), len(placements))])
        variables: list[tf.Variable] = []
        for number, (first, end) in enumerate(zip([0, *ends], ends, strict=False)):
            with tf.device(FIRST_SERVER):
                rows = value[first:end]
            variables.append(make(initial_value=rows, name=f"{name}/part_{number}", **arguments, **placements[number]))
        return Table(variables, name)

    def update(apply: Callable[..., Any], variable: Any, function: Any, arguments: Sequence[Any]) -> Any:
        if not isinstance(variable, Table):
            return apply(variable, function, arguments)
        if _thread.slots is None:
            return function(variable, *arguments)
        with tf.device(None):  # on the gradient's device, so that a server is sent only the rows of its part
            split = [variable.split(argument) for argument in arguments]
        for number, part in enumerate(variable.variables):
            with _reduced_to(number, variable):
                apply(part, function, [pieces[number] for pieces in split])
        return None

    tensorflow_internals.around_new_variables(strategy, create)
    tensorflow_internals.around_updates(strategy, update)
