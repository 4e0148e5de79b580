"""Synchronous steps on parameter servers: each worker has a part of each batch, and the servers add the gradients.

    for each step
        a closure for each part      leaves its gradients on the servers, each in a place of its own
        one more closure             the servers add them, and update the variables

A closure that runs twice, since its worker was lost, leaves the same in the same place: nothing counts twice, and the
sum has one order. The step is that of one device, partitioned; one that exchanges more than its gradients takes more
rounds of closures, see `tfdist.parameter_server.round_mesh`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist import spmd
from tfdist.data.input import batch_parts
from tfdist.errors import CostWarning
from tfdist.interface.program import AtNan, Logs, Steps
from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_data, tensorflow_coordinator, tensorflow_functions
from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.internals.keras import tf_variable
from tfdist.loop.one_device_step import OneDeviceStep, Rows, step_of
from tfdist.parameter_server import closure_data as data
from tfdist.parameter_server import closures as loop
from tfdist.parameter_server.round_mesh import (
    NotInRounds,
    Places,
    Rehearsal,
    Round,
    RoundEnds,
    RoundMesh,
    Sent,
    Update,
    Whole,
)
from tfdist.spmd import accumulators
from tfdist.spmd.draws import Streams
from tfdist.spmd.placements import Partial, Placed, Shard


class SynchronousProgram(loop.ClosureProgram):
    """Runs `model.train_step` of one device on parts of each batch, and updates the variables once per batch."""

    def __init__(self, strategy: Any, steps: Steps):
        super().__init__(strategy, steps, measures_staleness=False)
        step = step_of(strategy, steps.model, self._step_name, self._recomputation)
        self.one_device = OneDeviceStep(strategy, steps, step)
        self.streams = Streams(self._place_on_server)
        self._of_sizes: dict[Rows, _StepOfSizes] = {}
        self._said = False

    def _make_functions(self) -> Any:
        return None, None  # there are some for each size of a batch

    def _results_in_turn(self, state: Any, first: int, count: int) -> Iterator[tuple[list[loop.Result], bool]]:
        done = 0
        for closure in data.closures(self._given, state, first, count, 1):
            division = self._strategy.division
            rows = () if closure.examples is None else tuple(batch_parts.rows(closure.examples, division))
            if rows not in self._of_sizes:
                self._of_sizes[rows] = _StepOfSizes(self, self._strategy, self._model, rows)
                self._say(self._of_sizes[rows])
            done += 1
            yield self._run(self._of_sizes[rows], closure), False
        if done < count:
            yield [], True

    def _say(self, step: _StepOfSizes) -> None:
        """Says what the steps of a training cost beyond one round, once."""
        if self._said or not self._trains or not step.is_divisible or step.rounds == 1:
            return
        self._said = True
        alone = "are computed by one worker each, since they exchange something in a loop, or where lengths are unknown"
        begun = f"take {step.rounds} rounds each, in which the workers begin the step again"
        warnings.warn(
            f"The steps of `{self._model.name}` {begun if step.rounds else alone}\n\n"
            "hint: the result is that of one device; `multiworker`, whose replicas exchange within a step, is faster",
            CostWarning,
            stacklevel=2,
        )

    def _run(self, step: _StepOfSizes, closure: data.Closure) -> list[loop.Result]:
        self._metrics_updated |= step.metrics_updated
        try:
            vectors = self._in_rounds(step, closure)
        except NotInRounds:  # when the closures were traced, and nothing was changed yet
            step.compute_whole()
            self._say(step)
            vectors = self._in_rounds(step, closure)
        return list(map(self._codec.unpack, vectors))

    def _in_rounds(self, step: _StepOfSizes, closure: data.Closure) -> list[Any]:
        vectors: list[Any] = []
        for number in range(step.rounds):  # of which the last one counts in metrics
            parts: list[Any] = []
            try:
                parts += (self._strategy.workers.schedule(part, closure.arguments) for part in step.parts(number))
            finally:
                vectors = self._strategy.workers.results_of(parts)
        arguments = () if step.rounds else closure.arguments
        return [*vectors, *self._strategy.workers.results_of([self._strategy.workers.schedule(step.update, arguments)])]

    def _steps_of(self, results: Sequence[loop.Result]) -> int:
        return min(1, len(results))

    def fetched(self, state: Any, count: tf.Tensor) -> Any:
        """The batch of a closure of one step."""
        # Not a constant 0, with which a full batch would have a static shape, by which Keras weighs some losses.
        return self._batches.fetch(state, count - 1)

    def packed(self, metrics: Sequence[tf.Tensor], own: Logs | None) -> tf.Tensor:
        """A packed `Result`, with what was added to the metrics, and the logs of the step if they are known."""
        finite, zero = tf.constant(True), tf.constant(0)
        if self._at_nan is not AtNan.NOTHING:
            total = keras_internals.loss_tracker(self._model).total
            index = next(i for i, variable in enumerate(self._model.metrics_variables) if variable is total)
            finite = tf.math.is_finite(metrics[index] + tf.convert_to_tensor(tf_variable(total)))
        logs = self._no_logs() if own is None else tf.nest.map_structure(lambda one: tf.cast(one, tf.float32), own)
        return self._codec.pack(loop.Result(tf.constant(1), finite, zero, zero, list(metrics), logs))

    def _place_on_server(self) -> tf.Variable:
        with self._strategy.scope():
            return tf.Variable(0, trainable=False, dtype=tf.int64)


class _StepOfSizes:
    """The closures of a step, for batches of one size.

    Args:
        program: whose step it is.
        strategy: has the servers.
        model: that is trained.
        rows: the number of examples of each part; none for a batch whose tensors have different lengths.

    Attributes:
        rounds: the number of rounds before the update; 0 if it computes the whole step.
        update: the `tf.function` of the update; it takes the arguments of a closure if it computes the whole step.
        is_divisible: each part has examples of such a batch.
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
        self._places = Places(_Servers(model))
        self._metrics = [(id(_handle(one)), one) for one in model.metrics_variables]
        alone = accumulators.only_added_to(self._traced, self._step.terms)
        self._terms = {key: terms for key, terms in self._step.terms.items() if key in alone}
        outside, inside = tensorflow_functions.captured(self._traced.graph)
        self._handles = {id(handle): handle for handle in outside}
        changed = {id(one) for one, own in zip(outside, inside, strict=True) if not _is_read_only(own)}
        self.metrics_updated = {id(one) for handle, one in self._metrics if handle in changed}
        self._sent: list[Sent] = []
        self._parts: dict[int, list[Any]] = {}
        self.rounds, self._early = self._rehearsed()
        if self.rounds:
            self.update = tf.function(self._update, autograph=False)
        else:
            self.compute_whole()

    def compute_whole(self) -> None:
        """From now on the update computes the whole step."""
        self.rounds, self._shard = 0, None
        self.update = tf.function(self._whole, autograph=False, reduce_retracing=True)

    def parts(self, number: int) -> list[Any]:
        """The `tf.function`s of all parts in a round."""
        if number not in self._parts:
            closures = [functools.partial(self._part, part, number) for part in range(self._count)]
            self._parts[number] = [tf.function(one, autograph=False, reduce_retracing=True) for one in closures]
        return self._parts[number]

    def _rehearsed(self) -> tuple[int, list[int]]:
        """The number of rounds, and by the `id`s of their handles, the variables that the step changes before the last.

        Without rounds, the update computes the whole step.
        """
        while self._shard is not None:
            mesh = Rehearsal(self._count)
            try:
                with tf.__internal__.FuncGraph("rehearsal").as_default():
                    self._compute(mesh, self._without_batch(mesh), self._program.streams, self._terms)
            except NotInRounds:
                break
            # The parts have left the step after the last exchange, and nobody adds to a metric then.
            late = [key for key in self._terms if mesh.changed.get(key, (0, -1))[1] == mesh.exchanges > 0]
            if not late:
                early = [key for key, (first, _) in mesh.changed.items() if first < mesh.exchanges]
                early = [key for key in early if key in self._handles and key not in self._terms]
                can_hold = all(tensorflow_functions.is_variable(self._handles[key]) for key in early)
                self._sent = mesh.sent
                return (mesh.exchanges, early) if can_hold else (0, [])
            for key in late:
                del self._terms[key]  # what is added is exchanged like any other value
        return 0, []

    def _compute(
        self, mesh: RoundMesh, batch: Sequence[Placed], streams: Streams, variables: Mapping[int, Placed]
    ) -> Logs:
        found: Logs = spmd.compute(self._traced, mesh, batch, self._shard, spmd.Cost(), streams, variables)
        return found

    def _without_batch(self, mesh: RoundMesh) -> list[Placed]:
        """Placeholders for the part of a batch that `mesh` has."""
        (part,) = mesh.local
        shapes = [[self._rows[part], *spec.shape[1:]] for spec in self._specs]
        tensors = [tf.compat.v1.placeholder(spec.dtype, shape) for spec, shape in zip(self._specs, shapes, strict=True)]
        return [Placed(Shard.of_rows(self._rows), [tensor], replica=part) for tensor in tensors]

    def _part(self, part: int, number: int, state: Any, count: tf.Tensor) -> tf.Tensor:
        """A part of the step in a round; returns a packed `Result`, whose metrics count in the last round."""
        mesh = Round(part, self._count, self._sent, self._places, number)
        batch = self._step.placed(state, self._program.fetched(state, count), self._rows, mesh)
        held = _Held(self._metrics, self._terms)
        # What the step assigns before it ends here, it will assign again in the next round.
        early = {key: _copy(self._handles[key]) for key in self._early}
        places = {
            name: tensorflow_coordinator.variable_of_execution(place)
            for name, place in self._program.streams.counters.items()
        }
        streams = dataclasses.replace(self._program.streams, counters=places)
        with tensorflow_internals.without_strategy():
            try:
                self._compute(mesh, batch, streams, held.variables | early)
            except RoundEnds:
                return self._program.packed(held.added(), None)
        raise NotInRounds

    def _update(self) -> tf.Tensor:
        """The update of the variables, by what the parts have left."""
        held = _Held(self._metrics, self._terms)
        mesh = Update(self._count, self._sent, self._places, self.rounds, held.handles)
        with mesh.scratch.as_default():
            batch = self._without_batch(mesh)
        vector = self._updated(mesh, batch, held)
        if len(mesh.sent) != len(self._sent):
            raise NotInRounds
        return vector

    def _whole(self, state: Any, count: tf.Tensor) -> tf.Tensor:
        """The whole step, of a batch that cannot be divided, or of one without an exchange."""
        mesh = Whole()
        batch = self._step.placed(state, self._program.fetched(state, count), (), mesh)
        return self._updated(mesh, batch, _Held(self._metrics, self._terms))

    def _updated(self, mesh: RoundMesh, batch: Sequence[Placed], held: _Held) -> tf.Tensor:
        with tensorflow_internals.without_strategy():
            logs = self._compute(mesh, batch, self._program.streams, held.variables)
            return self._program.packed(held.added(), logs or None)


class _Held:
    """What a closure adds to metrics, in variables of its own which begin at zero.

    Attributes:
        variables: by the `id` of a metric's handle.
    """

    def __init__(self, metrics: Sequence[tuple[int, Any]], terms: Mapping[int, Placed]):
        self._nothing = [tf.zeros(one.shape, tf_variable(one).dtype) for _, one in metrics]
        self._own = [
            tensorflow_coordinator.variable_of_execution(zero) if handle in terms else None
            for (handle, _), zero in zip(metrics, self._nothing, strict=True)
        ]
        self.variables = {
            handle: Placed(Partial(), [own.handle])
            for (handle, _), own in zip(metrics, self._own, strict=True)
            if own is not None
        }

    @property
    def handles(self) -> list[tf.Tensor]:
        """Of all of them."""
        return [own.handle for own in self._own if own is not None]

    def added(self) -> list[tf.Tensor]:
        """What was added to each variable of the metrics; others than `variables` are on the servers."""
        pairs = zip(self._own, self._nothing, strict=True)
        return [zero if own is None else own.read_value() for own, zero in pairs]


class _Servers:
    """The server for what is exchanged: for a gradient that of a variable of its shape."""

    def __init__(self, model: Any):
        variables = [tf_variable(one) for one in model.trainable_variables]
        of_shapes: dict[tuple[int, ...], list[str]] = {}
        for one in variables:
            of_shapes.setdefault(tuple(one.shape), []).append(getattr(one, "device", None) or _FIRST_SERVER)
        self._of_shapes = {shape: itertools.cycle(devices) for shape, devices in of_shapes.items()}

    def __call__(self, like: Any) -> str:
        shape = tuple(like.shape) if like.shape.rank is not None else ()
        return next(self._of_shapes.get(shape, iter([_FIRST_SERVER])))


_FIRST_SERVER = "/job:ps/task:0/device:CPU:0"


def _handle(variable: Any) -> tf.Tensor:
    return tf_variable(variable).handle


def _is_read_only(handle: tf.Tensor) -> bool:
    return all(operation.type == accumulators.READ for operation in handle.consumers())


def _copy(handle: tf.Tensor) -> Placed:
    """A variable of this execution with the value of another one."""
    own = tensorflow_coordinator.variable_of_execution(tensorflow_functions.read(handle))
    return spmd.replicated([own.handle])
