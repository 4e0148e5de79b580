"""Workers that train on copies of the weights, and exchange with those on the servers as a rule has it.

    a closure on a worker
        start at the centre            if this worker has no copies of this training
        until its steps are done
            the exchanges that are due, see `tfdist.relaxed.centre_rules`
            steps until the next one   on the copies alone: nothing travels

The copies are variables of the worker's own process, found by name: they outlast the closure, and are gone with the
process, so that a worker that comes back starts at the centre. An optimizer's slots have copies too, which stay apart.
Its learning rate and its count of steps are read as a closure begins.
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
from tfdist.parameter_server import closure_data as data
from tfdist.parameter_server import closure_replica as replicas
from tfdist.parameter_server import closure_variables as held_variables
from tfdist.parameter_server import closures as loop
from tfdist.relaxed import averages
from tfdist.relaxed.centre_rules import Exchange, Memory, Rule
from tfdist.relaxed.strategy import refuse_use_ema

# What a worker says that refuses an exchange.
NOT_FINITE = "tfdist: the weights of a worker are not finite after steps"
_trainings = itertools.count(1)


class CopiesReplica(replicas.ClosureReplica):
    """A worker's step on its own copies of the variables, which it updates as one device does."""

    @contextlib.contextmanager
    def updating(self, model: Any) -> Iterator[None]:
        del model
        yield

    @contextlib.contextmanager
    def measuring_staleness(self, optimizer: Any) -> Iterator[Any]:
        del optimizer
        yield lambda: tf.constant(0)


class CopiesProgram(loop.ClosureProgram):
    """Runs `model.train_step` on copies of the weights that each worker has.

    Args:
        strategy: whose workers run the steps.
        steps: of the training.
        rule: what a worker does with its copies and the centre.
    """

    def __init__(self, strategy: Any, steps: Steps, rule: Rule):
        self._rule = rule
        self._training = next(_trainings)  # copies of other trainings are not used
        self._left_at: np.ndarray | None = None
        super().__init__(strategy, steps, measures_staleness=False)
        self._fingerprint = tf.function(lambda: _fingerprint(averages.trained_weights(steps.model)), autograph=False)
        self._leave = tf.function(self._leave_nothing, autograph=False)

    def begin_epoch(self) -> None:
        super().begin_epoch()
        # Whoever has set the weights since, as a checkpoint that was restored, wants workers to start from these.
        if self._left_at is not None and not np.array_equal(self._left_at, self._fingerprint().numpy()):
            self._training = next(_trainings)

    def end_epoch(self) -> Logs:
        logs = super().end_epoch()
        if self._rule.pushes_at_end:
            self._have_all_leave()
        self._left_at = self._fingerprint().numpy()
        return logs

    def _have_all_leave(self) -> None:
        found = self._strategy.workers.answers(self._leave, tf.constant(self._training, tf.int64))
        if found is None:
            warnings.warn(
                "A worker was gone at the end of the epoch, with the steps that it had not pushed", stacklevel=2
            )
        elif not all(found):
            raise _not_finite("")

    def _arguments(self, closure: data.Closure) -> tuple[Any, ...]:
        return (*closure.arguments, tf.constant(self._training, tf.int64))

    def _make_functions(self) -> Any:
        looped = tf.function(self._on_copies, autograph=False, reduce_retracing=True)
        self._unrolled = looped
        return looped, looped

    def _on_copies(self, state: Any, count: tf.Tensor, training: tf.Tensor) -> tf.Tensor:
        """Up to `count` steps on a worker; returns a packed `Result`."""
        copies = Copies(self._model, self._rule)
        copies.begin(training)

        def proceed(done: tf.Tensor, finite: tf.Tensor, *_: Any) -> tf.Tensor:
            return (done < count) & finite

        def step(done: tf.Tensor, finite: tf.Tensor, own: Any) -> Any:
            del finite, own
            _, logs = self._worker_step(state, self._batches.fetch(state, done), held)
            copies.stepped()
            return done + 1, self._is_finite(), logs if self._own_logs is not None else {}

        def until_next(done: tf.Tensor, finite: tf.Tensor, own: Any) -> Any:
            end = tf.minimum(count, done + copies.exchange())

            def before_end(done: tf.Tensor, finite: tf.Tensor, *_: Any) -> tf.Tensor:
                return (done < end) & finite

            return tf.while_loop(before_end, step, (done, finite, own), parallel_iterations=1)

        held = held_variables.Held(self._model, self._begins_metrics)
        with copies.in_place(), held.in_place():
            start = (tf.constant(0), tf.constant(True), self._no_logs())
            done, finite, own = tf.while_loop(proceed, until_next, start, parallel_iterations=1)
        copies.end()
        zero = tf.constant(0)
        return self._codec.pack(loop.Result(done, finite, zero, zero, held.end(), own))

    def _leave_nothing(self, training: tf.Tensor) -> tf.Tensor:
        """On a worker: gives to the centre what is not there yet; whether that are numbers."""
        copies = Copies(self._model, self._rule)
        ours = copies.are_of(training)
        sound = tf.cond(ours, copies.are_finite, lambda: tf.constant(True))

        def leave() -> tf.Tensor:
            copies.leave()
            return tf.constant(True)

        tf.cond(ours & sound, leave, lambda: tf.constant(False))
        return sound


class Copies:
    """The copies of the worker that runs the graph in which this is made.

    Args:
        model: whose variables are on the servers.
        rule: what is done with the copies.
    """

    def __init__(self, model: Any, rule: Rule):
        self._rule = rule
        optimizers = keras_internals.optimizers(model)
        self._read = [variable for one in optimizers for variable in _read_by_closures(one)]
        read = set(map(id, self._read))
        self._slots = [variable for one in optimizers for variable in one.variables if id(variable) not in read]
        self._weights = averages.trained_weights(model)
        self._own = [_copy(f"weight_{number}", one) for number, one in enumerate(self._weights)]
        self._own_slots = [_copy(f"slot_{number}", one) for number, one in enumerate(self._slots)]
        self._own_read = [_copy(f"read_{number}", one) for number, one in enumerate(self._read)]
        self._memory = [
            tuple(_copy(f"memory_{number}_{index}", one) for index in range(len(rule.begin(0.0)[1])))
            for number, one in enumerate(self._weights)
        ]
        self._training = tensorflow_coordinator.variable_of_process("tfdist.training", [], tf.int64)
        self._t = tensorflow_coordinator.variable_of_process("tfdist.t", [], tf.int64)

    def begin(self, training: tf.Tensor) -> None:
        """Called first: a worker without copies of this training starts at the centre."""
        tf.cond(self.are_of(training), lambda: tf.constant(False), lambda: self._start(training))
        self._begun = [tf.convert_to_tensor(tf_variable(variable)) for variable in self._read]
        for own, value in zip(self._own_read, self._begun, strict=True):
            own.assign(value)

    def are_of(self, training: tf.Tensor) -> tf.Tensor:
        """Whether this worker has copies of `training`."""
        handle = self._training.handle
        known = tf.raw_ops.VarIsInitializedOp(resource=handle)
        found = tf.cond(known, lambda: tf.convert_to_tensor(self._training), lambda: tf.constant(0, tf.int64))
        return tf.equal(found, training)

    def are_finite(self) -> tf.Tensor:
        """Whether all weights are finite numbers."""
        return averages.all_finite(self._own)

    def _start(self, training: tf.Tensor) -> tf.Tensor:
        for variable, own, memory in zip(self._weights, self._own, self._memory, strict=True):
            value, begun = self._rule.begin(tf.convert_to_tensor(tf_variable(variable)))
            own.assign(value)
            _assign(memory, begun)
        for variable, own in zip(self._slots, self._own_slots, strict=True):
            own.assign(tf.convert_to_tensor(tf_variable(variable)))
        self._t.assign(0)
        self._training.assign(training)
        return tf.constant(True)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """In this context, what is traced computes with the copies, and updates them."""
        variables = [*self._weights, *self._slots, *self._read]
        self._centre = list(map(tf_variable, self._weights))
        with keras_variables.backed_by(variables, [*self._own, *self._own_slots, *self._own_read]):
            yield

    def exchange(self) -> tf.Tensor:
        """Makes the exchanges that are due, and returns the number of steps, int32, until the next may be."""
        t = tf.convert_to_tensor(self._t)
        if self._rule.settles_after is not None:
            self._become(self._rule.settle)
        for exchange in self._rule.exchanges:
            due = tf.equal(t % exchange.every, 0)
            tf.cond(due, functools.partial(self._make, exchange), lambda: tf.constant(False))
        return tf.cast(functools.reduce(tf.minimum, self._rule.until_next(t)), tf.int32)

    def _make(self, exchange: Exchange) -> tf.Tensor:
        refused = tf.debugging.Assert(self.are_finite(), [NOT_FINITE, tf.convert_to_tensor(self._t)])
        with tf.control_dependencies([refused]):
            for own, memory, centre in zip(self._own, self._memory, self._centre, strict=True):
                at = tf.convert_to_tensor(centre) if exchange.reads else None
                new, kept, change = exchange.make(tf.convert_to_tensor(own), _values(memory), at)
                if change is not None:
                    centre.assign_add(change)
                own.assign(new)
                _assign(memory, kept)
            return tf.constant(True)

    def stepped(self) -> None:
        """A step has ended."""
        self._t.assign_add(1)
        if self._rule.follows_steps:
            self._become(self._rule.stepped)

    def _become(self, new: Callable[[Any, Memory], tuple[Any, Memory]]) -> None:
        for own, memory in zip(self._own, self._memory, strict=True):
            value, kept = new(tf.convert_to_tensor(own), _values(memory))
            own.assign(value)
            _assign(memory, kept)

    def end(self) -> None:
        """Called last: the servers count the steps."""
        for variable, own, before in zip(self._read, self._own_read, self._begun, strict=True):
            if own.dtype.is_integer:
                tf_variable(variable).assign_add(tf.convert_to_tensor(own) - before)

    def leave(self) -> None:
        """Gives to the centre what the worker has not given yet."""
        for variable, own, memory in zip(self._weights, self._own, self._memory, strict=True):
            kept, change = self._rule.final_push(tf.convert_to_tensor(own), _values(memory))
            tf_variable(variable).assign_add(change)
            _assign(memory, kept)


def require_plain(model: Any, mode: str) -> None:
    """Raises `UsageError` for an optimizer whose state the workers would have to share."""
    refuse_use_ema(model, f"`mode={mode}`", "use another mode")
    loop.refuse_accumulation(model, f"`mode={mode}`")
    for optimizer in keras_internals.optimizers(model):
        if hasattr(optimizer, "inner_optimizer"):
            raise UsageError(
                f"The optimizer scales the loss, and with `mode={mode}` each worker would have another scale",
                "compile with `auto_scale_loss=False`, or use `mode=asp`",
            )


def require_finite(error: tf.errors.OpError) -> None:
    """Raises `NonFiniteLossError` if a worker has refused an exchange with this error."""
    if NOT_FINITE in error.message:
        steps = re.search(re.escape(NOT_FINITE) + r"\D*(\d+)", error.message)
        raise _not_finite(f" after {steps[1]} of its steps" if steps else "") from error


def _not_finite(when: str) -> NonFiniteLossError:
    return NonFiniteLossError(
        f"The weights of a worker are not finite{when}, and were not given to the others",
        "lower the learning rate, or clip gradients; `keras.callbacks.TerminateOnNaN` ends a training at such a loss",
    )


def _read_by_closures(optimizer: Any) -> list[Any]:
    """The variables of an optimizer that are the same for all workers: its count of steps, and its learning rate."""
    rate = keras_internals.learning_rate(optimizer)
    return [one for one in optimizer.variables if one is rate or "int" in one.dtype]


def _copy(name: str, like: Any) -> Any:
    """The copy of a Keras variable, by a name that other trainings use again where dtype and shape are the same."""
    variable = tf_variable(like)
    shape = variable.shape.as_list()
    full = ".".join(["tfdist", name, variable.dtype.name, *map(str, shape)])
    return tensorflow_coordinator.variable_of_process(full, shape, variable.dtype, stands_for=variable)


def _values(memory: Sequence[Any]) -> Memory:
    return tuple(map(tf.convert_to_tensor, memory))


def _assign(memory: Sequence[Any], values: Memory) -> None:
    for variable, value in zip(memory, values, strict=True):
        variable.assign(value)


def _fingerprint(weights: Sequence[Any]) -> tf.Tensor:
    """Sums of the bits of all weights, by which changes are noticed, int64 `[number of weights]`."""
    sizes = {2: tf.int16, 4: tf.int32, 8: tf.int64}
    values = [tf.convert_to_tensor(tf_variable(one)) for one in weights]
    bits = [tf.cast(tf.bitcast(one, sizes[one.dtype.size]), tf.int64) for one in values]
    return tf.stack([tf.reduce_sum(tf.reshape(one, [-1]) * tf.range(1, tf.size(one, tf.int64) + 1)) for one in bits])
