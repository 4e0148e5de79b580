"""An optimizer of which the process of a stage has the slots of its own variables, and updates these alone.

What an update takes from all variables together (the norm that gradients are clipped by, whether all of them are
finite) is exchanged, so that it is that of one device.
"""

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
from tfdist.internals import keras_optimizers, keras_stages
from tfdist.internals import tensorflow as tensorflow_internals

OTHER_OPTIMIZER = "use an optimizer of Keras, or train in one process"


class StageOptimizer:
    """The part of one optimizer that the process of a stage has.

    Args:
        optimizer: of Keras; built for `variables`, or not built.
        variables: all that it updates; `tfdist.communicators.parts` says which are of this process.
        communicator: of the processes.
        meet: is called with what this process is about to do, and raises an error if another one does something else.
    """

    def __init__(
        self, optimizer: Any, variables: Sequence[Any], communicator: Communicator, meet: Callable[[str], None]
    ):
        self._optimizer = optimizer
        self._communicator = communicator
        self._meet = meet
        self._gathered: list[np.ndarray] | None = None  # the whole values of the variables, see `whole`
        self._parts = {id(variable): _part(variable) for variable in variables}
        self.own = [variable for variable in variables if self._parts[id(variable)].size]
        self._make_slots(list(variables))
        keras_optimizers.saving_with(optimizer, self._read, self._write)

    def _make_slots(self, variables: list[Any]) -> None:
        if not self._optimizer.built:
            # An optimizer that computes by elements has slots of the shapes of what it is built for.
            by_element = type(keras_optimizers.inner(self._optimizer)) in keras_optimizers.BY_ELEMENT
            plain = [
                updated_parts.local(variable)
                if self._parts[id(variable)].size or not by_element
                else tf.Variable(tf.zeros([0], updated_parts.local(variable).dtype), trainable=False)
                for variable in variables
            ]
            with keras_stages.known(variables):
                keras_optimizers.build(self._optimizer, variables, plain)
        try:
            slots = keras_optimizers.slots_of(self._optimizer)
        except LookupError as error:
            raise UsageError(
                f"The variable `{error.args[0]}` of the optimizer `{self._optimizer.name}` belongs to none of the "
                "variables that it updates",
                OTHER_OPTIMIZER,
            ) from error
        for variable, of_variable in zip(variables, slots, strict=True):
            for slot in of_variable:
                updated_parts.divide_slot(slot, self._parts[id(variable)], tuple(variable.shape))

    def apply(self, apply: Callable[[list[Any], list[Any]], None], gradients: list[Any], variables: list[Any]) -> None:
        """Updates `variables` of this process by `apply(gradients, variables)`; all processes call it."""
        clip = all_finite = None
        if keras_optimizers.inner(self._optimizer).global_clipnorm:
            clip = self._clipped
        if keras_optimizers.inner(self._optimizer) is not self._optimizer:

            def all_finite(finite: tf.Tensor) -> tf.Tensor:
                (others,) = self._communicator.all_reduce([tf.cast(tf.logical_not(finite), tf.int32)], "finite")
                return tf.equal(others, 0)

        with self._communicator.around_branches(), self._updating(clip, all_finite):
            apply(gradients, variables)

    def finalize(self) -> None:
        """What the optimizer does to the variables of this process at the end of a training."""
        with self._updating():
            self._optimizer.finalize_variable_values(self.own)

    @contextlib.contextmanager
    def _updating(self, clip: Any = None, all_finite: Any = None) -> Iterator[None]:
        values = [updated_parts.local(variable) for variable in self.own]
        updating = keras_optimizers.updating(self._optimizer, self.own, values, clip, all_finite)
        with tensorflow_internals.without_strategy(), updating:
            yield

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """The context in which process 0 can save the optimizer by itself; all processes enter it."""
        values = self._read()
        self._gathered = values if self._communicator.rank == 0 else None
        try:
            yield
        finally:
            self._gathered = None

    def _clipped(self, original: Callable[[list[Any]], list[Any]], gradients: list[Any]) -> list[Any]:
        """The gradients as Keras clips those of all processes: they are joined by one number, the norm of the rest."""
        squares = tf.add_n([tf.reduce_sum(tf.square(tf.cast(_values(one), tf.float32))) for one in gradients])
        of_all = self._communicator.all_gather(squares[tf.newaxis], "squares")
        others = tf.constant(np.arange(self._communicator.size) != self._communicator.rank, tf.float32)
        rest = tf.cast(tf.sqrt(tf.reduce_sum(of_all * others)), gradients[0].dtype)
        return original([*gradients, rest])[:-1]

    def _read(self) -> list[np.ndarray]:
        """The whole values of the optimizer's variables; all processes call it, but within `whole`."""
        if self._gathered is not None:
            return self._gathered
        self._meet("gathers the state of an optimizer")
        exchange = self._communicator.exchange
        return [
            np.asarray(variable.numpy()) if parts.part_of(variable) is None else parts.gathered(variable, exchange)
            for variable in self._optimizer.variables
        ]

    def _write(self, values: list[Any]) -> None:
        """Assigns whole values to the optimizer's variables."""
        for variable, value in zip(self._optimizer.variables, values, strict=True):
            if parts.part_of(variable) is None:
                variable.assign(value)
            else:
                parts.fill(variable, np.asarray(value))


def _part(variable: Any) -> Part:
    part = parts.part_of(variable)
    if part is None:
        raise UsageError(
            f"The optimizer updates `{variable.path}`, which belongs to no layer of a stage",
            "leave out layers that the model does not call, or train in one process",
        )
    return part


def _values(gradient: Any) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
