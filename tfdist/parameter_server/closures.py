"""The inner loop of workers that share variables, each at its own pace: processes with servers, or threads.

    run(state, first, count)               on the coordinator
        divide the steps into closures     a closure is a few steps; a free worker takes the next one
        on a worker: its steps             read the variables, and update them
        sum the metrics                    a closure returns what its steps added to the metrics

The metrics of a closure that ran twice, because its first worker died or was silent, count once.

The strategy has

    workers       the workers that run the closures, see `tfdist.parameter_server.workers`
    locks         whether updates lock the variables
    replica()     a `ClosureReplica`, which computes a step while other workers update the same variables

A closure gets its data in one of these ways, and a step gets the same examples as on one device:

    arrays              the worker has them; a closure contains the indices of its examples
    numbered batches    a closure contains the numbers of its batches, which the worker reads
    anything else       the coordinator reads the data, and sends one batch per closure
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.data.input import batch_parts
from tfdist.data.input.array_feed import ArrayBatches, ArrayFeed
from tfdist.data.input.dataset_feed import FetchedBatches
from tfdist.data.input.division import WHOLE
from tfdist.data.input.feed import Batches, WrappedFeed
from tfdist.errors import DifferenceWarning, UsageError
from tfdist.interface.program import AtNan, Logs, Outcome, Program, Steps
from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_data, keras_patches, keras_variables, tensorflow_coordinator
from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.internals.keras import tf_variable
from tfdist.loop import metrics
from tfdist.loop.inner_loop import StepProgram, joined
from tfdist.optimizers import fused as fused_optimizers
from tfdist.parameter_server import sharded_variable

# More than one, so that a worker that finishes early finds another closure.
CLOSURES_OF_A_WORKER = 3
STEPS_OF_A_CLOSURE = 10
# A closure unrolls its steps if a step has at most this many operations: 10 steps of 1000 take some 5 s to trace.
OPERATIONS_OF_A_SMALL_STEP = 1000
BYTES_OF_A_SMALL_STATE = 1 << 16


class ClosureProgram(StepProgram):
    """Runs `model.train_step` or `model.test_step` on the workers.

    Args:
        strategy: a strategy with the attributes that the module docstring lists.
        steps: the steps of a training or an evaluation.
        measures_staleness: whether the logs contain the staleness, which is 0 where steps run one after the other.
    """

    _strategy: Any

    meets_in_each_step = False

    def __init__(self, strategy: Any, steps: Steps, *, measures_staleness: bool = True):
        keras_variables.look_up_rows()  # for all later tracing, since closures are traced when workers need them
        self._measures_staleness = measures_staleness
        self._feed_batches = steps.batches
        self._trains = steps.kind == "train"
        self._staleness = _StalenessStatistics()
        self._metrics_updated: set[int] = set()  # the `id`s of the metrics' variables that steps have updated
        self._warned = False
        self._operations = math.inf  # the number of operations of a step, unknown before it is traced
        # Evaluations in which a step's logs or metrics are not sums over closures run one closure after the other.
        self._sequential = not self._trains and (steps.own_logs is not None or not _all_additive(steps.model))
        self._steps_together = STEPS_OF_A_CLOSURE if self._sequential else None  # the steps of a round; `None` is all
        self._own_step = keras_internals.has_own_step(steps.model, steps.kind)
        super().__init__(strategy, dataclasses.replace(steps, batches=worker_batches(steps.batches)))
        self._codec = _Codec(Result.spec(steps.model.metrics_variables, self._own_logs or {}))

    def begin_epoch(self) -> None:
        self._staleness = _StalenessStatistics()

    def run(self, state: Any, first: int, count: int) -> Outcome:
        iterations = self._iterations()
        done, ended = 0, False
        own_logs: Logs = {}
        added: list[Sequence[np.ndarray]] = []
        for results, ended in self._results_in_turn(state, first, count):
            added += [result.metrics for result in results]
            if self._copies_metrics:
                self._add(added)
            done += self._steps_of(results)
            if results:
                own_logs = results[-1].own_logs
            if self._trains:
                self._staleness.add(results)
            if ended or not all(result.finite for result in results):
                break
        self._add(added)
        self._warn_of_repeated(self._iterations() - iterations - done)
        staleness = self._staleness.logs() if self._measures_staleness else {}
        return Outcome(done, ended, self._results(own_logs) | staleness if done else {})

    @property
    def _copies_metrics(self) -> bool:
        """Whether a closure's metrics start at the model's values, which a custom step may read."""
        return self._sequential or self._own_step

    def _own_metrics(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._sequential else super()._own_metrics()

    def _results(self, own_logs: Logs, after: tf.Tensor | None = None) -> Logs:
        if own_logs:
            return metrics.results_in(self._strategy, self._model, own_logs, self._metrics_updated)
        return super()._results(own_logs, after)

    def _add(self, added: list[Sequence[np.ndarray]]) -> None:
        """Adds the closures' contributions to the model's metrics, and clears the list."""
        with self._strategy.scope():
            metrics.add(self._model.metrics_variables, added)
        added.clear()

    def _results_in_turn(self, state: Any, first: int, count: int) -> Iterator[tuple[list[Result], bool]]:
        """Yields the results of each group of closures, and whether the data have ended, up to `count` steps."""
        done = 0
        for wanted in self._rounds(count):
            work = list(closures_of(self._feed_batches, state, first + done, wanted, self._closure_length(wanted)))
            scheduled = list(map(self._schedule, work))
            results = [self._codec.unpack(vector) for vector in self._strategy.workers.results_of(scheduled)]
            done += self._steps_of(results)
            yield results, sum(closure.steps for closure in work) < wanted

    def _steps_of(self, results: Sequence[Result]) -> int:
        """Returns the number of steps of the training that closures with these results have run."""
        return sum(int(result.steps) for result in results)

    def _rounds(self, count: int) -> list[int]:
        """Returns the numbers of steps that are scheduled together, before the next ones are."""
        together = self._steps_together or max(1, count)
        return [min(together, count - done) for done in range(0, count, together)]

    def _closure_length(self, count: int) -> int:
        if self._sequential:
            return count
        closures = CLOSURES_OF_A_WORKER * self._strategy.workers.count
        return max(1, min(STEPS_OF_A_CLOSURE, count // closures))

    def _schedule(self, closure: Closure) -> Any:
        unrolled = closure.whole and self._operations <= OPERATIONS_OF_A_SMALL_STEP
        function = self._unrolled if unrolled else self._many_steps
        return self._strategy.workers.schedule(function, self._arguments(closure))

    def _arguments(self, closure: Closure) -> tuple[Any, ...]:
        return closure.arguments

    def _make_functions(self) -> Any:
        def make(unrolled: bool) -> Any:
            def closure(state: Any, count: tf.Tensor) -> tf.Tensor:
                return self._closure(state, count, unrolled=unrolled)

            return tf.function(closure, autograph=False, reduce_retracing=True)

        # A `tf.while_loop` over several processes exchanges control messages, which take a third of a small step.
        self._unrolled, looped = make(unrolled=True), make(unrolled=False)
        return looped, looped

    def _closure(self, state: Any, count: tf.Tensor, *, unrolled: bool) -> tf.Tensor:
        """Runs up to `count` steps on a worker; returns a packed `Result`.

        If `unrolled`, it runs all steps of a whole closure, even after a loss that is not finite.
        """

        def proceed(done: tf.Tensor, finite: tf.Tensor, *_: Any) -> tf.Tensor:
            return (done < count) & finite

        def body(done: tf.Tensor, finite: tf.Tensor, total: Any, largest: Any, own_logs: Any) -> Any:
            del finite, own_logs
            staleness, logs = self._worker_step(state, self._batches.fetch(state, done), variables)
            own_logs = logs if self._own_logs is not None else {}
            if not unrolled:
                self._operations = len(done.graph.get_operations())
            return done + 1, self._is_finite(), total + staleness, tf.maximum(largest, staleness), own_logs

        variables = ClosureVariables(self._model, self._copies_metrics)
        start = [tf.constant(0), tf.constant(True), tf.constant(0), tf.constant(0), self._no_logs()]
        with variables.in_place():
            if unrolled:
                end = functools.reduce(lambda values, _: body(*values), range(STEPS_OF_A_CLOSURE), start)
            else:
                end = tf.while_loop(proceed, body, start)
        done, finite, total, largest, own_logs = end
        return self._codec.pack(Result(done, finite, total, largest, variables.end(), own_logs))

    def _worker_step(self, state: Any, batch: Any, variables: ClosureVariables) -> tuple[tf.Tensor, Logs]:
        """Computes one step of one worker; returns its staleness and its logs."""

        replica = self._strategy.replica()

        def compute() -> Any:
            data, _ = self._batches.part(state, batch, 0, WHOLE)
            with (
                keras_variables.drawing_from(self._strategy.unseeded()),
                tensorflow_internals.own_traces(),
                replica.updating(self._model),
                replica.measuring_staleness(self._model.optimizer if self._trains else None) as staleness,
            ):
                logs = self._step_function()(data)
                self._metrics_updated |= variables.metrics_changed()
                self._warn_of_unmerged(logs, variables)
                return staleness(), tf.nest.map_structure(_as_float, logs)

        update = fused_optimizers.fused(self._model.optimizer, self._strategy.fused, locking=self._strategy.locks)
        with update, self._own_metrics(), self._recomputation.traced():
            staleness, logs = self._strategy.run(compute)
        return staleness, logs

    def _warn_of_unmerged(self, logs: Logs, variables: ClosureVariables) -> None:
        """Warns of logs that are computed from metrics but are not metrics' results: they are not merged."""
        if self._warned or self._sequential:
            return
        merged = metrics.names(self._model)
        unmerged = [name for name, value in logs.items() if name not in merged and variables.depends_on_metrics(value)]
        if unmerged:
            self._warned = True
            warnings.warn(
                f"`{self._step_name}` of the model `{self._model.name}` returns `{unmerged[0]}`, computed from what "
                f"its metrics have counted, and workers of `{self._strategy.name}` count separately: the value is that "
                "of the last worker\n\n"
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

    def _warn_of_repeated(self, steps: int) -> None:
        # `steps` is negative if loss scaling skipped updates because of gradients that were not finite.
        if self._trains and steps > 0:
            warnings.warn(f"{steps} steps ran twice, because a worker was lost or silent", stacklevel=2)


class ClosurePredictProgram(Program):
    """Runs `model.predict_step` on the workers."""

    def __init__(self, strategy: Any, steps: Steps):
        self._strategy = strategy
        self._model = steps.model
        self._feed_batches, self._batches = steps.batches, worker_batches(steps.batches)
        keras_variables.look_up_rows()
        self._function = tf.function(self._predict, autograph=False, reduce_retracing=True)

    def run(self, state: Any, first: int, count: int) -> Outcome:
        """Predicts up to `count` batches; the logs are `{"outputs": ...}`, in the order of the examples."""
        work = list(closures_of(self._feed_batches, state, first, count, 1))
        scheduled = [self._strategy.workers.schedule(self._function, closure.arguments) for closure in work]
        results = self._strategy.workers.results_of(scheduled)
        outputs = [keras_internals.tree.map_structure(_as_tensor, output) for output in results]
        return Outcome(len(work), len(work) < count, {"outputs": joined(outputs)} if outputs else {})

    def _predict(self, state: Any, count: tf.Tensor) -> Any:
        del count

        def compute() -> Any:
            data, _ = self._batches.part(state, self._batches.fetch(state, tf.constant(0)), 0, WHOLE)
            with tensorflow_internals.own_traces():
                return self._model.predict_step(data)

        return self._strategy.run(compute)


class ClosureVariables:
    """A closure's copies of the metrics' variables and of the model's small states.

    The steps of the closure read and change these copies without communicating with a server.

    Args:
        model: the model that is trained or evaluated.
        copies_metrics: whether the metrics start at the values of the model's metrics, and not at zero.
    """

    def __init__(self, model: Any, copies_metrics: bool):
        self._metrics, self._states = model.metrics_variables, _small_states(model)
        copied = [*(self._metrics if copies_metrics else ()), *self._states]
        values = [tf.convert_to_tensor(tf_variable(variable)) for variable in copied]
        zeros = [tf.zeros(v.shape, tf_variable(v).dtype) for v in (() if copies_metrics else self._metrics)]
        self._initial = zeros + values
        self._copies = [tensorflow_coordinator.variable_of_execution(value) for value in self._initial]

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Within this context, steps are traced with the copies in place of the model's variables."""
        with keras_variables.backed_by([*self._metrics, *self._states], self._copies):
            yield

    def metrics_changed(self) -> set[int]:
        """Returns the `id`s of the metrics' variables that the current graph changes."""
        pairs = zip(self._metrics, self._copies, strict=False)
        return {id(variable) for variable, copy in pairs if tensorflow_coordinator.is_changed(copy)}

    def depends_on_metrics(self, structure: Any) -> bool:
        """Whether a tensor of `structure` in the current graph is computed from the metrics' variables."""
        copies = self._copies[: len(self._metrics)]
        tensors = [tensor for tensor in tf.nest.flatten(structure) if tf.is_symbolic_tensor(tensor)]
        return any(tensorflow_coordinator.is_computed_from(tensor, copies) for tensor in tensors)

    def end(self) -> list[tf.Tensor]:
        """Adds the changes of the states to the model's, which other workers may have changed in the meantime.

        Returns:
            What the steps added to each of the metrics' variables.
        """
        values = [copy.read_value() for copy in self._copies]
        changes = [value - initial for value, initial in zip(values, self._initial, strict=True)]
        for variable, change in zip(self._states, changes[len(self._metrics) :], strict=True):
            tf_variable(variable).assign_add(change)
        return changes[: len(self._metrics)]


def _small_states(model: Any) -> list[Any]:
    """Returns the model's seeds, moving averages and the like that a closure copies."""
    return [
        variable
        for variable in model.non_trainable_variables
        if (tf_variable(variable).dtype.is_floating or tf_variable(variable).dtype.is_integer)
        and math.prod(variable.shape) * tf_variable(variable).dtype.size <= BYTES_OF_A_SMALL_STATE
    ]


class Result(NamedTuple):
    """The result of a closure: tensors on the worker, NumPy arrays on the coordinator.

    Attributes:
        steps: the number of steps that ran.
        finite: whether the loss is finite.
        staleness_total: the sum of the staleness of its steps.
        staleness_max: the largest staleness of a step.
        metrics: what its steps added to each of the metrics' variables.
        own_logs: the logs of the last step if they are not the results of the metrics, else empty.
    """

    steps: Any
    finite: Any
    staleness_total: Any
    staleness_max: Any
    metrics: list[Any]
    own_logs: Logs

    @classmethod
    def spec(cls, metrics_variables: Sequence[Any], own_logs: Any) -> Result:
        """Returns the specs of a result."""
        count = tf.TensorSpec([], tf.int32)
        added = [tf.TensorSpec(variable.shape, tf_variable(variable).dtype) for variable in metrics_variables]
        return cls(count, tf.TensorSpec([], tf.bool), count, count, added, own_logs)


class _Codec:
    """Packs a structure of tensors into one vector and back: one vector travels faster than several tensors.

    The vector is float64, which represents integers up to 2^53 exactly.

    Args:
        spec: a structure of `tf.TensorSpec`s with known shapes.
    """

    def __init__(self, spec: Any):
        self._spec = spec

    def pack(self, structure: Any) -> tf.Tensor:
        """Returns the vector, inside a graph."""
        tensors = tf.nest.flatten(structure)
        return tf.concat([tf.reshape(tf.cast(tensor, tf.float64), [-1]) for tensor in tensors], 0)

    def unpack(self, vector: np.ndarray) -> Any:
        """Returns the structure with NumPy arrays."""
        specs = tf.nest.flatten(self._spec)
        pieces = np.split(vector, np.cumsum([spec.shape.num_elements() for spec in specs])[:-1])
        arrays = [
            piece.reshape(spec.shape).astype(spec.dtype.as_numpy_dtype)
            for piece, spec in zip(pieces, specs, strict=True)
        ]
        return tf.nest.pack_sequence_as(self._spec, arrays)


class _StalenessStatistics:
    """The mean and the maximum of the staleness of an epoch's steps."""

    def __init__(self) -> None:
        self._steps = self._total = self._max = 0

    def add(self, results: Sequence[Result]) -> None:
        for result in results:
            self._steps += int(result.steps)
            self._total += int(result.staleness_total)
            self._max = max(self._max, int(result.staleness_max))

    def logs(self) -> Logs:
        if not self._steps:
            return {}
        return {"staleness_mean": self._total / self._steps, "staleness_max": float(self._max)}


class ClosureReplica:
    """Computes a worker's step on a whole batch; the variables are in this process or on parameter servers.

    Args:
        scope: the context in which an optimizer creates its variables at its first update.
    """

    def __init__(self, scope: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext):
        self._scope = scope
        self._counter_device: str | None = None  # the device that counts the steps, usually of a server
        self._gradients_done: list[Any] = []  # operations that end when the gradients are computed

    @contextlib.contextmanager
    def updating(self, model: Any) -> Iterator[None]:
        """The context of the step, in which the optimizers of `model` apply gradients with `update`."""
        with contextlib.ExitStack() as stack:
            for optimizer in keras_internals.optimizers(model):
                keras_patches.require_reduced_once(optimizer)
                update = functools.partial(self.update, optimizer)
                stack.enter_context(keras_patches.applying_with(optimizer, update))
            yield

    def update(
        self, optimizer: Any, apply: Callable[..., None], gradients: Sequence[Any], variables: Sequence[Any] | None
    ) -> None:
        """Updates `variables` with Keras' own `apply(gradients, variables)`; `None` means all of the `optimizer`'s."""
        if not optimizer.built and variables is not None:
            with tf.init_scope(), self._scope():
                optimizer.build(list(variables))
        # Without this dependency the servers would count the step as it begins, since nothing else delays the count.
        self._gradients_done = [tf.group(*_known_tensors(gradients))]
        # An update reads other variables besides the gradients, all of them on the servers. On a server's device they
        # need not travel to the worker and back.
        with tf.device(self._counter_device), sharded_variable.by_part(optimizer):
            apply(gradients, variables)

    @contextlib.contextmanager
    def measuring_staleness(self, optimizer: Any) -> Iterator[Callable[[], tf.Tensor]]:
        """Measures the staleness: the updates by others between this step's reads of variables and its own update.

        Yields a function to call at the end of the step, which returns the staleness as an int32 scalar. The count of
        updates is read at the start of the step, concurrently with the variables: waiting for it would cost a third of
        a small step.
        """
        if optimizer is None:
            yield lambda: tf.constant(0)
            return
        inner = keras_internals.inner(optimizer)
        counter = tf_variable(keras_internals.iterations(inner))
        counts: list[tf.Tensor] = []

        def count(variable: Any) -> None:
            with tf.control_dependencies(self._gradients_done):
                counts.append(tf.convert_to_tensor(variable.assign_add(1, read_value=True)))

        def staleness() -> tf.Tensor:
            with tf.device(self._counter_device):
                # A count inside a conditional, as with loss scaling, is out of reach: read it again, a little later.
                in_graph = counts and counts[-1].graph is count_at_start.graph
                count_at_update = counts[-1] if in_graph else counter.read_value()
                return tf.maximum(tf.cast(count_at_update - count_at_start, tf.int32) - 1, 0)

        self._counter_device = counter.device
        with tf.device(self._counter_device):
            count_at_start = tf.identity(counter.read_value())
        with keras_patches.counting(inner, count):
            yield staleness


class LockingReplica(ClosureReplica):
    """Computes a thread's step on a whole batch.

    Args:
        mutex: the handle of a mutex that is locked during an update; `None` for updates without a lock.
    """

    def __init__(self, mutex: tf.Tensor | None):
        super().__init__()
        self._mutex = mutex

    def update(self, optimizer: Any, apply: Callable[..., None], gradients: Sequence[Any], variables: Any) -> None:
        if self._mutex is None:
            super().update(optimizer, apply, gradients, variables)
            return
        graph = tf.compat.v1.get_default_graph()
        with tf.control_dependencies(_known_tensors(gradients)):
            lock = tf.raw_ops.MutexLock(mutex=self._mutex)
        first = len(graph.get_operations())
        with tf.control_dependencies([lock]):
            super().update(optimizer, apply, gradients, variables)
        updates = [operation for operation in graph.get_operations()[first:] if operation.op_def.is_stateful]
        with tf.control_dependencies(updates):
            tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)


def _known_tensors(gradients: Sequence[Any]) -> list[tf.Tensor]:
    known = [gradient for gradient in gradients if gradient is not None]
    flat: list[tf.Tensor] = tf.nest.flatten(known, expand_composites=True)
    return flat


@dataclass(frozen=True)
class Closure:
    """A few steps, as the arguments of the function that a worker runs.

    Attributes:
        arguments: the data, and the number of steps.
        steps: the number of steps.
        whole: the closure has the largest number of steps, each with a full batch.
        examples: the number of examples of all steps; `None` for a batch whose tensors have different lengths.
    """

    arguments: tuple[Any, ...]
    steps: int
    whole: bool = False
    examples: int | None = None


def closures_of(batches: Batches, state: Any, first: int, count: int, length: int) -> Iterator[Closure]:
    """Yields the closures of `count` steps, or of fewer if the data end.

    Args:
        batches: the feed's batches.
        state: the state of the pass.
        first: the number of the first batch.
        count: the number of steps.
        length: the largest number of steps per closure.
    """
    if isinstance(state, ClosurePass):
        yield from state.closures(first, count, length)
        return
    for batch in batches.take(state, first, count):
        (examples,) = map(int, batch_parts.lengths_of_parts(tf.nest.flatten(batch), WHOLE))
        known = None if examples == batch_parts.UNEQUAL else examples
        yield Closure((batch, tf.constant(1)), 1, examples=known)


class ClosurePass:
    """The state of a pass over data that the workers have or read themselves."""

    def closures(self, first: int, count: int, length: int) -> Iterator[Closure]:
        """Yields `count` steps from batch `first` on, up to `length` per closure."""
        raise NotImplementedError


@dataclass(frozen=True)
class IndexedPass(ClosurePass):
    """A pass over arrays, whose closures contain the indices of their examples.

    Attributes:
        batch_size: the number of examples in a full batch.
        arrays: the coordinator's arrays.
        positions: the arrays per example that `ArrayFeed.start` returns, of which the first are the indices.
        worker_arrays: the workers' arrays; `None` if each closure contains the examples of its steps.
    """

    batch_size: int
    arrays: Any
    positions: Sequence[np.ndarray]
    worker_arrays: Any

    def closures(self, first: int, count: int, length: int) -> Iterator[Closure]:
        for begin in range(first, first + count, length):
            steps = min(length, first + count - begin)
            rows = slice(begin * self.batch_size, (begin + steps) * self.batch_size)
            indices, *others = (positions[rows] for positions in self.positions)
            arrays = self.worker_arrays
            if arrays is None:
                with tf.device("CPU:0"):
                    arrays = keras_data.gather(self.arrays, tf.constant(indices))
                indices = np.arange(len(indices), dtype=indices.dtype)
            examples = tuple(tf.constant(positions) for positions in (indices, *others))
            whole = len(indices) == STEPS_OF_A_CLOSURE * self.batch_size
            yield Closure(((arrays, examples), tf.constant(steps)), steps, whole, len(indices))


class IndexedArrays(WrappedFeed):
    """An `ArrayFeed` whose passes are `IndexedPass`es.

    Args:
        feed: the coordinator's feed.
        worker_arrays: see `IndexedPass`.
    """

    def __init__(self, feed: ArrayFeed, worker_arrays: Any):
        super().__init__(feed)
        self.batches = feed.batches
        self._worker_arrays = worker_arrays

    def start(self, epoch: int, first_batch: int) -> IndexedPass:
        arrays, positions = self._feed.start(epoch, first_batch)
        positions = tuple(tensor.numpy() for tensor in positions)
        return IndexedPass(self.batch_size, arrays, positions, self._worker_arrays)

    def resume(self, saved: bytes, epoch: int, first_batch: int) -> IndexedPass:
        del saved
        return self.start(epoch, first_batch)


def worker_batches(batches: Batches) -> Batches:
    """Returns the `Batches` with which a worker's graph reads the data of a closure."""
    return batches if isinstance(batches, ArrayBatches | ReadByNumber) else SentBatches()


class ReadByNumber:
    """Marks `Batches` that a worker reads by the batch numbers in a closure."""


class SentBatches(FetchedBatches):
    """A batch that the coordinator has sent, traced for any number of examples.

    Keras weights the losses of several outputs by the number of examples if it is known when the graph is traced. All
    batches of a pass must be weighted in the same way, and the last one may be smaller.
    """

    def fetch(self, state: Any, step: tf.Tensor) -> Any:
        return tf.nest.map_structure(_with_unknown_length, super().fetch(state, step))


def _with_unknown_length(tensor: Any) -> Any:
    if not isinstance(tensor, tf.Tensor) or not tensor.shape.rank:
        return tensor
    return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=[None, *tensor.shape[1:]])


_generators: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def unseeded_of(strategy: Any) -> Any:
    """Returns the seed generator for Keras' unseeded draws on the workers of `strategy`."""
    if strategy not in _generators:
        with tf.init_scope(), strategy.scope():
            _generators[strategy] = keras.random.SeedGenerator(strategy.seed)
    return _generators[strategy]


def refuse_accumulation(model: Any, what: str) -> None:
    """Raises `UsageError` if an optimizer accumulates gradients; `what` names the setting by which steps overlap."""
    for optimizer in keras_internals.optimizers(model):
        if keras_internals.inner(optimizer).gradient_accumulation_steps:
            raise UsageError(
                f"The optimizer accumulates gradients, and with {what} one update would combine steps of several "
                "workers",
                "remove `gradient_accumulation_steps`, and use larger batches",
            )


def _all_additive(model: Any) -> bool:
    """Whether the metrics of `model` can be summed over closures."""
    return all(map(keras_internals.is_additive, keras_internals.metrics_of(model)))


def _as_tensor(value: Any) -> Any:
    return tf.convert_to_tensor(value) if isinstance(value, np.ndarray) else value


def _as_float(value: Any) -> tf.Tensor:
    return tf.cast(value, tf.float32)
