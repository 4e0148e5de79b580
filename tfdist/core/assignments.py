"""Assignments to variables in the step of one of several replicas, in the order in which one device makes them.

An assignment is held back until the same step reads the variable, an optimizer applies gradients, or the step ends.
Then the replicas agree on one value for each variable, in one exchange, and it is written once per copy. So a weight
that is clipped after each of several updates, perturbed and restored, or normalized before each forward pass ends as it
does on one device.

| assignment of | all replicas write |
|---|---|
| a floating-point value | the mean, weighed by the shares; exactly the value if it is the same on all replicas |
| a value to a variable whose aggregation is "sum" | the value before, plus the changes of all replicas |
| another value, such as a count or a seed | the value of the global batch |
| a value to a variable of a metric | each replica its own part, and readers sum the parts |
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tfdist.communicators import opaque
from tfdist.core import contributions, dependencies, replica_context, share
from tfdist.errors import UsageError
from tfdist.internals.keras import tf_variable

if TYPE_CHECKING:
    from tfdist.core.replica import Replica


class Updates(keras.StatelessScope):
    """Catches the assignments of a replica's step to Keras variables.

    Args:
        replica: runs the step.
        metrics_variables: the variables of the model's metrics.
    """

    def __init__(self, replica: Replica, metrics_variables: Sequence[Any]):
        super().__init__(collect_losses=True)
        self._replica = replica
        self._metrics = {id(variable) for variable in metrics_variables}
        self.metrics_updated: set[int] = set()
        self._waiting: dict[int, Any] = {}
        self._whole: dict[int, tuple[Any, tf.Tensor]] | None = None

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        if self._whole is not None:
            self._whole[id(variable)] = variable, tf.cast(value, tf_variable(variable).dtype)
        elif id(variable) in self._metrics:
            self.metrics_updated.add(id(variable))
            self._add_part(variable, value)
        else:
            replica_context.require_meeting(self._replica, f"An assignment to `{variable.path}`")
            self._waiting[id(variable)] = variable
            super().add_update((variable, value))

    def _add_part(self, variable: Any, value: Any) -> None:
        value = tf.cast(value, tf_variable(variable).dtype)
        if self._replica.real is not True:
            value = tf.where(self._replica.real, value, tf.convert_to_tensor(tf_variable(variable)))
        with replica_context.on_replica(None):
            tf_variable(variable).assign(value)

    def get_current_value(self, variable: Any) -> Any:
        if self._whole is not None and id(variable) in self._whole:
            return self._whole[id(variable)][1]
        if self._must_be_written(variable):
            self.write()
        value = super().get_current_value(variable)
        return tf_variable(variable) if value is None else value

    def _must_be_written(self, variable: Any) -> bool:
        """Whether `variable` is read in the graph of the step while an assignment to it is held back."""
        waits = id(variable) in self._waiting and tf_variable(variable).dtype.is_floating
        return waits and replica_context.can_meet(self._replica)

    def write(self) -> None:
        """Agrees with the other replicas on the values that are held back, and writes them."""
        updates = [(variable, self.state_mapping.pop(key)) for key, variable in self._waiting.items()]
        self._waiting = {}
        if updates:
            self._replica.write(agreed(self._replica, updates))

    @contextlib.contextmanager
    def whole(self, variables: Sequence[Any]) -> Iterator[None]:
        """The context in which every replica updates a metric with these `variables` with the whole global batch.

        The state of such a metric need not be a sum over the examples.
        """
        values = self._replica.read_metric(variables)
        self._whole = {id(variable): (variable, value) for variable, value in zip(variables, values, strict=True)}
        try:
            yield
            found = self._whole
        finally:
            self._whole = None
        self._replica.write_metric(list(found.values()))
        self.metrics_updated |= set(found)


def agreed(replica: Replica, updates: Sequence[tuple[Any, Any]]) -> list[tuple[Any, tf.Tensor]]:
    """The values that all replicas write to Keras variables, from the values that each would assign."""
    floats = [(v, tf.cast(value, tf_variable(v).dtype)) for v, value in updates if tf_variable(v).dtype.is_floating]
    others = [(v, value) for v, value in updates if not tf_variable(v).dtype.is_floating]
    others = [(v, _of_all(replica, v.path, v.dtype, value)) for v, value in others]
    if not floats:
        return others
    changes = [(v, value) for v, value in floats if v.aggregation == "sum"]
    values = [(v, value) for v, value in floats if v.aggregation != "sum"]
    sums = replica.all_reduce_packed([replica.only_real(value - tf_variable(v)) for v, value in changes])
    means = mean(replica, [value for _, value in values])
    return [
        *((v, tf_variable(v) + total) for (v, _), total in zip(changes, sums, strict=True)),
        *((v, value) for (v, _), value in zip(values, means, strict=True)),
        *others,
    ]


def mean(replica: Replica, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The means of floating-point `values` over the replicas, weighed by the shares.

    A value that is the same on all replicas, as the graph shows, is returned exactly: a bias that was 0 must be 0 again
    after a perturbation is undone, since optimizers such as LAMB divide by its norm. Without a graph to read, this
    takes a second exchange.
    """
    if not values:
        return []
    if tf.executing_eagerly():
        firsts = replica.all_reduce([_if_first(replica, value) for value in values])
        differences = [
            share.weigh(replica, tf.where(value == first, tf.zeros_like(value), value - first))
            for value, first in zip(values, firsts, strict=True)
        ]
        return [first + rest for first, rest in zip(firsts, replica.all_reduce(differences), strict=True)]
    return replica.all_reduce_packed(
        [
            contributions.to_value(replica, value)
            # A value that is not computed in this graph is the same on all replicas.
            if tf.is_symbolic_tensor(value) and dependencies.depends_on(value, replica.data, replica.alike)
            else _if_first(replica, value)
            for value in values
        ]
    )


def _if_first(replica: Replica, value: tf.Tensor) -> tf.Tensor:
    """`value` on the first replica and 0 on the others, whose sum is the value of the first."""
    # With a constant index TensorFlow would drop the value's computation, exchanges included, on the others.
    return tf.where(opaque(tf.constant(replica.index == 0)), value, tf.zeros_like(value))


def _of_all(replica: Replica, name: str, dtype: str, value: Any) -> tf.Tensor:
    """A value of whole numbers of the global batch.

    Raises:
        UsageError: each replica computes it from its own examples, and the graph does not say how it comes about.
    """
    found = contributions.of_all(replica, value)
    if found is None:
        raise UsageError(
            f"The step sets `{name}`, of type `{dtype}`, from the examples of one replica",
            "set it from `tfdist.all_reduce(...)` of what is counted, the same on all replicas",
        )
    return found


def of_tf_variable(assign: Any, variable: Any, name: str, value: Any) -> Any:
    """An assignment in a step to a `tf.Variable` of the user's own: the replicas agree on the value at once.

    Args:
        assign: TensorFlow's own method.
        variable: its aggregation says how the values of the replicas are combined; "none" means "mean".
        name: "assign", "assign_add" or "assign_sub".
        value: of this replica.
    """
    replica = replica_context.current()
    if replica is None:
        return assign(value)
    replica_context.require_meeting(replica, "An assignment to a `tf.Variable`")
    value = tf.cast(value, variable.dtype)
    if variable.aggregation == tf.VariableAggregation.SUM:
        before = tf.zeros_like(value) if name != "assign" else tf.convert_to_tensor(variable)
        value = before + replica.all_reduce([replica.only_real(value - before)])[0]
    elif value.dtype.is_floating:
        if variable.aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA:
            (value,) = replica.all_reduce([_if_first(replica, value)])
        else:
            (value,) = mean(replica, [value])
    elif variable.aggregation != tf.VariableAggregation.ONLY_FIRST_REPLICA:
        value = _of_all(replica, variable.name, value.dtype.name, value)

    def write(values: list[tf.Tensor]) -> None:
        getattr(variable, name)(values[0])

    with replica_context.on_replica(None):
        replica.update_each_copy(write, [value])
    return variable
