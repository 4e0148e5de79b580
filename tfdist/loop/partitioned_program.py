"""The inner loop of strategies whose replicas compute the partitioned step of one device (see `tfdist.spmd`).

    fetch the first batch                  its number of examples per replica selects the graph
    while there are batches of these sizes
        compute the partitioned step
        fetch the next batch
    return a batch of other sizes          it continues in the graph for its sizes

The step is traced once and partitioned for every batch size, usually two: that of a full batch and that of the last
batch. If the sizes are known in advance, each step fetches its own batch: otherwise a batch that waits on the devices
would have to be copied to the host between graphs.

With `run_eagerly=True` there is no graph to partition, and one of the replicas computes each step.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.input import batch_parts
from tfdist.interface.program import AtNan, Logs, Outcome, Steps
from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_variables
from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.jobs import consensus
from tfdist.loop import building
from tfdist.loop.first_step import FirstStep
from tfdist.loop.inner_loop import HOST, Graph, PredictProgram, StepProgram
from tfdist.loop.one_device_step import OneDeviceStep, Rows, own_logs, step_of
from tfdist.optimizers import fused as fused_optimizers
from tfdist.spmd import Cost


class PartitionedProgram(StepProgram):
    """Runs `model.train_step` or `model.test_step` of one device on all replicas.

    Attributes:
        steps_together: the number of consecutive steps that a mesh computes together.
    """

    steps_together = 1

    def __init__(self, strategy: Any, steps: Steps):
        super().__init__(strategy, steps)
        # All processes must detect a loss that is not finite in the same step.
        read_in_steps = [keras_internals.loss_tracker(self._model).total] if self._at_nan is AtNan.STOP else []
        self._one_device = OneDeviceStep(strategy, steps, self._traced_step, read_in_steps)
        self._division = strategy.division
        self._graphs: dict[tuple[Rows, bool], Any] = {}
        self._compares = steps.kind == "train" and steps.compares_first and strategy.num_replicas > 1

    @property
    def cost(self) -> Cost:
        """The cost of a step on a full batch."""
        return self._one_device.cost

    def run(self, state: Any, first: int, count: int) -> Outcome:
        done, more, finite = 0, True, True
        logs: Logs = {}
        batch = None  # a fetched batch, unless each step fetches its own
        while more and finite and done < count:
            step, one_step = first + done, count - done == 1 and tensorflow_internals.profiling()
            lengths = self._batches.lengths_of_step(step, self._division)
            if lengths is None:
                batch = self._fetched(state, step) if batch is None else batch
                if batch is None:
                    return Outcome(done, True, logs)
            rows = self._one_device.rows(state, batch) if lengths is None else tuple(map(int, lengths))
            graph = self._graph(rows, batch, one_step)
            if self._compares and batch is not None:
                first_step = FirstStep(self._strategy, self._one_device, coarsest(self._strategy, self._model))
                with first_step.compared(self._model, state, batch):
                    steps, more, same_sizes, finite, batch, logs = graph(state, tf.constant(step), 1, batch)
            else:
                steps, more, same_sizes, finite, batch, logs = graph(state, tf.constant(step), count - done, batch)
            self._compares = False
            more, finite = bool(more), bool(finite) and self._is_finite(logs)
            batch = batch if more and not bool(same_sizes) else None
            done += int(steps) if finite else min(int(steps), self._steps_to_not_finite())
        return Outcome(done, not more, logs if done else {})

    def _is_finite(self, logs: Logs) -> bool:
        """Whether the loss is finite, which is checked here only for `AtNan.FIND`."""
        return self._at_nan is not AtNan.FIND or math.isfinite(logs.get("loss", 0.0))

    def _steps_to_not_finite(self) -> int:
        """Returns the number of steps of the last graph call up to the first with a loss that is not finite."""
        if self._at_nan is AtNan.STOP:
            return 1 << 31  # the graph itself has stopped there
        return 1 + min(consensus.all_gather_object(self._strategy, int(self._finite_steps.numpy())))

    def _traced_step(self, data: Any) -> Logs:
        return step_of(self._strategy, self._model, self._step_name, self._recomputation)(data)

    def _fetched(self, state: Any, step: int) -> Any:
        """Fetches batch number `step` of the pass; returns `None` at the end of the data."""
        batch = self._batches.fetch(state, tf.constant(step))
        if self._batches.length_known:
            return _without_optionals(batch)
        return _without_optionals(batch.get_value()) if bool(batch.has_value()) else None

    def _graph(self, rows: Rows, batch: Any, one_step: bool) -> Callable[..., Any]:
        if (rows, one_step) not in self._graphs:
            self._graphs[rows, one_step] = _Steps(self, rows, batch, one_step)
        return self._graphs[rows, one_step]


class _Steps:
    """The graph that runs steps on batches of the same sizes.

    Args:
        program: the program that runs the steps.
        rows: the number of examples of each replica.
        batch: a batch of these sizes; `None` if each step fetches its own.
        one_step: whether the graph runs a single step and fetches no further batch.
    """

    def __init__(self, program: PartitionedProgram, rows: Rows, batch: Any, one_step: bool):
        self._program = program
        self._batches, self._one_device, self._division = program._batches, program._one_device, program._division
        self._rows = rows
        self._fetches = batch is None
        self._structure = tf.nest.map_structure(_spec_of_any_size, batch)
        self._one_step = one_step
        self._logs = self._one_device.trace().structured_outputs
        self._graph = Graph(self._run, program._strategy.single_threaded)

    def __call__(self, state: Any, first: tf.Tensor, count: int, batch: Any) -> Any:
        """Runs up to `count` steps from number `first`.

        Returns:
            The number of steps, whether there is a next batch, whether it has these sizes, whether the loss is finite,
            the next batch, and the logs.
        """
        steps, more, same_sizes, finite, flat, logs = self._graph(state, first, tf.constant(count), _flat(batch))
        return steps, more, same_sizes, finite, self._packed(flat), logs

    def _run(self, state: Any, first: tf.Tensor, count: tf.Tensor, flat: Sequence[tf.Tensor]) -> Any:
        program = self._program
        program._reset_finite_steps()
        mesh, metrics = self._one_device.mesh, self._one_device.summed
        mesh.begin(metrics)
        if self._one_step:
            finite, logs = self._step(state, first, flat)
            with tf.control_dependencies([finite]):
                mesh.end(metrics)
            yes = tf.constant(True)
            return tf.constant(1), yes, yes, finite, flat, logs or program._results(logs, after=finite)
        with tf.device(HOST):
            yes = tf.constant(True)
            start = tf.constant(0), yes, yes, yes, list(flat), self._no_logs()
        invariants = tf.nest.map_structure(lambda tensor: tensor.shape, start)
        invariants = (*invariants[:4], self._shapes(state), invariants[5])
        if program.steps_together > 1 and self._can_look_ahead:
            start = self._in_groups(state, first, count, start, invariants)

        def goes_on(done: tf.Tensor, more: tf.Tensor, same_sizes: tf.Tensor, finite: tf.Tensor, *_: Any) -> tf.Tensor:
            # The host controls the loop: a condition on a GPU would be awaited and copied at each step.
            with tf.device(HOST):
                return tf.reduce_all([done < count, more, same_sizes, finite])

        def iteration(done: Any, more: Any, same_sizes: Any, finite: Any, flat: Any, _: Any) -> tuple[Any, ...]:
            finite, logs = self._step(state, first + done, flat)
            with tf.device(HOST):
                done += 1
                more, same_sizes, flat = self._next(state, first + done, done < count, flat)
            return done, more, same_sizes, finite, flat, logs

        loop = {"shape_invariants": invariants, "parallel_iterations": program._strategy.parallel_steps}
        with mesh.branches() as note:
            done, more, same_sizes, finite, flat, logs = tf.while_loop(goes_on, iteration, start, **loop)
            note(done)
        with tf.control_dependencies([done]):
            mesh.end(metrics)
        return done, more, same_sizes, finite, flat, logs or program._results(logs, after=done)

    def _shapes(self, state: Any) -> list[tf.TensorShape]:
        if self._fetches:
            return []
        with tf.__internal__.FuncGraph("scratch").as_default():
            batch = self._batches.fetch(state, tf.constant(0))
            batch = batch if self._batches.length_known else batch.get_value()
            return [
                tf.TensorShape([None, *tensor.shape[1:]]) if tensor.shape.rank else tensor.shape
                for tensor in _flat(_without_optionals(batch))
            ]

    @property
    def _can_look_ahead(self) -> bool:
        """Whether the sizes of later batches can be known without consuming these batches."""
        batches = self._batches
        return self._fetches or (batches.length_known and (batches.size is not None or batches.at_any_time))

    def _in_groups(
        self, state: Any, first: tf.Tensor, count: tf.Tensor, start: tuple[Any, ...], invariants: Any
    ) -> tuple[Any, ...]:
        """Runs groups of steps while there are enough batches of these sizes."""
        together, fetch = self._program.steps_together, self._batches.fetch

        def goes_on(done: tf.Tensor, *conditions: Any) -> tf.Tensor:
            with tf.device(HOST):
                same_sizes = [self._has_these_sizes(state, first + done + number) for number in range(1, together)]
                return tf.reduce_all([done + together <= count, *conditions[:3], *same_sizes])

        def group(done: tf.Tensor, more: Any, same_sizes: Any, finite: tf.Tensor, flat: Any, _: Any) -> tuple[Any, ...]:
            with tf.device(HOST):
                batch = fetch(state, first + done) if self._fetches else self._packed(flat)
                later = [_without_optionals(fetch(state, first + done + number)) for number in range(1, together)]
            logs = self._one_device.compute(state, [batch, *later], self._rows)
            with tf.device(HOST):
                done += together
                more, same_sizes, flat = self._next(state, first + done, done < count, flat)
            return done, more, same_sizes, finite, flat, logs

        loop = {"shape_invariants": invariants, "parallel_iterations": 1}
        return tf.while_loop(goes_on, group, start, **loop)

    def _step(self, state: Any, step: tf.Tensor, flat: Sequence[tf.Tensor]) -> tuple[tf.Tensor, Logs]:
        batch = self._batches.fetch(state, step) if self._fetches else self._packed(flat)
        logs = self._one_device.compute(state, [batch], self._rows)
        return self._program._goes_on(), logs

    def _next(self, state: Any, step: tf.Tensor, wanted: tf.Tensor, flat: Sequence[tf.Tensor]) -> tuple[Any, ...]:
        """Returns whether there is a batch number `step`, whether it has this graph's sizes, and its tensors."""
        rows = self._batches.lengths_of_step(step, self._division)
        if rows is not None:
            return tf.constant(True), self._equals_rows(rows), []
        unchanged = [tf.identity(tensor) for tensor in flat]

        def described(batch: Any) -> tuple[Any, ...]:
            batch = _without_optionals(batch)
            if not self._rows:  # each batch is computed whole
                return tf.constant(True), tf.constant(True), _flat(batch)
            rows = self._batches.lengths_of_parts(state, batch, self._division)
            return tf.constant(True), self._equals_rows(rows), _flat(batch)

        def fetch() -> tuple[Any, ...]:
            batch = self._batches.fetch(state, step)
            if self._batches.length_known:
                return described(batch)
            ended = tf.constant(False), tf.constant(True), unchanged
            return tf.cond(batch.has_value(), lambda: described(batch.get_value()), lambda: ended)

        with self._one_device.mesh.branches() as note:
            next_batch: tuple[Any, ...] = tf.cond(
                wanted, fetch, lambda: (tf.constant(True), tf.constant(True), unchanged)
            )
            note(next_batch[0])
        return next_batch

    def _has_these_sizes(self, state: Any, step: tf.Tensor) -> tf.Tensor:
        if self._batches.size is not None:
            return tf.constant(True)
        rows = self._batches.lengths_of_step(step, self._division)
        if rows is None:
            rows = self._batches.lengths_of_parts(state, self._batches.fetch(state, step), self._division)
        return self._equals_rows(rows)

    def _equals_rows(self, rows: Sequence[Any]) -> tf.Tensor:
        return tf.reduce_all(tf.equal(tf.stack(list(rows)), tf.constant(self._rows)))

    def _no_logs(self) -> Logs:
        return tf.nest.map_structure(lambda log: tf.zeros([n or 0 for n in log.shape], log.dtype), self._logs)

    def _packed(self, flat: Sequence[tf.Tensor]) -> Any:
        tensors = iter(flat)
        slots = tf.nest.flatten(self._structure, expand_composites=True)
        filled = [None if slot is None else next(tensors) for slot in slots]
        return tf.nest.pack_sequence_as(self._structure, filled, expand_composites=True)


class PartitionedPredictProgram(PredictProgram):
    """Runs `model.predict_step` of one device on all replicas."""

    def __init__(self, strategy: Any, steps: Steps):
        super().__init__(strategy, steps)
        self._one_device = OneDeviceStep(strategy, steps, steps.model.predict_step)
        self._graphs: dict[Rows, Any] = {}

    def _outputs(self, state: Any, batch: Any) -> Any:
        if self._batches.local:  # each process has its own batches
            return self._one_device.trace()(self._batches.local_examples(state, batch, self._strategy.division))
        rows = self._one_device.rows(state, batch)
        if rows not in self._graphs:
            self._one_device.trace()
            self._graphs[rows] = Graph(
                lambda state, batch: self._one_device.compute(state, [batch], rows), self._strategy.single_threaded
            )
        return self._graphs[rows](state, batch)


class OneReplicaProgram(StepProgram):
    """Runs eager steps, which have no graph to partition, on one replica.

    Each process of a job computes the whole of each batch.
    """

    def __init__(self, strategy: Any, steps: Steps):
        super().__init__(strategy, steps)
        self._one_device = OneDeviceStep(strategy, steps, getattr(steps.model, self._step_name))
        warnings.warn(
            f"The model `{steps.model.name}` has `run_eagerly=True`, so that one replica of `{strategy.name}` computes "
            "its steps; compile the model without it to train on all replicas",
            stacklevel=2,
        )

    def _steps_eagerly(self, state: Any, first: tf.Tensor, count: tf.Tensor) -> tuple[Any, Any, Logs]:
        mesh = self._one_device.mesh
        done, finite = 0, True
        logs: Logs = {}
        mesh.begin(self._model.metrics_variables)
        for batch in self._batches.take(state, int(first), int(count)):
            logs = self._computed(self._one_device.whole_batch(state, batch))
            done += 1
            finite = bool(self._goes_on())
            if not finite:
                break
        mesh.end(self._model.metrics_variables)  # the first step may have created some of them
        building.spread(self._strategy, self._model)
        return done, done == int(count) or not finite, logs or self._results({})

    def _computed(self, data: Any) -> Logs:
        update = fused_optimizers.fused(self._model.optimizer, self._strategy.fused)
        with _on_one_replica(self._strategy, self._model), update:
            return own_logs(self._model, self._step_name, getattr(self._model, self._step_name)(data))


class OneReplicaPredictProgram(PredictProgram):
    """Predicts eagerly on one replica."""

    def __init__(self, strategy: Any, steps: Steps):
        super().__init__(strategy, steps)
        self._one_device = OneDeviceStep(strategy, steps, steps.model.predict_step)

    def _outputs(self, state: Any, batch: Any) -> Any:
        data = self._one_device.whole_batch(state, batch)
        with _on_one_replica(self._strategy, self._model):
            return self._model.predict_step(data)


@contextlib.contextmanager
def _on_one_replica(strategy: Any, model: Any) -> Iterator[None]:
    """The context of an eager step; variables that it creates belong to all replicas."""
    made_in_scope = tensorflow_internals.variables_made_in(strategy.scope)
    with made_in_scope, strategy.tracing(model), keras_variables.looking_up_rows():
        yield


def coarsest(strategy: Any, model: Any) -> float:
    """Returns the machine epsilon of the coarsest dtype in which layers compute."""
    types = {str(layer.compute_dtype) for layer in keras_internals.all_layers(model)} | {"float32"}
    epsilons = [_epsilon_of(tf.as_dtype(name).as_numpy_dtype) for name in types if "float" in name]
    on_gpu = any("GPU" in device for device in strategy.devices)
    if on_gpu and tf.config.experimental.tensor_float_32_execution_enabled():
        epsilons.append(2.0**-10)  # of TensorFloat-32
    return max(epsilons)


def _epsilon_of(dtype: type) -> float:
    """Returns the distance from 1 to the next number; NumPy's `finfo` does not support bfloat16."""
    return float(np.nextafter(dtype(1), dtype(2)) - dtype(1))


def _flat(batch: Any) -> list[tf.Tensor]:
    return [tensor for tensor in tf.nest.flatten(batch, expand_composites=True) if tensor is not None]


def _spec_of_any_size(value: Any) -> Any:
    """Returns the spec of a dense, ragged or sparse tensor with axes of any length; `None` stays `None`."""
    if value is None:
        return None
    shape = tf.TensorShape([None] * value.shape.rank)
    if isinstance(value, tf.RaggedTensor):
        return tf.RaggedTensorSpec(shape, value.dtype, value.ragged_rank, value.row_splits.dtype)
    kind = tf.SparseTensorSpec if isinstance(value, tf.SparseTensor) else tf.TensorSpec
    return kind(shape, value.dtype)


def _without_optionals(batch: Any) -> Any:
    return tf.nest.map_structure(batch_parts.none_if_empty, batch)
