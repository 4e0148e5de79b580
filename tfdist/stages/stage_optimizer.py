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
from tfdist.core.divided_optimizer import DividedOptimizer, divide, local
from tfdist.errors import UsageError
from tfdist.internals import keras_optimizers, keras_stages
from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.stages.own_variables import whole_part

OTHER_OPTIMIZER = "use an optimizer of Keras, or train in one process"


class StageOptimizer(DividedOptimizer):
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
        super().__init__(optimizer, communicator, meet)
        self._parts = {id(variable): _part(variable) for variable in variables}
        self.own = [variable for variable in variables if self._parts[id(variable)].size]
        self._make_slots(list(variables))

    def _make_slots(self, variables: list[Any]) -> None:
        if not self.optimizer.built:
            # An optimizer that computes by elements has slots of the shapes of what it is built for.
            by_element = type(keras_optimizers.inner(self.optimizer)) in keras_optimizers.BY_ELEMENT
            plain = [
                local(variable)
                if self._parts[id(variable)].size or not by_element
                else tf.Variable(tf.zeros(self._parts[id(variable)].shape, local(variable).dtype), trainable=False)
                for variable in variables
            ]
            with keras_stages.known(variables):
                keras_optimizers.build(self.optimizer, variables, plain)
        for variable, slots in zip(variables, self._slots(), strict=True):
            part = self._parts[id(variable)]
            for slot in slots:
                divide(slot, part if tuple(slot.shape) in (part.shape, part.whole_shape) else _alike(part, slot))

    def _slots(self) -> list[list[Any]]:
        """The slots of each variable."""
        try:
            return keras_optimizers.slots_of(self.optimizer)
        except LookupError as error:
            raise UsageError(
                f"The variable `{error.args[0]}` of the optimizer `{self.optimizer.name}` belongs to none of the "
                "variables that it updates",
                OTHER_OPTIMIZER,
            ) from error

    @property
    def _scales_loss(self) -> bool:
        return keras_optimizers.inner(self.optimizer) is not self.optimizer

    def _all_finite(self, finite: tf.Tensor) -> tf.Tensor:
        """Whether the gradients of all processes are finite, given whether those of this one are."""
        (others,) = self._communicator.all_reduce([tf.cast(tf.logical_not(finite), tf.int32)], "finite")
        return tf.equal(others, 0)

    @property
    def exchanges(self) -> bool:
        """Whether the processes exchange something in an update."""
        return self._scales_loss or bool(keras_optimizers.inner(self.optimizer).global_clipnorm)

    def apply(self, apply: Callable[[list[Any], list[Any]], None], gradients: list[Any], variables: list[Any]) -> None:
        """Updates `variables` of this process by `apply(gradients, variables)`; all processes call it."""
        clip = self._clipped if keras_optimizers.inner(self.optimizer).global_clipnorm else None
        all_finite = self._all_finite if self._scales_loss else None
        with self._communicator.around_branches(), self._updating(clip, all_finite):
            apply(gradients, variables)

    def finalize(self) -> None:
        """What the optimizer does to the variables of this process at the end of a training."""
        with self._updating():
            self.optimizer.finalize_variable_values(self.own)

    @contextlib.contextmanager
    def _updating(self, clip: Any = None, all_finite: Any = None) -> Iterator[None]:
        values = [local(variable) for variable in self.own]
        updating = keras_optimizers.updating(self.optimizer, self.own, values, clip, all_finite)
        with tensorflow_internals.without_strategy(), updating:
            yield

    def _clipped(self, original: Callable[[list[Any]], list[Any]], gradients: list[Any]) -> list[Any]:
        """The gradients as Keras clips those of all processes: they are joined by one number, the norm of the rest."""
        squares = tf.add_n([tf.reduce_sum(tf.square(tf.cast(_values(one), tf.float32))) for one in gradients])
        of_all = self._communicator.all_gather(squares[tf.newaxis], "squares")
        others = tf.constant(np.arange(self._communicator.size) != self._communicator.rank, tf.float32)
        rest = tf.cast(tf.sqrt(tf.reduce_sum(of_all * others)), gradients[0].dtype)
        return original([*gradients, rest])[:-1]


def _part(variable: Any) -> Part:
    part = parts.part_of(variable)
    if part is None:
        raise UsageError(
            f"The optimizer updates `{variable.path}`, which belongs to no layer of a stage",
            "leave out layers that the model does not call, or train in one process",
        )
    return part


def _alike(part: Part, slot: Any) -> Part:
    """The part in a slot of another shape than the variable that `part` is of."""
    owner = max(range(len(part.lengths)), key=part.lengths.__getitem__)
    return whole_part(slot.shape, owner, part.rank, len(part.lengths))


def _values(gradient: Any) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
