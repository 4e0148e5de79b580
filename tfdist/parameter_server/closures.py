"""The inner loop of workers that share variables, each at its own pace: processes with servers, or threads.

    run(state, first, count)            on the coordinator
        cut the steps into closures     a worker that is free takes the next one
        on a worker: its steps          read the variables, and update them
        sum the metrics                 a closure returns what its steps added to the metrics

The metrics of a closure that ran twice, because its first worker died or was silent, count once.

The strategy has

    workers       who run the closures, see `tfdist.parameter_server.workers`
    locks         whether updates lock the variables
    replica()     what a step does besides Keras' own, see `tfdist.parameter_server.closure_replica`
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.data.input.division import WHOLE
from tfdist.errors import DifferenceWarning, UsageError
from tfdist.interface.program import AtNan, Logs, Outcome, Program, Steps
from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_variables
from tfdist.internals.keras import tf_variable
from tfdist.loop import metrics
from tfdist.loop.inner_loop import StepProgram, joined
from tfdist.optimizers import fused as fused_optimizers
from tfdist.parameter_server import closure_data as data
from tfdist.parameter_server import closure_variables as held_variables

# More than one, so that a worker which is done early finds another closure.
CLOSURES_OF_A_WORKER = 3
# A closure unrolls its steps if a step has fewer operations: 10 steps of 1000 operations take some 5 s to trace.
OPERATIONS_OF_A_SMALL_STEP = 1000


class ClosureProgram(StepProgram):
    """Runs `model.train_step` or `model.test_step` on the workers.

    Args:
        strategy: has what the module says.
        steps: of a training or an evaluation.
        measures_staleness: the logs have the staleness; one step after the other needs no measurement.
    """

    _strategy: Any

    meets_in_each_step = False

    def __init__(self, strategy: Any, steps: Steps, *, measures_staleness: bool = True):
        keras_variables.look_up_rows()  # closures are traced when workers ask for them
        self._measures_staleness = measures_staleness
        self._given = steps.batches
        self._trains = steps.kind == "train"
        self._staleness = _Staleness()
        self._metrics_updated: set[int] = set()  # the `id`s of the variables of metrics that steps have updated
        self._said = False
        self._operations = math.inf  # of a step, not known before it is traced
        # One closure after the other is exact in all that metrics count, and in what a step makes of it.
        self._one_by_one = not self._trains and (steps.own_logs is not None or not _all_additive(steps.model))
        self._own_step = keras_internals.has_own_step(steps.model, steps.kind)
        super().__init__(strategy, dataclasses.replace(steps, batches=data.of_workers(steps.batches)))
        self._codec = _Codec(Result.spec(steps.model.metrics_variables, self._own_logs or {}))

    def begin_epoch(self) -> None:
        self._staleness = _Staleness()

    def run(self, state: Any, first: int, count: int) -> Outcome:
        before = self._iterations()
        done, ended = 0, False
        own: Logs = {}
        added: list[Sequence[np.ndarray]] = []
        for results, ended in self._results_in_turn(state, first, count):
            added += [result.metrics for result in results]
            if self._begins_metrics:
                self._add(added)
            done += self._steps_of(results)
            if results:
                own = results[-1].own_logs
            if self._trains:
                self._staleness.note(results)
            if ended or not all(result.finite for result in results):
                break
        self._add(added)
        self._note_repeated(self._iterations() - before - done)
        staleness = self._staleness.logs() if self._measures_staleness else {}
        return Outcome(done, ended, self._results(own) | staleness if done else {})

    @property
    def _begins_metrics(self) -> bool:
        """Whether a closure's metrics begin with the values of the model's, which a step of the users' own may read."""
        return self._one_by_one or self._own_step

    def _own_metrics(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._one_by_one else super()._own_metrics()

    def _results(self, own_logs: Logs, after: tf.Tensor | None = None) -> Logs:
        if own_logs:
            return metrics.results_in(self._strategy, self._model, own_logs, self._metrics_updated)
        return super()._results(own_logs, after)

    def _add(self, parts: list[Sequence[np.ndarray]]) -> None:
        """Adds to the model's metrics what closures have, and forgets it."""
        with self._strategy.scope():
            metrics.add(self._model.metrics_variables, parts)
        parts.clear()

    def _results_in_turn(self, state: Any, first: int, count: int) -> Iterator[tuple[list[Result], bool]]:
        """The results of closures that all have ended, and whether the data have too, until `count` steps are done."""
        done = 0
        for wanted in self._rounds(count):
            work = list(data.closures(self._given, state, first + done, wanted, self._closure_length(wanted)))
            scheduled = list(map(self._schedule, work))
            results = [self._codec.unpack(vector) for vector in self._strategy.workers.results_of(scheduled)]
            done += self._steps_of(results)
            yield results, sum(closure.steps for closure in work) < wanted

    def _steps_of(self, results: Sequence[Result]) -> int:
        """The number of steps of the training that closures with these results have done."""
        return sum(int(result.steps) for result in results)

    def _rounds(self, count: int) -> list[int]:
        """The numbers of steps that are given out together, before the next are."""
        if not self._one_by_one:
            return [count]
        return [min(data.STEPS_OF_A_CLOSURE, count - done) for done in range(0, count, data.STEPS_OF_A_CLOSURE)]

    def _closure_length(self, count: int) -> int:
        if self._one_by_one:
            return count
        closures = CLOSURES_OF_A_WORKER * self._strategy.workers.count
        return max(1, min(data.STEPS_OF_A_CLOSURE, count // closures))

    def _schedule(self, closure: data.Closure) -> Any:
        return self._strategy.workers.schedule(self._function_of(closure), self._arguments(closure))

    def _arguments(self, closure: data.Closure) -> tuple[Any, ...]:
        return closure.arguments

    def _function_of(self, closure: data.Closure) -> Any:
        unrolled = closure.whole and self._operations <= OPERATIONS_OF_A_SMALL_STEP
        return self._unrolled if unrolled else self._many_steps

    def _make_functions(self) -> Any:
        def make(unrolled: bool) -> Any:
            def closure(state: Any, count: tf.Tensor) -> tf.Tensor:
                return self._closure(state, count, unrolled=unrolled)

            return tf.function(closure, autograph=False, reduce_retracing=True)

        # A `tf.while_loop` over several processes exchanges control messages: a third of a small step.
        self._unrolled, looped = make(unrolled=True), make(unrolled=False)
        return looped, looped

    def _closure(self, state: Any, count: tf.Tensor, *, unrolled: bool) -> tf.Tensor:
        """Up to `count` steps on a worker; returns a packed `Result`.

        If `unrolled`, it runs all steps of a whole closure, even after a loss that is not finite.
        """

        def proceed(done: tf.Tensor, finite: tf.Tensor, *_: Any) -> tf.Tensor:
            return (done < count) & finite

        def body(done: tf.Tensor, finite: tf.Tensor, total: Any, largest: Any, own: Any) -> Any:
            del finite, own
            staleness, logs = self._worker_step(state, self._batches.fetch(state, done), held)
            own = logs if self._own_logs is not None else {}
            if not unrolled:
                self._operations = len(done.graph.get_operations())
            return done + 1, self._is_finite(), total + staleness, tf.maximum(largest, staleness), own

        held = held_variables.Held(self._model, self._begins_metrics)
        start = [tf.constant(0), tf.constant(True), tf.constant(0), tf.constant(0), self._no_logs()]
        with held.in_place():
            if unrolled:
                ended = functools.reduce(lambda before, _: body(*before), range(data.STEPS_OF_A_CLOSURE), start)
            else:
                ended = tf.while_loop(proceed, body, start)
        done, finite, total, largest, own = ended
        return self._codec.pack(Result(done, finite, total, largest, held.end(), own))

    def _worker_step(self, state: Any, batch: Any, held: held_variables.Held) -> tuple[tf.Tensor, Logs]:
        """One step of one worker: returns the step's staleness, and its logs."""

        replica = self._strategy.replica()

        def computed() -> Any:
            data, _ = self._batches.part(state, batch, 0, WHOLE)
            with (
                keras_variables.drawing_from(self._strategy.unseeded()),
                replica.updating(self._model),
                replica.measuring_staleness(self._model.optimizer if self._trains else None) as staleness,
            ):
                logs = self._step_function()(data)
                self._metrics_updated |= held.metrics_changed()
                self._require_under_own_names(logs, held)
                return staleness(), tf.nest.map_structure(_as_float, logs)

        update = fused_optimizers.fused(self._model.optimizer, self._strategy.fused, locking=self._strategy.locks)
        with update, self._own_metrics(), self._recomputation.traced():
            staleness, logs = self._strategy.run(computed)
        return staleness, logs

    def _require_under_own_names(self, logs: Logs, held: held_variables.Held) -> None:
        """Warns of logs that are computed of metrics, and are not the results of metrics: they are not merged."""
        own = metrics.names(self._model)
        of_metrics = [name for name, value in logs.items() if name not in own and held.is_metric(value)]
        if of_metrics and not self._said and not self._one_by_one:
            self._said = True
            warnings.warn(
                f"`{self._step_name}` of the model `{self._model.name}` returns `{of_metrics[0]}`, computed from what "
                f"its metrics have counted, and workers of `{self._strategy.name}` count apart: it is that of the last "
                "of them\n\n"
                "hint: return the result of a metric under the name of the metric",
                DifferenceWarning,
                stacklevel=2,
            )

    def _is_finite(self) -> tf.Tensor:
        if self._at_nan is AtNan.NOTHING:
            return tf.constant(True)
        return tf.math.is_finite(tf_variable(keras_internals.loss_tracker(self._model).total).read_value())

    def _iterations(self) -> int:
        return int(keras_internals.iterations(self._model.optimizer).numpy()) if self._trains else 0

    def _note_repeated(self, steps: int) -> None:
        # `steps` is negative where loss scaling skipped updates, for gradients that were not finite.
        if self._trains and steps > 0:
            warnings.warn(f"{steps} steps ran twice, since a worker was gone or silent", stacklevel=2)


class ClosurePredictProgram(Program):
    """Runs `model.predict_step` on the workers."""

    def __init__(self, strategy: Any, steps: Steps):
        self._strategy = strategy
        self._model = steps.model
        self._given, self._batches = steps.batches, data.of_workers(steps.batches)
        keras_variables.look_up_rows()
        self._function = tf.function(self._predict, autograph=False, reduce_retracing=True)

    def run(self, state: Any, first: int, count: int) -> Outcome:
        """Predicts up to `count` batches; the logs are `{"outputs": ...}`, in the order of the examples."""
        work = list(data.closures(self._given, state, first, count, 1))
        scheduled = [self._strategy.workers.schedule(self._function, closure.arguments) for closure in work]
        results = self._strategy.workers.results_of(scheduled)
        outputs = [keras_internals.tree.map_structure(_as_tensor, output) for output in results]
        return Outcome(len(work), len(work) < count, {"outputs": joined(outputs)} if outputs else {})

    def _predict(self, state: Any, count: tf.Tensor) -> Any:
        del count

        def computed() -> Any:
            data, _ = self._batches.part(state, self._batches.fetch(state, tf.constant(0)), 0, WHOLE)
            return self._model.predict_step(data)

        return self._strategy.run(computed)


class Result(NamedTuple):
    """The result of a closure: tensors on the worker, NumPy arrays on the coordinator.

    Attributes:
        steps: the number of steps that ran.
        finite: whether the loss is finite.
        staleness_total: the sum of the staleness of its steps.
        staleness_max: the largest staleness of a step.
        metrics: what its steps added to each variable of the metrics.
        own_logs: the logs of the last step, where they are not the results of the metrics.
    """

    steps: Any
    finite: Any
    staleness_total: Any
    staleness_max: Any
    metrics: list[Any]
    own_logs: Logs

    @classmethod
    def spec(cls, metrics_variables: Sequence[Any], own_logs: Any) -> Result:
        """The shapes and dtypes of a result."""
        count = tf.TensorSpec([], tf.int32)
        added = [tf.TensorSpec(variable.shape, tf_variable(variable).dtype) for variable in metrics_variables]
        return cls(count, tf.TensorSpec([], tf.bool), count, count, added, own_logs)


class _Codec:
    """Packs a structure of tensors into one vector and back: a vector travels faster than several tensors.

    The vector is float64, which holds integers up to 2^53 exactly.

    Args:
        spec: a structure of `tf.TensorSpec`s of known shapes.
    """

    def __init__(self, spec: Any):
        self._spec = spec

    def pack(self, structure: Any) -> tf.Tensor:
        """The vector, inside a graph."""
        numbers = tf.nest.flatten(structure)
        return tf.concat([tf.reshape(tf.cast(number, tf.float64), [-1]) for number in numbers], 0)

    def unpack(self, vector: np.ndarray) -> Any:
        """The structure, of NumPy arrays."""
        specs = tf.nest.flatten(self._spec)
        pieces = np.split(vector, np.cumsum([spec.shape.num_elements() for spec in specs])[:-1])
        arrays = [
            piece.reshape(spec.shape).astype(spec.dtype.as_numpy_dtype)
            for piece, spec in zip(pieces, specs, strict=True)
        ]
        return tf.nest.pack_sequence_as(self._spec, arrays)


class _Staleness:
    """The staleness of an epoch's steps: the updates by others between a step's reads and its own update."""

    def __init__(self) -> None:
        self._steps = self._total = self._max = 0

    def note(self, results: Sequence[Result]) -> None:
        for result in results:
            self._steps += int(result.steps)
            self._total += int(result.staleness_total)
            self._max = max(self._max, int(result.staleness_max))

    def logs(self) -> Logs:
        if not self._steps:
            return {}
        return {"staleness_mean": self._total / self._steps, "staleness_max": float(self._max)}


_generators: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def unseeded_of(strategy: Any) -> Any:
    """The seed generator for draws of Keras without a seed on the workers of `strategy`."""
    if strategy not in _generators:
        with tf.init_scope(), strategy.scope():
            _generators[strategy] = keras.random.SeedGenerator(strategy.seed)
    return _generators[strategy]


def refuse_accumulation(model: Any, what: str) -> None:
    """Raises `UsageError` for an optimizer that accumulates gradients, of workers whose steps overlap."""
    for optimizer in keras_internals.optimizers(model):
        if getattr(optimizer, "inner_optimizer", optimizer).gradient_accumulation_steps:
            raise UsageError(
                f"The optimizer accumulates gradients, and with {what} the steps of an update would be those of "
                "several workers",
                "leave `gradient_accumulation_steps` out, and take larger batches",
            )


def _all_additive(model: Any) -> bool:
    """Whether what the metrics of `model` count in each closure can be added up."""
    return all(map(keras_internals.is_additive, keras_internals.metrics_of(model)))


def _as_tensor(value: Any) -> Any:
    return tf.convert_to_tensor(value) if isinstance(value, np.ndarray) else value


def _as_float(value: Any) -> tf.Tensor:
    return tf.cast(value, tf.float32)
