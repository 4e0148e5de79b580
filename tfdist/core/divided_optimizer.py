"""What optimizers whose state is divided over processes have in common: slots in parts, and saving as a whole."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.communicators import Communicator, parts
from tfdist.communicators.parts import Part
from tfdist.core import updated_parts
from tfdist.errors import UsageError
from tfdist.internals import keras_optimizers


class DividedOptimizer:
    """The part of one optimizer that this process has.

    Args:
        optimizer: of Keras; built for all variables that it updates, or not built.
        communicator: of the processes.
        meet: is called with what this process is about to do, and raises an error if another one does something else.
    """

    def __init__(self, optimizer: Any, communicator: Communicator, meet: Callable[[str], None]):
        self.optimizer = optimizer
        self._communicator = communicator
        self._meet = meet
        self._gathered: list[np.ndarray] | None = None  # the whole values of the variables, see `whole`
        keras_optimizers.saving_with(optimizer, self._read, self._write)

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """The context in which process 0 can save the optimizer by itself; all processes enter it."""
        values = self._read()
        self._gathered = values if self._communicator.rank == 0 else None
        try:
            yield
        finally:
            self._gathered = None

    def _divide_slots(self, variables: Sequence[Any], parts_of: Sequence[Part | None], hint: str) -> None:
        """Leaves to this process its parts of the slots of `variables`.

        Raises:
            UsageError: with this `hint`, for an optimizer with other variables than slots and numbers.
        """
        try:
            slots = keras_optimizers.slots_of(self.optimizer)
        except LookupError as error:
            raise UsageError(
                f"The variable `{error.args[0]}` of the optimizer `{self.optimizer.name}` belongs to none of the "
                "variables that it updates",
                hint,
            ) from error
        for part, variable, of_variable in zip(parts_of, variables, slots, strict=True):
            for slot in of_variable:
                updated_parts.divide_slot(slot, part, tuple(variable.shape))

    @property
    def _scales_loss(self) -> bool:
        return keras_optimizers.inner(self.optimizer) is not self.optimizer

    def _all_finite(self, name: str) -> Callable[[tf.Tensor], tf.Tensor]:
        """Whether the gradients of all processes are finite, given whether those of this one are; `name` tells it."""

        def all_finite(finite: tf.Tensor) -> tf.Tensor:
            (others,) = self._communicator.all_reduce([tf.cast(tf.logical_not(finite), tf.int32)], name)
            return tf.equal(others, 0)

        return all_finite

    def _read(self) -> list[np.ndarray]:
        """The whole values of the optimizer's variables; all processes call it, but within `whole`."""
        if self._gathered is not None:
            return self._gathered
        self._meet("gathers the state of an optimizer")
        exchange = self._communicator.exchange
        return [
            np.asarray(variable.numpy()) if parts.part_of(variable) is None else parts.gathered(variable, exchange)
            for variable in self.optimizer.variables
        ]

    def _write(self, values: list[Any]) -> None:
        """Assigns whole values to the optimizer's variables."""
        for variable, value in zip(self.optimizer.variables, values, strict=True):
            if parts.part_of(variable) is None:
                variable.assign(value)
            else:
                parts.fill(variable, np.asarray(value))
