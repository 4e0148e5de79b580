"""Workers that train on copies of the weights, and exchange updates with the weights on the servers (the centre).

    a closure on a worker
        start at the centre             if this worker has no copies from this training
        until its steps are done
            the exchanges that are due, see `tfdist.relaxed.centre_rules`
            steps until the next one    on the copies alone, without communication

The copies are variables of the worker's process, found by name: they outlast the closure but not the process, so that a
restarted worker starts at the centre. The optimizer's slots have copies too, which are never exchanged. Its learning
rate and its count of steps are read at the start of a closure.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import NonFiniteLossError, UsageError
from tfdist.interface.program import Logs, Steps
from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_variables, tensorflow_coordinator
from tfdist.internals.keras import tf_variable
from tfdist.parameter_server import closures
from tfdist.parameter_server.closures import ClosureReplica
from tfdist.relaxed import averages
from tfdist.relaxed.centre_rules import Exchange, Memory, Rule
from tfdist.relaxed.strategy import refuse_use_ema

# The message of a worker that refuses an exchange.
NOT_FINITE = "tfdist: the weights of a worker are not finite after steps"
_training_ids = itertools.count(1)


class CopiesReplica(ClosureReplica):
    """Computes a worker's step on its copies of the variables, and updates them as one device does."""

    @contextlib.contextmanager
    def updating(self, model: Any) -> Iterator[None]:
        del model
        yield

    @contextlib.contextmanager
    def measuring_staleness(self, optimizer: Any) -> Iterator[Any]:
        del optimizer
        yield lambda: tf.constant(0)


class CopiesProgram(closures.ClosureProgram):
    """Runs `model.train_step` on each worker's copies of the weights.

    Args:
        strategy: the strategy whose workers run the steps.
        steps: the steps of the training.
        rule: the exchanges between a worker's copies and the centre.
    """

    def __init__(self, strategy: Any, steps: Steps, rule: Rule):
        self._rule = rule
        self._training = next(_training_ids)  # copies from other trainings are not used
        self._fingerprint_at_end: np.ndarray | None = None
        super().__init__(strategy, steps, measures_staleness=False)
        self._fingerprint = tf.function(lambda: _fingerprint(averages.trained_weights(steps.model)), autograph=False)
        self._push_rest = tf.function(self._push_rest_of_worker, autograph=False)

    def begin_epoch(self) -> None:
        super().begin_epoch()
        # If the weights were set since the last epoch, for example from a checkpoint, workers must start from these.
        if self._fingerprint_at_end is not None and not np.array_equal(
            self._fingerprint_at_end, self._fingerprint().numpy()
        ):
            self._training = next(_training_ids)

    def end_epoch(self) -> Logs:
        logs = super().end_epoch()
        if self._rule.pushes_at_end:
            answers = self._strategy.workers.answers(self._push_rest, tf.constant(self._training, tf.int64))
            if answers is None:
                warnings.warn(
                    "A worker was lost at the end of the epoch, with the steps that it had not pushed", stacklevel=2
                )
            elif not all(answers):
                raise _not_finite_error("")
        self._fingerprint_at_end = self._fingerprint().numpy()
        return logs

    def _arguments(self, closure: closures.Closure) -> tuple[Any, ...]:
        return (*closure.arguments, tf.constant(self._training, tf.int64))

    def _make_functions(self) -> Any:
        self._unrolled = tf.function(self._closure_on_copies, autograph=False, reduce_retracing=True)
        return self._unrolled, self._unrolled

    def _closure_on_copies(self, state: Any, count: tf.Tensor, training: tf.Tensor) -> tf.Tensor:
        """Runs up to `count` steps on a worker; returns a packed `Result`."""
        copies = Copies(self._model, self._rule)
        copies.begin(training)

        def proceed(done: tf.Tensor, finite: tf.Tensor, *_: Any) -> tf.Tensor:
            return (done < count) & finite

        def step(done: tf.Tensor, finite: tf.Tensor, own_logs: Any) -> Any:
            del finite, own_logs
            _, logs = self._worker_step(state, self._batches.fetch(state, done), variables)
            copies.after_step()
            return done + 1, self._is_finite(), logs if self._own_logs is not None else {}

        def until_next_exchange(done: tf.Tensor, finite: tf.Tensor, own_logs: Any) -> Any:
            end = tf.minimum(count, done + copies.exchange())

            def before_end(done: tf.Tensor, finite: tf.Tensor, *_: Any) -> tf.Tensor:
                return (done < end) & finite

            return tf.while_loop(before_end, step, (done, finite, own_logs), parallel_iterations=1)

        variables = closures.ClosureVariables(self._model, self._copies_metrics)
        with copies.in_place(), variables.in_place():
            start = (tf.constant(0), tf.constant(True), self._no_logs())
            done, finite, own_logs = tf.while_loop(proceed, until_next_exchange, start, parallel_iterations=1)
        copies.end()
        zero = tf.constant(0)
        return self._codec.pack(closures.Result(done, finite, zero, zero, variables.end(), own_logs))

    def _push_rest_of_worker(self, training: tf.Tensor) -> tf.Tensor:
        """Pushes, on a worker, the changes that the centre lacks; returns whether the worker's weights are finite."""
        copies = Copies(self._model, self._rule)
        current = copies.belong_to(training)
        finite = tf.cond(current, copies.are_finite, lambda: tf.constant(True))

        def push() -> tf.Tensor:
            copies.push_rest()
            return tf.constant(True)

        tf.cond(current & finite, push, lambda: tf.constant(False))
        return finite


class Copies:
    """The copies of the worker that runs the graph in which this is created.

    Args:
        model: a model whose variables are on the servers.
        rule: the exchanges between the copies and the centre.
    """

    def __init__(self, model: Any, rule: Rule):
        self._rule = rule
        optimizers = keras_internals.optimizers(model)
        # Read at the start of each closure.
        self._shared = [variable for optimizer in optimizers for variable in _shared_variables(optimizer)]
        shared = set(map(id, self._shared))
        self._slots = [variable for each in optimizers for variable in each.variables if id(variable) not in shared]
        self._weights = averages.trained_weights(model)
        self._weight_copies = [_copy(f"weight_{number}", weight) for number, weight in enumerate(self._weights)]
        self._slot_copies = [_copy(f"slot_{number}", slot) for number, slot in enumerate(self._slots)]
        self._shared_copies = [_copy(f"read_{number}", variable) for number, variable in enumerate(self._shared)]
        memory_size = len(rule.begin(0.0)[1])
        self._memories = [
            tuple(_copy(f"memory_{number}_{index}", weight) for index in range(memory_size))
            for number, weight in enumerate(self._weights)
        ]
        self._training = tensorflow_coordinator.variable_of_process("tfdist.training", [], tf.int64)
        self._t = tensorflow_coordinator.variable_of_process("tfdist.t", [], tf.int64)

    def begin(self, training: tf.Tensor) -> None:
        """Begins a closure; a worker without copies from this training starts at the centre."""
        tf.cond(self.belong_to(training), lambda: tf.constant(False), lambda: self._start(training))
        self._initial = [tf.convert_to_tensor(tf_variable(variable)) for variable in self._shared]
        for copy, value in zip(self._shared_copies, self._initial, strict=True):
            copy.assign(value)

    def belong_to(self, training: tf.Tensor) -> tf.Tensor:
        """Whether this worker has copies from `training`."""
        initialized = tf.raw_ops.VarIsInitializedOp(resource=self._training.handle)
        current = tf.cond(initialized, lambda: tf.convert_to_tensor(self._training), lambda: tf.constant(0, tf.int64))
        return tf.equal(current, training)

    def are_finite(self) -> tf.Tensor:
        """Whether all weights are finite numbers."""
        return averages.all_finite(self._weight_copies)

    def _start(self, training: tf.Tensor) -> tf.Tensor:
        for variable, copy, memory in zip(self._weights, self._weight_copies, self._memories, strict=True):
            value, initial_memory = self._rule.begin(tf.convert_to_tensor(tf_variable(variable)))
            copy.assign(value)
            _assign(memory, initial_memory)
        for variable, copy in zip(self._slots, self._slot_copies, strict=True):
            copy.assign(tf.convert_to_tensor(tf_variable(variable)))
        self._t.assign(0)
        self._training.assign(training)
        return tf.constant(True)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Within this context, steps are traced with the copies in place of the model's variables."""
        variables = [*self._weights, *self._slots, *self._shared]
        self._centre = list(map(tf_variable, self._weights))
        with keras_variables.backed_by(variables, [*self._weight_copies, *self._slot_copies, *self._shared_copies]):
            yield

    def exchange(self) -> tf.Tensor:
        """Makes the exchanges that are due; returns the number of steps (int32) until the next one may be due."""
        t = tf.convert_to_tensor(self._t)
        if self._rule.settles_after is not None:
            self._transform(self._rule.settle)
        for exchange in self._rule.exchanges:
            due = tf.equal(t % exchange.every, 0)
            tf.cond(due, functools.partial(self._make, exchange), lambda: tf.constant(False))
        return tf.cast(functools.reduce(tf.minimum, self._rule.until_next(t)), tf.int32)

    def _make(self, exchange: Exchange) -> tf.Tensor:
        refused = tf.debugging.Assert(self.are_finite(), [NOT_FINITE, tf.convert_to_tensor(self._t)])
        with tf.control_dependencies([refused]):
            for copy, memory, centre in zip(self._weight_copies, self._memories, self._centre, strict=True):
                centre_value = tf.convert_to_tensor(centre) if exchange.reads else None
                value, new_memory, change = exchange.make(tf.convert_to_tensor(copy), _values(memory), centre_value)
                if change is not None:
                    centre.assign_add(change)
                copy.assign(value)
                _assign(memory, new_memory)
            return tf.constant(True)

    def after_step(self) -> None:
        """Counts a step, and applies the rule's change to the new weights."""
        self._t.assign_add(1)
        if self._rule.follows_steps:
            self._transform(self._rule.stepped)

    def _transform(self, transform: Callable[[Any, Memory], tuple[Any, Memory]]) -> None:
        for copy, memory in zip(self._weight_copies, self._memories, strict=True):
            value, new_memory = transform(tf.convert_to_tensor(copy), _values(memory))
            copy.assign(value)
            _assign(memory, new_memory)

    def end(self) -> None:
        """Ends a closure: adds its steps to the servers' count."""
        for variable, copy, initial in zip(self._shared, self._shared_copies, self._initial, strict=True):
            if copy.dtype.is_integer:
                tf_variable(variable).assign_add(tf.convert_to_tensor(copy) - initial)

    def push_rest(self) -> None:
        """Adds to the centre the changes that the worker has not pushed yet."""
        for variable, copy, memory in zip(self._weights, self._weight_copies, self._memories, strict=True):
            new_memory, change = self._rule.final_push(tf.convert_to_tensor(copy), _values(memory))
            tf_variable(variable).assign_add(change)
            _assign(memory, new_memory)


def refuse_shared_state(model: Any, mode: str) -> None:
    """Raises `UsageError` for an optimizer whose state the workers would have to share."""
    refuse_use_ema(model, f"`mode={mode}`", "use another mode")
    closures.refuse_accumulation(model, f"`mode={mode}`")
    for optimizer in keras_internals.optimizers(model):
        if hasattr(optimizer, "inner_optimizer"):
            raise UsageError(
                f"The optimizer scales the loss, and with `mode={mode}` each worker would have a different scale",
                "compile with `auto_scale_loss=False`, or use `mode=asp`",
            )


def require_finite(error: tf.errors.OpError) -> None:
    """Raises `NonFiniteLossError` if `error` says that a worker has refused an exchange."""
    if NOT_FINITE in error.message:
        steps = re.search(re.escape(NOT_FINITE) + r"\D*(\d+)", error.message)
        raise _not_finite_error(f" after {steps[1]} of its steps" if steps else "") from error


def _not_finite_error(when: str) -> NonFiniteLossError:
    return NonFiniteLossError(
        f"The weights of a worker are not finite{when}, and were not sent to the servers",
        "lower the learning rate, or clip gradients; `keras.callbacks.TerminateOnNaN` ends a training at such a loss",
    )


def _shared_variables(optimizer: Any) -> list[Any]:
    """Returns the optimizer's variables that are the same for all workers: its count of steps and learning rate."""
    rate = keras_internals.learning_rate(optimizer)
    return [variable for variable in optimizer.variables if variable is rate or "int" in variable.dtype]


def _copy(name: str, original: Any) -> Any:
    """Returns the copy of a Keras variable; other trainings reuse the name if dtype and shape are the same."""
    variable = tf_variable(original)
    shape = variable.shape.as_list()
    full_name = ".".join(["tfdist", name, variable.dtype.name, *map(str, shape)])
    return tensorflow_coordinator.variable_of_process(full_name, shape, variable.dtype, stands_for=variable)


def _values(memory: Sequence[Any]) -> Memory:
    return tuple(map(tf.convert_to_tensor, memory))


def _assign(memory: Sequence[Any], values: Memory) -> None:
    for variable, value in zip(memory, values, strict=True):
        variable.assign(value)


def _fingerprint(weights: Sequence[Any]) -> tf.Tensor:
    """Returns int64 `[number of weights]`, sums of the weights' bits by which changes are noticed."""
    int_types = {2: tf.int16, 4: tf.int32, 8: tf.int64}
    values = [tf.convert_to_tensor(tf_variable(weight)) for weight in weights]
    bits = [tf.reshape(tf.cast(tf.bitcast(value, int_types[value.dtype.size]), tf.int64), [-1]) for value in values]
    return tf.stack([tf.reduce_sum(vector * tf.range(1, tf.size(vector, tf.int64) + 1)) for vector in bits])
