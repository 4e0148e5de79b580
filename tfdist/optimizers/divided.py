"""What optimizers whose state is divided over processes have in common: slots in parts, and saving as a whole."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.groups import ProcessGroup, parts
from tfdist.groups.parts import Part
from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_optimizers, tensorflow_variables
from tfdist.internals import tensorflow as tensorflow_internals


class DividedOptimizer:
    """The part of one optimizer that this process has.

    Args:
        optimizer: of Keras; built for all variables that it updates, or not built.
        group: of the processes.
        meet: is called with what this process is about to do, and raises an error if another one does something else.
    """

    def __init__(self, optimizer: Any, group: ProcessGroup, meet: Callable[[str], None]):
        self.optimizer = optimizer
        self._group = group
        self._meet = meet
        self._gathered: dict[int, np.ndarray] | None = None  # see `whole`; by the `id` of the variable
        # Keras saves one that scales the loss with its variables and those of the one inside, and that one again.
        for one in {id(one): one for one in (optimizer, keras_optimizers.inner(optimizer))}.values():
            read, write = functools.partial(self._read, one), functools.partial(self._write, one)
            keras_optimizers.saving_with(one, read, write)

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """The context in which each process can save the optimizer by itself; all of them enter it."""
        self._gathered = dict(zip(map(id, self.optimizer.variables), self._read(self.optimizer), strict=True))
        try:
            yield
        finally:
            self._gathered = None

    def _read(self, optimizer: Any) -> list[np.ndarray]:
        """The whole values of an optimizer's variables; all processes call it, but within `whole`."""
        if self._gathered is not None:
            return [self._gathered[id(variable)] for variable in optimizer.variables]
        self._meet("gathers the state of an optimizer")
        exchange = self._group.exchange
        return [
            np.asarray(variable.numpy()) if parts.part_of(variable) is None else parts.gathered(variable, exchange)
            for variable in optimizer.variables
        ]

    def _write(self, optimizer: Any, values: list[Any]) -> None:
        """Assigns whole values to an optimizer's variables."""
        for variable, value in zip(optimizer.variables, values, strict=True):
            if parts.part_of(variable) is None:
                variable.assign(value)
            else:
                parts.fill(variable, np.asarray(value))


def local(variable: Any) -> tf.Variable:
    """The copy of this process of a Keras variable."""
    return tensorflow_variables.copies(variable)[0]


def divide(slot: Any, part: Part) -> None:
    """Leaves to this process its part of a slot, which it may have already."""
    if parts.part_of(slot) is None:
        if tuple(slot.shape) != part.shape:
            _replace(slot, part.of(tensorflow_variables.read(local(slot))))
        parts.mark(slot, part)


def undivide(slot: Any, exchange: Callable[[bytes], list[bytes]]) -> None:
    """Gives every process the whole of a slot again; all of them call it."""
    whole = parts.gathered(slot, exchange)
    parts.mark(slot, None)
    _replace(slot, whole)


def _replace(slot: Any, value: np.ndarray) -> None:
    """Gives a slot a value of another shape, in a plain variable."""
    held = local(slot)
    with tensorflow_internals.without_strategy():
        made = tensorflow_variables.without_value(value.shape, held.dtype, held.device, slot.name)
    tensorflow_variables.fill(made, np.ascontiguousarray(value))
    keras_internals.set_tf_variable(slot, made)
    for copy in tensorflow_variables.copies(held):  # whoever still holds the variable
        tensorflow_variables.free(copy)
