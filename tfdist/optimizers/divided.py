"""The base of optimizers whose state is sharded over processes: slots in parts, and saving of the whole state."""

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
    """The part of an optimizer that this process has.

    Args:
        optimizer: a Keras optimizer; built for all variables that it updates, or not built.
        group: the processes.
        meet: is called with the next action of this process; raises an error if the actions of processes differ.
    """

    def __init__(self, optimizer: Any, group: ProcessGroup, meet: Callable[[str], None]):
        self.optimizer = optimizer
        self._group = group
        self._meet = meet
        self._gathered: dict[int, np.ndarray] | None = None  # within `whole`: the values by the `id` of the variable
        # Keras saves an optimizer that scales the loss with the variables of its inner optimizer, and saves that again.
        inner = keras_optimizers.inner(optimizer)
        for saved in [optimizer] if inner is optimizer else [optimizer, inner]:
            keras_optimizers.saving_with(
                saved, functools.partial(self._read, saved), functools.partial(self._write, saved)
            )

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """The context in which a process can save the optimizer without the others; all processes enter it."""
        self._gathered = dict(zip(map(id, self.optimizer.variables), self._read(self.optimizer), strict=True))
        try:
            yield
        finally:
            self._gathered = None

    def _read(self, optimizer: Any) -> list[np.ndarray]:
        """The whole values of an optimizer's variables; outside of `whole`, all processes call it."""
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
    """The `tf.Variable` of a Keras variable in this process; the first if there are copies."""
    return tensorflow_variables.copies(variable)[0]


def divide(slot: Any, part: Part) -> None:
    """Reduces a slot to the part of this process, unless it is that part already."""
    if parts.part_of(slot) is None:
        if tuple(slot.shape) != part.shape:
            _replace(slot, part.of(tensorflow_variables.read(local(slot))))
        parts.mark(slot, part)


def undivide(slot: Any, exchange: Callable[[bytes], list[bytes]]) -> None:
    """Gives every process the whole slot again; all processes call it."""
    value = parts.gathered(slot, exchange)
    parts.mark(slot, None)
    _replace(slot, value)


def _replace(slot: Any, value: np.ndarray) -> None:
    """Gives a slot a value of another shape, in a new plain variable."""
    old = local(slot)
    with tensorflow_internals.without_strategy():
        new = tensorflow_variables.without_value(value.shape, old.dtype, old.device, slot.name)
    tensorflow_variables.fill(new, np.ascontiguousarray(value))
    keras_internals.set_tf_variable(slot, new)
    for copy in tensorflow_variables.copies(old):  # to which there may still be references
        tensorflow_variables.free(copy)
