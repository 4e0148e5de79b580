"""The inner loop: a graph that runs many steps of a model.

Program.run(state, first, count)
    while step < count
        batch = fetch(state, step)
        train_step(batch)
    logs = the model's metrics

This loop runs steps on one replica: the only replica of a strategy, or that of a process which trains independently.
`tfdist.loop.partitioned_program` runs the steps of one device on several replicas.

A process that trains independently (`local_sgd`, `gossip`, `mpi_split`) runs Keras' own step on its part of each batch,
so that a mean over the examples is the mean over its part. The share of a process is its fraction of the examples of
the global batch; the shares of all processes add up to 1. The share is used in three places:

| quantity | value in each process |
|---|---|
| a loss with Keras' reduction "sum" | the sum / share, on the scale of the global batch: weights are averaged later |
| a number with which a step updates a `Mean` metric | the number, weighted by the share: together they count one step |
| a number that a step returns in its logs | the number * share, so that the sum over the processes is a mean |
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

import keras
import tensorflow as tf

from tfdist.data.input.division import WHOLE
from tfdist.interface.program import AtNan, Logs, Outcome, Program, Steps
from tfdist.interface.strategy import Strategy
from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_patches, keras_variables
from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.jobs import consensus
from tfdist.loop import metrics, recomputation
from tfdist.optimizers import fused as fused_optimizers

_NOTHING = contextlib.nullcontext()


class Graph:
    """A `tf.function` of `function`, run by the executor that is faster for its graph.

    Args:
        function: the Python function.
        single_threaded: whether one thread computes everything; then TensorFlow's serial executor is considered.
    """

    def __init__(self, function: Callable[..., Any], single_threaded: bool):
        self._function = function
        self._single_threaded = single_threaded
        self._compiled: Any = None
        self._serial = False

    def __call__(self, *arguments: Any) -> Any:
        if self._compiled is None:
            self._compiled, self._serial = self._choose(arguments)
        # A profile would not show a serial call.
        serial = self._serial and not tensorflow_internals.profiling()
        with keras_variables.looking_up_rows(), tensorflow_internals.serial_calls() if serial else _NOTHING:
            return self._compiled(*arguments)

    def _choose(self, arguments: tuple[Any, ...]) -> tuple[Any, bool]:
        """Returns the `tf.function`, and whether its calls use the serial executor."""
        if self._single_threaded:
            # The serial executor cannot run a graph that was traced for the default executor, which optimizes graphs.
            serial = self._new()
            with keras_variables.looking_up_rows(), tensorflow_internals.serial_calls():
                graph = serial.get_concrete_function(*arguments).graph
            if tensorflow_internals.flat(graph) and tensorflow_internals.light(graph):
                return serial, True
        return self._new(), False

    def _new(self) -> Any:
        # TensorFlow's warning about retracing counts by code object, which all programs share, unless it is wrapped.
        return tf.function(functools.partial(self._function), autograph=False, reduce_retracing=True)


# 1.0, or a float64 scalar tensor if the share varies.
Share: TypeAlias = float | tf.Tensor
_MEAN = "sum_over_batch_size"  # Keras' default reduction


def _scaled_by(share: Share) -> contextlib.AbstractContextManager[None]:
    """The context of a step on a part of a global batch with this share of its examples."""
    if _is_whole(share):
        return contextlib.nullcontext()

    def reduce_values(original: Any, values: Any, sample_weight: Any = None, reduction: Any = _MEAN) -> Any:
        value = original(values, sample_weight, reduction)
        is_sum = reduction == "sum" and tuple(values.shape) not in ((), (0,))
        return tf.math.divide_no_nan(value, tf.cast(share, value.dtype)) if is_sum else value

    def update_mean(original: Any, metric: Any, values: Any, sample_weight: Any = None) -> Any:
        values = keras.ops.convert_to_tensor(values)
        if len(values.shape) == 0 and sample_weight is None:
            sample_weight = share
        return original(metric, values, sample_weight)

    return keras_patches.replaced({"reduce_values": reduce_values, "mean_update_state": update_mean})


def _weighted_by(share: Share, logs: Any) -> Any:
    """Returns the logs of a step on a part of a global batch, weighted by its share, as float32."""
    logs = tf.nest.map_structure(lambda value: tf.cast(keras.ops.convert_to_tensor(value), tf.float32), logs)
    if _is_whole(share):
        return logs
    return tf.nest.map_structure(lambda value: tf.math.multiply_no_nan(value, tf.cast(share, value.dtype)), logs)


def _is_whole(share: Share) -> bool:
    return isinstance(share, float) and share == 1.0


HOST = "CPU:0"
# The number of finished steps, whether there are more batches, whether the loss is finite, and the last step's logs.
LoopState = tuple[tf.Tensor, tf.Tensor, tf.Tensor, Logs]


class StepProgram(Program):
    """Runs `model.train_step` or `model.test_step`."""

    meets_in_each_step: ClassVar[bool] = True  # whether all processes compute each step together, on a global batch

    def __init__(self, strategy: Strategy, steps: Steps):
        self._strategy = strategy
        self._model = steps.model
        self._step_name = f"{steps.kind}_step"
        self._batches = steps.batches
        watched = keras_internals.loss_tracker(steps.model) is not None
        self._at_nan = steps.at_nan if watched else AtNan.NOTHING
        with tf.init_scope(), tensorflow_internals.without_strategy(), tf.device(strategy.devices[0]):
            # The number of steps of a call before the first with a loss that is not finite, for `AtNan.FIND`.
            self._finite_steps = tf.Variable(0, trainable=False, dtype=tf.int64)
        self._recomputation = _recomputation(strategy, steps)
        self._own_logs = steps.own_logs
        self._one_step, self._many_steps = self._make_functions()

    def run(self, state: Any, first: int, count: int) -> Outcome:
        steps, more, logs = self._function(count)(state, tf.constant(first), tf.constant(count))
        steps = int(steps)
        if self._at_nan is AtNan.FIND and steps and not math.isfinite(logs.get("loss", 0.0)):
            finite_steps = int(self._finite_steps.numpy())
            steps = min(steps, 1 + min(consensus.all_gather_object(self._strategy, finite_steps)))
        return Outcome(steps, not bool(more), logs if steps else {})

    def _function(self, count: int) -> Callable[..., Any]:
        # TensorFlow's profiler loses step markers inside a graph's loop. Without a profile, one graph runs all steps,
        # since the results of two graphs can differ in the last bit.
        return self._one_step if count == 1 and tensorflow_internals.profiling() else self._many_steps

    def _make_functions(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        if self._strategy.runs_eagerly(self._model):
            self._at_nan = AtNan.STOP if self._at_nan is AtNan.FIND else self._at_nan  # eager steps are awaited anyway
            return self._steps_eagerly, self._steps_eagerly
        single_threaded = self._strategy.single_threaded
        return Graph(self._single_step, single_threaded), Graph(self._steps, single_threaded)

    def _single_step(self, state: Any, first: tf.Tensor, count: tf.Tensor) -> tuple[Any, Any, Logs]:
        del count
        self._reset_finite_steps()
        batch = self._batches.fetch(state, first)
        if self._batches.length_known:
            finite, logs = self._step(state, batch)
            return tf.constant(1), tf.constant(True), self._results(logs, after=finite)
        more = batch.has_value()
        nothing = tf.constant(True), self._no_logs()
        finite, logs = tf.cond(more, lambda: self._step(state, batch.get_value()), lambda: nothing)
        return tf.cast(more, tf.int32), more, self._results(logs, after=finite)

    def _steps(self, state: Any, first: tf.Tensor, count: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, Logs]:
        self._reset_finite_steps()
        with tf.device(HOST):
            start: LoopState = (tf.constant(0), tf.constant(True), tf.constant(True), self._no_logs())

        # The host controls the loop: a condition on a GPU would be awaited and copied at each step.
        def proceed(done: tf.Tensor, more: tf.Tensor, finite: tf.Tensor, logs: Any) -> tf.Tensor:
            del logs
            with tf.device(HOST):
                return (done < count) & more & finite

        def body(done: tf.Tensor, more: tf.Tensor, finite: tf.Tensor, logs: Any) -> Any:
            with tf.device(HOST):
                step = first + done
            batch = self._batches.fetch(state, step)
            if self._batches.length_known:
                finite, logs = self._step(state, batch)
            else:
                more = batch.has_value()
                finite, logs = tf.cond(more, lambda: self._step(state, batch.get_value()), lambda: (finite, logs))
            with tf.device(HOST):
                return done + tf.cast(more, tf.int32), more, finite, logs

        parallel_steps = self._strategy.parallel_steps
        done, more, _, logs = tf.while_loop(proceed, body, start, parallel_iterations=parallel_steps)
        return done, more, self._results(logs, after=done)

    def _no_logs(self) -> Logs:
        return tf.nest.map_structure(lambda spec: tf.zeros(spec.shape, spec.dtype), self._own_logs or {})

    def _steps_eagerly(self, state: Any, first: tf.Tensor, count: tf.Tensor) -> tuple[Any, Any, Logs]:
        """Runs steps like `_steps`, without a graph, for `run_eagerly=True`."""
        done, finite = 0, True
        logs: Logs = {}
        for batch in self._batches.take(state, int(first), int(count)):
            finite, logs = self._step(state, batch)
            done += 1
            if not bool(finite):
                break
        return done, done == int(count) or not bool(finite), self._results(logs)

    def _step(self, state: Any, batch: Any) -> tuple[tf.Tensor, Logs]:
        """Runs one step; returns whether the loop goes on, and the step's own logs."""

        def computed() -> Logs:
            data, share = self._batches.part(state, batch, 0, WHOLE)
            with _scaled_by(share), keras_variables.drawing_in_graphs(), tensorflow_internals.own_traces():
                logs = self._step_function()(data)
            returns_own_logs = self._own_logs is not None or set(logs) != metrics.names(self._model)
            return _weighted_by(share, logs) if returns_own_logs else {}

        update = fused_optimizers.fused(self._model.optimizer, self._strategy.fused, xla=self._with_xla)
        with update, self._own_metrics(), self._recomputation.traced():
            own_logs = self._strategy.run(computed)
        return self._goes_on(), own_logs

    def _goes_on(self) -> tf.Tensor:
        """Returns whether the loop goes on after a step: until the sum of the losses is not finite, for `AtNan.STOP`.

        For `AtNan.FIND` it counts the step if the sum is finite. Once the sum is not finite, it remains so.
        """
        if self._at_nan is AtNan.NOTHING:
            with tf.device(HOST):
                return tf.constant(True)
        with tf.device(self._strategy.devices[0]):  # to avoid a copy of the sum to the host
            finite = tf.math.is_finite(metrics.own_part(keras_internals.loss_tracker(self._model).total))
            if self._at_nan is AtNan.STOP:
                return finite
            self._finite_steps.assign_add(tf.cast(finite, tf.int64))
        with tf.device(HOST):
            return tf.constant(True)

    def _reset_finite_steps(self) -> None:
        if self._at_nan is AtNan.FIND:
            with tf.device(self._strategy.devices[0]):
                self._finite_steps.assign(0)

    @property
    def _with_xla(self) -> bool:
        # XLA would merge the recomputed operations with the original ones.
        recomputes = self._recomputation.wanted is not None
        return self._strategy.alone and not recomputes and keras_internals.wants_xla(self._model)

    def _own_metrics(self) -> contextlib.AbstractContextManager[None]:
        if self.meets_in_each_step:
            return contextlib.nullcontext()
        return metrics.refused(self._model, self._strategy.name)

    def _step_function(self) -> Callable[[Any], Logs]:
        step = getattr(self._model, self._step_name)
        if self._with_xla:
            step = tf.function(step, jit_compile=True)
        marked = self._recomputation.marked(step)
        return lambda data: metrics.require_logs(self._model, self._step_name, marked(data))

    def _results(self, own_logs: Logs, after: tf.Tensor | None = None) -> Logs:
        """Returns the logs of a call: the results of the metrics, or the logs of the last step.

        Processes may match collective operations by their order, so the logs are reduced only once `after`, a tensor
        of the last step, is computed.
        """
        with tf.control_dependencies([] if after is None else [after]):
            return own_logs or metrics.results(self._strategy, self._model)


class PredictProgram(Program):
    """Runs `model.predict_step`."""

    def __init__(self, strategy: Strategy, steps: Steps):
        self._strategy = strategy
        self._model = steps.model
        self._batches = steps.batches
        eager = strategy.runs_eagerly(steps.model)
        self._function = self._predict if eager else Graph(self._predict, strategy.single_threaded)

    def run(self, state: Any, first: int, count: int) -> Outcome:
        """Predicts up to `count` batches; the logs are `{"outputs": ...}`, in the order of the examples."""
        outputs = [self._outputs(state, batch) for batch in self._batches.take(state, first, count)]
        return Outcome(len(outputs), len(outputs) < count, {"outputs": joined(outputs)} if outputs else {})

    def _outputs(self, state: Any, batch: Any) -> Any:
        return self._function(state, batch)

    def _predict(self, state: Any, batch: Any) -> Any:
        def computed() -> Any:
            data, _ = self._batches.part(state, batch, 0, WHOLE)
            with keras_variables.drawing_in_graphs(), tensorflow_internals.own_traces():
                return self._model.predict_step(data)

        return self._strategy.run(computed)


def _recomputation(strategy: Strategy, steps: Steps) -> recomputation.Recomputation:
    wanted = strategy.recompute if steps.kind == "train" else None
    batch_size = getattr(steps.batches, "batch_size", None)
    examples = None if batch_size is None else max(1, batch_size // strategy.num_replicas)
    return recomputation.Recomputation(wanted, steps.model, examples, eager=strategy.runs_eagerly(steps.model))


def joined(parts: list[Any]) -> Any:
    """Concatenates several structures of outputs."""
    if len(parts) == 1:
        return parts[0]
    return keras_internals.tree.map_structure(lambda *values: keras_internals.join(list(values)), *parts)
