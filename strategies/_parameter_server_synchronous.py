"""Synchronous steps on parameter servers: each worker has a part of each batch, and the servers add the gradients.

    for each step
        a closure for each part      leaves its gradients on the servers, each in a place of its own
        one more closure             the servers add them, and update the variables

A closure that runs twice, since its worker was lost, leaves the same in the same place: nothing counts twice, and the
sum has one order. Workers cannot communicate within a step; what needs a sum over the batch in the middle of a step is
refused.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.core import assignments, exact_step, fused_optimizers, randomness, share
from tfdist.core.inner_loop import Steps
from tfdist.core.steps_per_call import AtNan
from tfdist.data.pipeline import batch_parts
from tfdist.data.pipeline.division import Division
from tfdist.errors import UsageError
from tfdist.internals import keras as keras_internals
from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.internals.keras import tf_variable
from tfdist.strategies import _closure_data as data
from tfdist.strategies import _closures as loop
from tfdist.strategies import base

_HINT = "use `multiworker` or `horovod`, whose processes communicate within a step, or `mode=asp`"


class PartReplica(base.Replica):
    """A worker's step on its part of the batch; its gradients are left where they are added later.

    Args:
        index: of the part.
        division: of a batch among the parts.
        whole: the number of examples of the batch.
    """

    alone = False

    def __init__(self, index: int, division: Division, whole: Any):
        super().__init__(index, division.count)
        self._before, self._whole = division.part(whole, index)[0], whole
        self.left: list[tuple[Any, Any]] = []  # variables, and their gradients

    def all_reduce(self, tensors: list[Any]) -> list[Any]:
        if tensors:
            raise UsageError(
                "The step needs a sum over the whole batch before it can go on, for a mask, a metric, a gradient that "
                "it looks at, or a variable that it sets, and the workers of `mode=bsp` do not communicate within a "
                "step",
                _HINT,
            )
        return tensors

    def all_gather(self, structure: Any) -> Any:
        return self.all_reduce([structure])

    def examples_before(self, count: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        del count
        return tf.convert_to_tensor(self._before), tf.convert_to_tensor(self._whole)

    def reduce(self, gradients: Sequence[Any]) -> list[Any]:
        # Keras' own step passes gradients to the optimizer as they are, which is where they are left.
        return list(gradients) if self.keras_optimizer is not None else super().reduce(gradients)

    def reduces_later(self, variables: Sequence[Any]) -> bool:
        del variables
        return self.keras_optimizer is not None

    def apply(self, apply: Any, gradients: Sequence[Any], optimizer: Any, variables: Sequence[Any] | None) -> None:
        del apply
        of = keras_internals.trainable_variables(optimizer) if variables is None else variables
        self.left += [(v, g) for v, g in zip(of, gradients, strict=True) if g is not None]


class SynchronousProgram(loop.ClosureProgram):
    """Runs `model.train_step` on parts of each batch, and updates the variables once per batch."""

    def __init__(self, strategy: Any, steps: Steps):
        if keras_internals.has_own_step(steps.model, "train"):
            raise UsageError(
                f"The model `{steps.model.name}` has a `train_step` of its own, and with `mode=bsp` the gradients are "
                "complete only when it has ended",
                _HINT,
            )
        super().__init__(strategy, steps, measures_staleness=False)
        self._left = [_Left() for _ in range(strategy.num_workers)]

    def _make_functions(self) -> Any:
        def of_part(index: int) -> Any:
            return tf.function(functools.partial(self._part, index), autograph=False, reduce_retracing=True)

        self._parts = [of_part(index) for index in range(self._strategy.num_workers)]
        self._update = tf.function(self._add_and_update, autograph=False)
        return self._update, self._update

    def _results_in_turn(self, state: Any, first: int, count: int) -> Iterator[tuple[list[loop.Result], bool]]:
        done = 0
        for closure in data.closures(self._given, state, first, count, 1):
            parts = [self._strategy.schedule(part, closure.arguments) for part in self._parts]
            vectors = self._strategy.results_of(parts)
            self._strategy.results_of([self._strategy.schedule(self._update, ())])
            done += 1
            yield list(map(self._codec.unpack, vectors)), False
        if done < count:
            yield [], True

    def _steps_of(self, results: Sequence[loop.Result]) -> int:
        return min(1, len(results))

    def _part(self, index: int, state: Any, count: tf.Tensor) -> tf.Tensor:
        """The step of one part of a batch; returns a packed `Result`."""
        # Not a constant 0, with which a full batch would have a static shape, by which Keras weighs some losses.
        batch, carries = self._batches.fetch(state, count - 1), _Carries(self._model)

        def on_replica(_: Any) -> Any:
            division = Division(len(self._parts))
            replica = PartReplica(index, division, batch_parts.common_length(tf.nest.flatten(batch)))
            part = self._batches.part(state, batch, index, division)
            replica.begin(*part, randomness.unseeded_of(self._strategy))
            replica.updates = assignments.Carried(replica, carries.variables, carries.start)
            replica.keras_optimizer = self._model.optimizer
            exact_step.in_step(replica, self._step_function(replica))
            self._metrics_updated |= replica.updates.metrics_updated
            values = replica.updates.values
            self._left[index].leave(replica, carries.states, carries.changes(values))
            return list(map(replica.only_real, carries.metrics(values)))

        with self._own_metrics(), self._recomputation.traced():
            (values,) = self._strategy.run(on_replica)
        zero = tf.constant(0)
        return self._codec.pack(loop.Result(tf.constant(1), self._finite(values), zero, zero, values, self._no_logs()))

    def _finite(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        if self._at_nan is AtNan.NOTHING:
            return tf.constant(True)
        total = keras_internals.loss_tracker(self._model).total
        index = next(i for i, variable in enumerate(self._model.metrics_variables) if variable is total)
        return tf.math.is_finite(values[index])

    def _add_and_update(self) -> tf.Tensor:
        """One update of the variables, by what all parts have left."""
        optimizer, variables = self._model.optimizer, self._model.trainable_variables

        def on_replica(replica: Any) -> tf.Tensor:
            gradients = [_total([left.places.get(id(one)) for left in self._left], one) for one in variables]
            with replica.updating(self._model):
                optimizer.apply(gradients, variables)
            return tf.constant(True)

        with fused_optimizers.fused(optimizer, self._strategy.fused, locking=True):
            (done,) = self._strategy.run(on_replica)
        for variable in loop.small_states(self._model):
            # What is counted, as the numbers that were drawn, each part has counted alike.
            parts = self._left if tf_variable(variable).dtype.is_floating else self._left[:1]
            change = _total([left.places.get(id(variable)) for left in parts], variable)
            if change is not None:
                tf_variable(variable).assign_add(change)
        return done


class _Carries:
    """What the steps of a closure hand on: the metrics, from zero, and the small states of the model.

    Attributes:
        states: the variables of these.
        variables: those of the metrics, and the states.
        start: the values of `variables` as the closure begins.
    """

    def __init__(self, model: Any):
        self.states = loop.small_states(model)
        self.variables = [*model.metrics_variables, *self.states]
        self._begun = [tf.convert_to_tensor(tf_variable(variable)) for variable in self.states]
        nothing = [tf.zeros(v.shape, tf_variable(v).dtype) for v in model.metrics_variables]
        self._metrics, self.start = len(nothing), nothing + self._begun

    def metrics(self, values: Sequence[Any]) -> list[Any]:
        """The values of the metrics."""
        return list(values[: self._metrics])

    def changes(self, values: Sequence[Any]) -> list[tf.Tensor]:
        """What the steps have added to each state."""
        return [after - before for after, before in zip(values[self._metrics :], self._begun, strict=True)]


class _Left:
    """What one part leaves on the servers: for each variable, a place beside it.

    Attributes:
        places: by the `id` of the Keras variable; those that the traced step has left something in. A sparse gradient
            has two, for its values and its indices.
    """

    def __init__(self) -> None:
        self.places: dict[int, tuple[tf.Variable, ...]] = {}

    def leave(self, replica: PartReplica, states: Sequence[Any], changes: Sequence[tf.Tensor]) -> None:
        """Leaves the gradients of a step, and the changes of other variables, whose mean over the batch counts."""
        weighed = [
            share.weigh(replica, change) if change.dtype.is_floating else replica.only_real(change)
            for change in changes
        ]
        for variable, value in (*replica.left, *zip(states, weighed, strict=True)):
            values = (value.values, value.indices) if isinstance(value, tf.IndexedSlices) else (value,)
            if id(variable) not in self.places:
                self.places[id(variable)] = tuple(_place(tf_variable(variable).device, one) for one in values)
            for place, one in zip(self.places[id(variable)], values, strict=True):
                place.assign(one)


def _place(device: str, like: tf.Tensor) -> tf.Variable:
    """A variable on `device` for tensors of the dtype of `like`, and of its shape if that is fixed, else of any."""
    fixed = like.shape.is_fully_defined()
    shape = like.shape if fixed else [0 if size is None else size for size in like.shape]
    with tf.init_scope(), tensorflow_internals.without_strategy(), tf.device(device):
        # With a dimension that is not known, a worker crashes: seen in TensorFlow 2.21.0.
        any_shape = tf.TensorShape(None)
        return tf.Variable(tf.zeros(shape, like.dtype), shape=like.shape if fixed else any_shape, trainable=False)


def _total(places: Sequence[tuple[tf.Variable, ...] | None], like: Any) -> Any:
    """The sum of what has been left for the variable `like`, on the server that has it, in the order of the parts.

    Sparse gradients stay lists of rows, of which a row that several parts have touched occurs several times, as it does
    on one device: adaptive optimizers of Keras tell the difference.
    """
    left = [tuple(map(tf.convert_to_tensor, place)) for place in places if place is not None]
    if not left:
        return None
    with tf.device(tf_variable(like).device):
        if len(left[0]) == 1:
            return tf.add_n([value for (value,) in left])
        rows = [(tf.ensure_shape(values, [None, *like.shape[1:]]), tf.ensure_shape(at, [None])) for values, at in left]
        values, indices = (tf.concat(pieces, 0) for pieces in zip(*rows, strict=True))
        return tf.IndexedSlices(values, indices, tf.constant(list(like.shape), indices.dtype))
