"""The inner loop of strategies whose replicas compute the step of one device, partitioned (see `tfdist.spmd`).

    the first batch is fetched             how many examples it has for each replica decides which graph runs
    while there are batches of these sizes
        the traced step of one device, partitioned for the replicas
        the next batch is fetched
    a batch of other sizes                 is handed back, and goes on in the graph of its sizes

The step is traced once, and partitioned for each number of examples that a batch has. There are two as a rule: that of
a full batch, and that of the last one. Where these numbers are known before a batch is fetched, each step fetches its
own: a batch that waits on its devices would have to come to the host to be handed on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.input import batch_parts
from tfdist.interface.program import AtNan, Logs, Outcome, Steps
from tfdist.internals import keras as keras_internals
from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.jobs import consensus
from tfdist.loop.first_step import FirstStep
from tfdist.loop.inner_loop import HOST, Graph, PredictProgram, StepProgram, joined
from tfdist.loop.one_device_step import OneDeviceStep, Rows, step_of
from tfdist.spmd import Cost


def coarsest(strategy: Any, model: Any) -> float:
    """The machine epsilon of the coarsest type that layers compute in."""
    types = {str(layer.compute_dtype) for layer in keras_internals.all_layers(model)} | {"float32"}
    found = [_epsilon_of(tf.as_dtype(name).as_numpy_dtype) for name in types if "float" in name]
    on_gpu = any("GPU" in device for device in strategy.devices)
    if on_gpu and tf.config.experimental.tensor_float_32_execution_enabled():
        found.append(2.0**-10)  # of TensorFloat-32
    return max(found)


def _epsilon_of(kind: type) -> float:
    """The distance from 1 to the next number; NumPy's `finfo` does not know bfloat16."""
    one, two = kind(1), kind(2)
    return float(np.nextafter(one, two) - one)


class PartitionedProgram(StepProgram):
    """Runs `model.train_step` or `model.test_step` of one device on all replicas.

    Attributes:
        steps_together: the number of steps that a mesh computes as one, where so many follow each other.
    """

    steps_together = 1

    def __init__(self, strategy: Any, steps: Steps):
        super().__init__(strategy, steps)
        # All processes must find in the same step that the loss is not finite.
        found = [keras_internals.loss_tracker(self._model).total] if self._at_nan is AtNan.STOP else []
        self._one_device = OneDeviceStep(strategy, steps, self._traced_step, read_in_steps=found)
        self._graphs: dict[tuple[Rows, bool], Any] = {}
        self._compares = steps.kind == "train" and steps.compares_first and strategy.num_replicas > 1

    @property
    def cost(self) -> Cost:
        """What a step on a full batch costs."""
        return self._one_device.cost

    def run(self, state: Any, first: int, count: int) -> Outcome:
        done, more, finite = 0, True, True
        logs: Logs = {}
        held = None  # a batch that was fetched
        while more and finite and done < count:
            step, one_step = first + done, count - done == 1 and tensorflow_internals.profiling()
            known = self._batches.lengths_of_step(step, self._strategy.division)
            if known is None:
                held = self._fetched(state, step) if held is None else held
                if held is None:
                    return Outcome(done, True, logs)
            rows = self._one_device.rows(state, held) if known is None else tuple(map(int, known))
            graph = self._graph(rows, held, one_step)
            if self._compares and held is not None:
                with self._first_step().compared(self._model, state, held):
                    steps, more, alike, finite, held, logs = graph(state, tf.constant(step), 1, held)
            else:
                steps, more, alike, finite, held, logs = graph(state, tf.constant(step), count - done, held)
            self._compares = False
            more, finite = bool(more), bool(finite) and self._is_finite(logs)
            held = held if more and not bool(alike) else None
            done += int(steps) if finite else min(int(steps), self._steps_to_not_finite())
        return Outcome(done, not more, logs if done else {})

    def _first_step(self) -> FirstStep:
        return FirstStep(self._strategy, self._one_device, coarsest(self._strategy, self._model))

    def _is_finite(self, logs: Logs) -> bool:
        """Whether the loss is finite, as far as that is asked for."""
        return self._at_nan is not AtNan.FIND or math.isfinite(logs.get("loss", 0.0))

    def _steps_to_not_finite(self) -> int:
        """The number of steps of the last call of a graph until the loss was not finite."""
        if self._at_nan is AtNan.STOP:
            return 1 << 31  # it has stopped there
        return 1 + min(consensus.all_gather_object(self._strategy, int(self._finite_steps.numpy())))

    def _traced_step(self, data: Any) -> Logs:
        return step_of(self._strategy, self._model, self._step_name, self._recomputation)(data)

    def _fetched(self, state: Any, step: int) -> Any:
        """The batch number `step` of the pass; `None` if there is none."""
        batch = self._batches.fetch(state, tf.constant(step))
        if self._batches.length_known:
            return _without_optionals(batch)
        return _without_optionals(batch.get_value()) if bool(batch.has_value()) else None

    def _graph(self, rows: Rows, batch: Any, one_step: bool) -> Callable[..., Any]:
        """The graph for batches of these sizes."""
        if (rows, one_step) not in self._graphs:
            self._graphs[rows, one_step] = _Steps(self, rows, batch, one_step)
        return self._graphs[rows, one_step]


class _Steps:
    """The graph that runs steps on batches of the same sizes.

    Args:
        program: whose steps they are.
        rows: the number of examples of each replica.
        batch: such a batch; `None` where each step fetches its own.
        one_step: no further batch is fetched.
    """

    def __init__(self, program: PartitionedProgram, rows: Rows, batch: Any, one_step: bool):
        self._program = program
        self._rows = rows
        self._fetches = batch is None
        self._structure = tf.nest.map_structure(_spec_of_any_size, batch)
        self._one_step = one_step
        self._logs = program._one_device.trace().structured_outputs
        self._graph = Graph(self._run, program._strategy)

    def __call__(self, state: Any, first: tf.Tensor, count: int, batch: Any) -> Any:
        flat = _flat(batch)
        steps, more, alike, finite, batch, logs = self._graph(state, first, tf.constant(count), flat)
        return steps, more, alike, finite, self._packed(batch), logs

    def _run(self, state: Any, first: tf.Tensor, count: tf.Tensor, flat: Sequence[tf.Tensor]) -> Any:
        program = self._program
        program._count_no_finite_steps()
        mesh, metrics = program._one_device.mesh, program._one_device.summed
        mesh.begin(metrics)
        if self._one_step:
            finite, logs = self._step(state, first, flat)
            with tf.control_dependencies([finite]):
                mesh.end(metrics)
            one = tf.constant(1), tf.constant(True), tf.constant(True), finite, flat
            return *one, logs or program._results(logs, after=finite)
        with tf.device(HOST):
            yes = tf.constant(True)
            begun = tf.constant(0), yes, yes, yes, list(flat), self._no_logs()
        invariants = tf.nest.map_structure(lambda one: one.shape, begun)
        invariants = (*invariants[:4], self._shapes(state), invariants[5])
        if program.steps_together > 1 and self._can_look_ahead:
            begun = self._in_groups(state, first, count, begun, invariants)
        with mesh.branches() as note:
            done, more, alike, finite, batch, logs = tf.while_loop(
                lambda done, more, alike, finite, batch, logs: self._goes_on(count, done, more, alike, finite),
                lambda done, more, alike, finite, batch, logs: self._iteration(state, first, count, done, batch),
                begun,
                shape_invariants=invariants,
                parallel_iterations=program._strategy.parallel_steps,
            )
            note(done)
        with tf.control_dependencies([done]):
            mesh.end(metrics)
        return done, more, alike, finite, batch, logs or program._results(logs, after=done)

    def _shapes(self, state: Any) -> list[tf.TensorShape]:
        """The shapes of the tensors of any batch, of which there may be any number of examples."""
        if self._fetches:
            return []
        with tf.__internal__.FuncGraph("scratch").as_default():
            batch = self._program._batches.fetch(state, tf.constant(0))
            batch = batch if self._program._batches.length_known else batch.get_value()
            return [
                tf.TensorShape([None, *one.shape[1:]]) if one.shape.rank else one.shape
                for one in _flat(_without_optionals(batch))
            ]

    @property
    def _can_look_ahead(self) -> bool:
        """Whether the sizes of later batches are known without taking them from the steps that they are for."""
        batches = self._program._batches
        return self._fetches or (batches.length_known and (batches.size is not None or batches.at_any_time))

    def _in_groups(
        self, state: Any, first: tf.Tensor, count: tf.Tensor, begun: tuple[Any, ...], invariants: Any
    ) -> tuple[Any, ...]:
        """Runs groups of steps on batches of these sizes, as many as there are."""
        together, fetch = self._program.steps_together, self._program._batches.fetch

        def goes_on(done: tf.Tensor, *conditions: Any) -> tf.Tensor:
            with tf.device(HOST):
                alike = [self._is_alike_at(state, first + done + number) for number in range(1, together)]
                return tf.reduce_all([done + together <= count, *conditions[:3], *alike])

        def group(done: tf.Tensor, more: Any, alike: Any, finite: tf.Tensor, flat: Any, _: Any) -> tuple[Any, ...]:
            with tf.device(HOST):
                held = fetch(state, first + done) if self._fetches else self._packed(flat)
                later = [_without_optionals(fetch(state, first + done + number)) for number in range(1, together)]
            logs = self._program._one_device.compute_together(state, [held, *later], self._rows)
            with tf.device(HOST):
                done += together
                more, alike, batch = self._next(state, first + done, done < count, flat)
            return done, more, alike, finite, batch, logs

        loop = {"shape_invariants": invariants, "parallel_iterations": 1}
        return tf.while_loop(goes_on, group, begun, **loop)

    def _goes_on(self, count: tf.Tensor, done: tf.Tensor, *conditions: tf.Tensor) -> tf.Tensor:
        # The loop is controlled from the host: a condition on a GPU would be waited for, and copied, at each step.
        with tf.device(HOST):
            return tf.reduce_all([done < count, *conditions])

    def _iteration(
        self, state: Any, first: tf.Tensor, count: tf.Tensor, done: tf.Tensor, flat: Sequence[tf.Tensor]
    ) -> tuple[Any, ...]:
        finite, logs = self._step(state, first + done, flat)
        with tf.device(HOST):
            done += 1
            more, alike, batch = self._next(state, first + done, done < count, flat)
        return done, more, alike, finite, batch, logs

    def _step(self, state: Any, step: tf.Tensor, flat: Sequence[tf.Tensor]) -> tuple[tf.Tensor, Logs]:
        batch = self._program._batches.fetch(state, step) if self._fetches else self._packed(flat)
        logs = self._program._one_device.compute(state, batch, self._rows)
        return self._program._goes_on(), logs

    def _next(self, state: Any, step: tf.Tensor, wanted: tf.Tensor, flat: Sequence[tf.Tensor]) -> tuple[Any, ...]:
        """Whether there is a batch number `step`, whether it has the sizes of this graph, and its tensors."""
        batches, division = self._program._batches, self._program._strategy.division
        rows = batches.lengths_of_step(step, division)
        if rows is not None:
            return tf.constant(True), self._is_alike(rows), []
        none = [tf.identity(tensor) for tensor in flat]

        def found(batch: Any) -> tuple[Any, ...]:
            batch = _without_optionals(batch)
            if not self._rows:  # each batch is computed whole
                return tf.constant(True), tf.constant(True), _flat(batch)
            return tf.constant(True), self._is_alike(batches.lengths_of_parts(state, batch, division)), _flat(batch)

        def fetch() -> tuple[Any, ...]:
            batch = batches.fetch(state, step)
            if batches.length_known:
                return found(batch)
            ended = tf.constant(False), tf.constant(True), none
            return tf.cond(batch.has_value(), lambda: found(batch.get_value()), lambda: ended)

        with self._program._one_device.mesh.branches() as done:
            found_or_not: tuple[Any, ...] = tf.cond(wanted, fetch, lambda: (tf.constant(True), tf.constant(True), none))
            done(found_or_not[0])
        return found_or_not

    def _is_alike_at(self, state: Any, step: tf.Tensor) -> tf.Tensor:
        """Whether the batch number `step` has the sizes of this graph."""
        batches, division = self._program._batches, self._program._strategy.division
        if batches.size is not None:
            return tf.constant(True)
        rows = batches.lengths_of_step(step, division)
        return self._is_alike(
            batches.lengths_of_parts(state, batches.fetch(state, step), division) if rows is None else rows
        )

    def _is_alike(self, rows: Sequence[Any]) -> tf.Tensor:
        """Whether a batch has the sizes of this graph."""
        return tf.reduce_all(tf.equal(tf.stack(list(rows)), tf.constant(self._rows)))

    def _no_logs(self) -> Logs:
        outputs = self._logs
        return tf.nest.map_structure(lambda one: tf.zeros([n or 0 for n in one.shape], one.dtype), outputs)

    def _packed(self, flat: Sequence[tf.Tensor]) -> Any:
        """The structure of a batch, of its tensors."""
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

    def run(self, state: Any, first: int, count: int) -> Outcome:
        outputs = []
        for batch in self._batches.take(state, first, count):
            if self._batches.local:  # the other processes have batches of their own
                mine = self._batches.local_examples(state, batch, self._strategy.division)
                outputs.append(self._one_device.trace()(mine))
                continue
            rows = self._one_device.rows(state, batch)
            if rows not in self._graphs:
                self._graphs[rows] = Graph(self._of(rows), self._strategy)
            outputs.append(self._graphs[rows](state, batch))
        return Outcome(len(outputs), len(outputs) < count, {"outputs": joined(outputs)} if outputs else {})

    def _of(self, rows: Rows) -> Callable[..., Any]:
        """The function that predicts batches of these sizes."""
        self._one_device.trace()

        def predict(state: Any, batch: Any) -> Any:
            return self._one_device.compute(state, batch, rows)

        return predict


def _flat(batch: Any) -> list[tf.Tensor]:
    """The tensors of a batch."""
    return [tensor for tensor in tf.nest.flatten(batch, expand_composites=True) if tensor is not None]


def _spec_of_any_size(value: Any) -> Any:
    """The spec of a tensor, dense, ragged or sparse, whatever the lengths of its axes are; `None` stays `None`."""
    if value is None:
        return None
    shape = tf.TensorShape([None] * value.shape.rank)
    if isinstance(value, tf.RaggedTensor):
        return tf.RaggedTensorSpec(shape, value.dtype, value.ragged_rank, value.row_splits.dtype)
    kind = tf.SparseTensorSpec if isinstance(value, tf.SparseTensor) else tf.TensorSpec
    return kind(shape, value.dtype)


def _without_optionals(batch: Any) -> Any:
    return tf.nest.map_structure(batch_parts.none_if_empty, batch)
