"""Synchronous steps on parameter servers: each worker computes a part of each batch, and the servers add the gradients.

    for each step
        one closure per part    stores its gradients on the servers, in buffers of its own
        one more closure        adds the gradients on the servers, and updates the variables

A closure that runs twice, because its worker was lost, stores the same values in the same buffers: nothing counts
twice, and the order of the sum is fixed. The step is that of one device, partitioned. A step that exchanges more than
its gradients takes several rounds of closures, see `tfdist.parameter_server.round_mesh`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist import spmd
from tfdist.data.input import batch_parts
from tfdist.errors import CostWarning
from tfdist.interface.program import AtNan, Logs, Steps
from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_data, tensorflow_coordinator, tensorflow_graphs
from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.internals.keras import tf_variable
from tfdist.loop.one_device_step import OneDeviceStep, Rows, step_of
from tfdist.parameter_server import closures
from tfdist.parameter_server.round_mesh import (
    CannotRunInRounds,
    DryRun,
    ExchangeBuffers,
    ExchangedValue,
    Round,
    RoundComplete,
    RoundMesh,
    Update,
    WholeStep,
)
from tfdist.parameter_server.sharded_variable import FIRST_SERVER
from tfdist.spmd import replica_variables
from tfdist.spmd.draws import Streams
from tfdist.spmd.placements import Partial, Placed, Shard


class SynchronousProgram(closures.ClosureProgram):
    """Runs the `model.train_step` of one device on parts of each batch, and updates the variables once per batch."""

    def __init__(self, strategy: Any, steps: Steps):
        super().__init__(strategy, steps, measures_staleness=False)
        step = step_of(strategy, steps.model, self._step_name, self._recomputation)
        self.one_device = OneDeviceStep(strategy, steps, step)
        self.streams = Streams(self._place_on_server)
        self._steps_by_rows: dict[Rows, _ClosuresOfStep] = {}

    def _make_functions(self) -> Any:
        return None, None  # they depend on the size of a batch

    def _results_in_turn(self, state: Any, first: int, count: int) -> Iterator[tuple[list[closures.Result], bool]]:
        done = 0
        for closure in closures.closures_of(self._feed_batches, state, first, count, 1):
            division = self._strategy.division
            rows = () if closure.examples is None else tuple(batch_parts.rows(closure.examples, division))
            if rows not in self._steps_by_rows:
                self._steps_by_rows[rows] = _ClosuresOfStep(self, self._strategy, self._model, rows)
                self._warn_of_cost(self._steps_by_rows[rows])
            done += 1
            yield self._run_step(self._steps_by_rows[rows], closure), False
        if done < count:
            yield [], True

    def _warn_of_cost(self, step: _ClosuresOfStep) -> None:
        """Warns once if the steps of a training cost more than one round."""
        if self._warned or not self._trains or not step.is_divisible or step.rounds == 1:
            return
        self._warned = True
        reason = (
            f"take {step.rounds} rounds each, and in each round the workers restart the step"
            if step.rounds
            else "are computed by one worker each, because they exchange values in a loop or have unknown lengths"
        )
        warnings.warn(
            f"The steps of `{self._model.name}` {reason}\n\n"
            "hint: the result equals that of one device; `multiworker`, whose replicas exchange values within a step, "
            "is faster",
            CostWarning,
            stacklevel=2,
        )

    def _run_step(self, step: _ClosuresOfStep, closure: closures.Closure) -> list[closures.Result]:
        self._metrics_updated |= step.metrics_updated
        try:
            vectors = self._run_rounds(step, closure)
        except CannotRunInRounds:  # raised while tracing, before anything has changed
            step.compute_whole()
            self._warn_of_cost(step)
            vectors = self._run_rounds(step, closure)
        return list(map(self._codec.unpack, vectors))

    def _run_rounds(self, step: _ClosuresOfStep, closure: closures.Closure) -> list[Any]:
        workers = self._strategy.workers
        vectors: list[Any] = []
        for number in range(step.rounds):  # only the last round counts in metrics
            scheduled: list[Any] = []
            try:
                scheduled += (workers.schedule(part, closure.arguments) for part in step.parts(number))
            finally:
                vectors = workers.results_of(scheduled)
        arguments = () if step.rounds else closure.arguments
        return [*vectors, *workers.results_of([workers.schedule(step.update, arguments)])]

    def _steps_of(self, results: Sequence[closures.Result]) -> int:
        return min(1, len(results))

    def fetched(self, state: Any, count: tf.Tensor) -> Any:
        """Returns the batch of a closure of one step."""
        # Not a constant 0: it would give a full batch a static shape, by which Keras weights some losses.
        return self._batches.fetch(state, count - 1)

    def packed(self, metrics: Sequence[tf.Tensor], own_logs: Logs | None) -> tf.Tensor:
        """Returns a packed `Result` with what was added to the metrics, and the logs of the step if they are known."""
        finite, zero = tf.constant(True), tf.constant(0)
        if self._at_nan is not AtNan.NOTHING:
            total = keras_internals.loss_tracker(self._model).total
            index = next(i for i, variable in enumerate(self._model.metrics_variables) if variable is total)
            finite = tf.math.is_finite(metrics[index] + tf.convert_to_tensor(tf_variable(total)))
        logs = self._no_logs()
        if own_logs is not None:
            logs = tf.nest.map_structure(lambda value: tf.cast(value, tf.float32), own_logs)
        return self._codec.pack(closures.Result(tf.constant(1), finite, zero, zero, list(metrics), logs))

    def _place_on_server(self) -> tf.Variable:
        with self._strategy.scope():
            return tf.Variable(0, trainable=False, dtype=tf.int64)


class _ClosuresOfStep:
    """The closures of a step for batches of one size.

    Args:
        program: the program that runs the step.
        strategy: the strategy with the servers.
        model: the model that is trained.
        rows: the number of examples of each part; empty for a batch whose tensors have different lengths.

    Attributes:
        rounds: the number of rounds before the update; 0 if one closure computes the whole step.
        update: the `tf.function` of the update; it takes the arguments of a closure if it computes the whole step.
        is_divisible: whether each part gets examples of such a batch.
        metrics_updated: the `id`s of the metrics' variables that the step updates.
    """

    def __init__(self, program: SynchronousProgram, strategy: Any, model: Any, rows: Rows):
        self._program, self._model = program, model
        self._step = program.one_device
        self._traced = self._step.trace()
        self._count = strategy.division.count
        self._rows = rows
        specs = tf.nest.flatten(keras_data.without_optionals(self._step.spec))
        self._specs = [spec for spec in specs if spec is not None]
        all_dense = all(isinstance(spec, tf.TensorSpec) and spec.shape.rank for spec in self._specs)
        self._shard = rows if all_dense and self._step.is_sharded(rows) else None
        self.is_divisible = self._shard is not None
        self._buffers = ExchangeBuffers(_server_of_value(model))
        self._metrics = [(id(tf_variable(variable).handle), variable) for variable in model.metrics_variables]
        added_locally = replica_variables.only_added_to(self._traced, self._step.terms)
        self._terms = {key: terms for key, terms in self._step.terms.items() if key in added_locally}
        outside, inside = tensorflow_graphs.captured(self._traced.graph)
        self._handles = {id(handle): handle for handle in outside}
        changed = {
            id(handle)
            for handle, placeholder in zip(outside, inside, strict=True)
            if not all(operation.type == replica_variables.READ for operation in placeholder.consumers())
        }
        self.metrics_updated = {id(variable) for handle, variable in self._metrics if handle in changed}
        self._exchanged: list[ExchangedValue] = []
        self._parts: dict[int, list[Any]] = {}
        self.rounds, self._early = self._plan_rounds()
        if self.rounds:
            self.update = tf.function(self._update, autograph=False)
        else:
            self.compute_whole()

    def compute_whole(self) -> None:
        """From now on, lets one closure compute the whole step."""
        self.rounds, self._shard = 0, None
        self.update = tf.function(self._whole_step, autograph=False, reduce_retracing=True)

    def parts(self, number: int) -> list[Any]:
        """Returns the `tf.function`s of all parts in a round."""
        if number not in self._parts:
            functions = [functools.partial(self._part, part, number) for part in range(self._count)]
            self._parts[number] = [tf.function(part, autograph=False, reduce_retracing=True) for part in functions]
        return self._parts[number]

    def _plan_rounds(self) -> tuple[int, list[int]]:
        """Finds how many rounds the step takes, by a dry run of its first part.

        Returns:
            The number of rounds, 0 if one closure must compute the whole step; and the `id`s of the handles of the
            variables that the step changes before the last exchange.
        """
        while self._shard is not None:
            mesh = DryRun(self._count)
            try:
                with tf.__internal__.FuncGraph("dry_run").as_default():
                    self._compute(mesh, self._placeholders(mesh), self._program.streams, self._terms)
            except CannotRunInRounds:
                break
            # Parts stop at the last exchange, so that they cannot add to a metric after it.
            late = [key for key in self._terms if mesh.changed.get(key, (0, -1))[1] == mesh.exchanges > 0]
            if not late:
                early = [key for key, (first, _) in mesh.changed.items() if first < mesh.exchanges]
                early = [key for key in early if key in self._handles and key not in self._terms]
                can_copy = all(tensorflow_graphs.is_variable(self._handles[key]) for key in early)
                self._exchanged = mesh.exchanged
                return (mesh.exchanges, early) if can_copy else (0, [])
            for key in late:
                del self._terms[key]  # what is added to it is exchanged like any other value
        return 0, []

    def _compute(
        self, mesh: RoundMesh, batch: Sequence[Placed], streams: Streams, variables: Mapping[int, Placed]
    ) -> Logs:
        logs: Logs = spmd.compute(self._traced, mesh, batch, self._shard, spmd.Cost(), streams, variables)
        return logs

    def _placeholders(self, mesh: RoundMesh) -> list[Placed]:
        """Returns placeholders for the part of a batch that `mesh` computes."""
        (part,) = mesh.local
        shapes = [[self._rows[part], *spec.shape[1:]] for spec in self._specs]
        tensors = [tf.compat.v1.placeholder(spec.dtype, shape) for spec, shape in zip(self._specs, shapes, strict=True)]
        return [Placed(Shard.of_rows(self._rows), [tensor], replica=part) for tensor in tensors]

    def _part(self, part: int, number: int, state: Any, count: tf.Tensor) -> tf.Tensor:
        """Computes a part of the step in a round; returns a packed `Result`, whose metrics count in the last round."""
        mesh = Round(part, self._count, self._exchanged, self._buffers, number)
        batch = self._step.placed(state, self._program.fetched(state, count), self._rows, mesh)
        sums = _MetricSums(self._metrics, self._terms)
        # The next round repeats the assignments that the step makes before this round ends, so they go to copies.
        early = {key: _copy(self._handles[key]) for key in self._early}
        places = {
            name: tensorflow_coordinator.variable_of_execution(place)
            for name, place in self._program.streams.counters.items()
        }
        streams = dataclasses.replace(self._program.streams, counters=places)
        with tensorflow_internals.without_strategy():
            try:
                self._compute(mesh, batch, streams, sums.variables | early)
            except RoundComplete:
                return self._program.packed(sums.added(), None)
        raise CannotRunInRounds

    def _update(self) -> tf.Tensor:
        """Updates the variables from the values that the parts have stored."""
        sums = _MetricSums(self._metrics, self._terms)
        mesh = Update(self._count, self._exchanged, self._buffers, self.rounds, sums.handles)
        with mesh.scratch.as_default():
            batch = self._placeholders(mesh)
        vector = self._finish(mesh, batch, sums)
        if len(mesh.exchanged) != len(self._exchanged):
            raise CannotRunInRounds
        return vector

    def _whole_step(self, state: Any, count: tf.Tensor) -> tf.Tensor:
        mesh = WholeStep()
        batch = self._step.placed(state, self._program.fetched(state, count), (), mesh)
        return self._finish(mesh, batch, _MetricSums(self._metrics, self._terms))

    def _finish(self, mesh: RoundMesh, batch: Sequence[Placed], sums: _MetricSums) -> tf.Tensor:
        with tensorflow_internals.without_strategy():
            logs = self._compute(mesh, batch, self._program.streams, sums.variables)
            return self._program.packed(sums.added(), logs or None)


class _MetricSums:
    """A closure's contributions to metrics, in variables of this execution that start at zero.

    Args:
        metrics: the handles' `id`s and the variables of the metrics.
        terms: has the `id`s of the handles that get such a variable; other metrics are updated on the servers.

    Attributes:
        variables: the placed handles by the `id` of the metric's handle.
    """

    def __init__(self, metrics: Sequence[tuple[int, Any]], terms: Mapping[int, Placed]):
        self._zeros = [tf.zeros(variable.shape, tf_variable(variable).dtype) for _, variable in metrics]
        self._sums = [
            tensorflow_coordinator.variable_of_execution(zero) if handle in terms else None
            for (handle, _), zero in zip(metrics, self._zeros, strict=True)
        ]
        self.variables = {
            handle: Placed(Partial(), [variable.handle])
            for (handle, _), variable in zip(metrics, self._sums, strict=True)
            if variable is not None
        }

    @property
    def handles(self) -> list[tf.Tensor]:
        """The handles of the variables."""
        return [variable.handle for variable in self._sums if variable is not None]

    def added(self) -> list[tf.Tensor]:
        """Returns what this closure added to each of the metrics' variables; zero for those on the servers."""
        pairs = zip(self._sums, self._zeros, strict=True)
        return [zero if variable is None else variable.read_value() for variable, zero in pairs]


def _server_of_value(model: Any) -> Callable[[tf.TensorSpec], str]:
    """Chooses the server for an exchanged value: if it can be a gradient, the server of a variable of its shape."""
    devices_by_shape: dict[tuple[int, ...], list[str]] = {}
    for variable in map(tf_variable, model.trainable_variables):
        device = getattr(variable, "device", None) or FIRST_SERVER
        devices_by_shape.setdefault(tuple(variable.shape), []).append(device)
    in_turn = {shape: itertools.cycle(devices) for shape, devices in devices_by_shape.items()}

    def server_of(spec: tf.TensorSpec) -> str:
        shape = tuple(spec.shape) if spec.shape.rank is not None else ()
        return next(in_turn[shape]) if shape in in_turn else FIRST_SERVER

    return server_of


def _copy(handle: tf.Tensor) -> Placed:
    """Returns a variable of this execution that starts at the value of the variable with `handle`."""
    copy = tensorflow_coordinator.variable_of_execution(tensorflow_graphs.read(handle))
    return spmd.replicated([copy.handle])
