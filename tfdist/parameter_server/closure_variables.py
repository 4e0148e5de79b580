"""What a closure holds in variables of its own, which stand in the place of the model's while its steps are traced."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist.internals import keras_variables, tensorflow_coordinator
from tfdist.internals.keras import tf_variable

BYTES_OF_A_SMALL_STATE = 1 << 16


class Held:
    """What a closure holds in variables of its own: the metrics, and the small states of the model.

    So its steps read and change them without a server.

    Args:
        model: whose they are.
        begins_metrics: the metrics begin with the values of the model's, and not with zeros.
    """

    def __init__(self, model: Any, begins_metrics: bool):
        self._metrics, self._states = model.metrics_variables, small_states(model)
        held = [*(self._metrics if begins_metrics else ()), *self._states]
        read = [tf.convert_to_tensor(tf_variable(variable)) for variable in held]
        nothing = [tf.zeros(v.shape, tf_variable(v).dtype) for v in (() if begins_metrics else self._metrics)]
        self._begun = nothing + read
        self._own = [tensorflow_coordinator.variable_of_execution(value) for value in self._begun]

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """In this context, what is traced computes with the closure's own variables."""
        with keras_variables.backed_by([*self._metrics, *self._states], self._own):
            yield

    def metrics_changed(self) -> set[int]:
        """The `id`s of the metrics' variables that the present graph changes."""
        own = zip(self._metrics, self._own, strict=False)
        return {id(variable) for variable, mine in own if tensorflow_coordinator.is_changed(mine)}

    def is_metric(self, value: Any) -> bool:
        """Whether a value of the present graph, or a structure of them, is computed from what metrics have counted."""
        own = self._own[: len(self._metrics)]
        tensors = [one for one in tf.nest.flatten(value) if tf.is_symbolic_tensor(one)]
        return any(tensorflow_coordinator.is_computed_from(one, own) for one in tensors)

    def end(self) -> list[tf.Tensor]:
        """Adds the changes to the states, which other workers may have changed meanwhile.

        Returns:
            What was added to the metrics.
        """
        values = [variable.read_value() for variable in self._own]
        changes = [after - before for after, before in zip(values, self._begun, strict=True)]
        for variable, change in zip(self._states, changes[len(self._metrics) :], strict=True):
            tf_variable(variable).assign_add(change)
        return changes[: len(self._metrics)]


def small_states(model: Any) -> list[Any]:
    """Seeds, moving averages and the like: a closure reads them once, and adds the change that its steps made."""
    return [
        variable
        for variable in model.non_trainable_variables
        if (tf_variable(variable).dtype.is_floating or tf_variable(variable).dtype.is_integer)
        and math.prod(variable.shape) * tf_variable(variable).dtype.size <= BYTES_OF_A_SMALL_STATE
    ]
