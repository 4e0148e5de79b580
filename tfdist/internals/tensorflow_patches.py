"""The functions of TensorFlow that tfdist replaces: permanently, for one strategy, or within a context.

The replacements are in the modules that call the functions of this one, such as `tfdist.core.exact_step`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.distribute import values
from tensorflow.python.eager.polymorphic_function import autograph_util, polymorphic_function
from tensorflow.python.framework import random_seed
from tensorflow.python.ops import collective_ops, random_ops, resource_variable_ops
from tensorflow.python.ops.parallel_for import control_flow_ops as parallel_for

# The collectives of `tf.distribute.MultiWorkerMirroredStrategy`, in its steps and when it makes a variable.
COLLECTIVES = ("all_reduce_v2", "all_gather_v2", "broadcast_send", "broadcast_recv")


class _Thread(threading.local):
    differentiates = False


_thread = _Thread()


def around_gradients(around: Callable[[Callable[[Any, Any], Any], Any, Any, Any], Any]) -> None:
    """From now on `tf.GradientTape.gradient` returns `around(gradient, target, sources, output_gradients)`.

    `gradient(target, output_gradients)` is the original. A gradient inside another one is not changed: a
    recomputation in a backward pass, and the rows of a jacobian, which are vectorized.
    """
    original = tf.GradientTape.gradient

    @functools.wraps(original)
    def gradient(
        tape: tf.GradientTape,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        def compute(target: Any, output_gradients: Any) -> Any:
            with _differentiating():
                return original(tape, target, sources, output_gradients, unconnected_gradients)

        if _thread.differentiates:
            return compute(target, output_gradients)
        return around(compute, target, sources, output_gradients)

    tf.GradientTape.gradient = gradient
    for name in ("jacobian", "batch_jacobian"):
        setattr(tf.GradientTape, name, _while_differentiating(getattr(tf.GradientTape, name)))


def around_tapes(context: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
    """From now on each `tf.GradientTape.gradient` computes in the context `context()`."""
    original = tf.GradientTape.gradient

    @functools.wraps(original)
    def gradient(*arguments: Any, **named: Any) -> Any:
        with context():
            return original(*arguments, **named)

    tf.GradientTape.gradient = gradient


def _while_differentiating(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        with _differentiating():
            return function(*arguments, **named)

    return call


@contextlib.contextmanager
def _differentiating() -> Iterator[None]:
    before, _thread.differentiates = _thread.differentiates, True
    try:
        yield
    finally:
        _thread.differentiates = before


def around_functions(inlined: Callable[[], bool]) -> None:
    """From now on a call of a `tf.function` calls its Python function directly wherever `inlined()` is true.

    AutoGraph still converts its control flow. In eager mode `tf.vectorized_map` puts its loop into a `tf.function`,
    which stays one: that loop exists only in graphs.
    """
    kind = polymorphic_function.Function
    original = kind.__call__

    @functools.wraps(original)
    def call(function: Any, *arguments: Any, **named: Any) -> Any:
        if not inlined() or _vectorizes(function):
            return original(function, *arguments, **named)
        if not function._autograph:
            return function._python_function(*arguments, **named)
        with ag_ctx.ControlStatusCtx(status=ag_ctx.Status.UNSPECIFIED):
            inner = autograph_util.py_func_from_autograph(
                function._python_function, function._experimental_autograph_options
            )
            return inner(*arguments, **named)

    kind.__call__ = call


def _vectorizes(function: Any) -> bool:
    return bool(function._python_function.__module__ == parallel_for.__name__)


def around_assignments(around: Callable[[Callable[[Any], Any], Any, str, Any], Any]) -> None:
    """From now on `around(assign, variable, name, value)` makes each assignment to a `tf.Variable`.

    `name` is "assign", "assign_add" or "assign_sub"; `assign(value)` is the original.
    """
    kinds = (
        resource_variable_ops.BaseResourceVariable,
        resource_variable_ops.ResourceVariable,
        values.DistributedVariable,
    )
    for kind in kinds:
        for name in {"assign", "assign_add", "assign_sub"} & set(vars(kind)):
            setattr(kind, name, _assigning_around(vars(kind)[name], name, around))


def _assigning_around(original: Callable[..., Any], name: str, around: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def assign(variable: Any, value: Any, *arguments: Any, **named: Any) -> Any:
        if isinstance(variable, values.SyncOnReadVariable):  # each replica has its part; a read adds them up
            return original(variable, value, *arguments, **named)
        return around(lambda value: original(variable, value, *arguments, **named), variable, name, value)

    return assign


def around_draws(
    drawn: Callable[[Callable[[Any], Any], Any], Any],
    seeds_of: Callable[[tuple[int | None, int | None], int | None], tuple[int | None, int | None]],
) -> None:
    """From now on `drawn` and `seeds_of` make the stateful random operations of TensorFlow.

    Args:
        drawn: `drawn(draw, shape)` returns random numbers of this shape; `draw(shape)` is the original.
        seeds_of: `seeds_of(seeds, given)` returns the seeds of the graph and of the operation; `seeds` are those that
            TensorFlow would use, and `given` is the argument `seed` of the operation.
    """
    for name, public in _DRAWS.items():
        around = _drawing_around(getattr(random_ops, name), drawn)
        setattr(random_ops, name, around)
        setattr(tf.random, public, around)
    original = random_seed.get_seed

    @functools.wraps(original)
    def get_seed(op_seed: int | None) -> tuple[int | None, int | None]:
        return seeds_of(original(op_seed), op_seed)

    random_seed.get_seed = get_seed


# The functions that draw numbers of a shape, by their names inside TensorFlow, and in `tf.random`.
_DRAWS = {
    "random_normal": "normal",
    "random_uniform": "uniform",
    "truncated_normal": "truncated_normal",
    "random_gamma": "gamma",
    "random_poisson_v2": "poisson",
}


def _drawing_around(original: Callable[..., Any], drawn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def draw(shape: Any, *arguments: Any, **named: Any) -> Any:
        return drawn(lambda shape: original(shape, *arguments, **named), shape)

    return draw


def around_collectives(around: Callable[[Callable[[], tf.Tensor], Sequence[tf.Tensor]], tf.Tensor]) -> None:
    """From now on `around(make, inputs)` makes each collective operation of TensorFlow's strategies."""

    def surrounded(original: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
        @functools.wraps(original)
        def call(first: Any, *arguments: Any, **named: Any) -> tf.Tensor:
            # The receiver of a broadcast passes a shape in place of a tensor.
            inputs = [first] if tf.is_tensor(first) else []
            return around(lambda: original(first, *arguments, **named), inputs)

        return call

    for name in COLLECTIVES:
        setattr(collective_ops, name, surrounded(getattr(collective_ops, name)))


def around_variables(
    strategy: tf.distribute.ParameterServerStrategy, create: Callable[..., Any], update: Callable[..., Any]
) -> None:
    """From now on `create(make, **arguments)` makes each variable of `strategy`, and `update(apply, ...)` updates it.

    `make(**arguments)` makes a variable as the strategy does; `apply(variable, function, arguments)` calls
    `function(variable, *arguments)` as the strategy does, on the variable's device.
    """
    extended = strategy.extended
    make, apply = extended._create_variable, extended._update

    def make_around(next_creator: Any, **arguments: Any) -> Any:
        if arguments.get("initial_value") is None:  # a variable that is being loaded
            return make(next_creator, **arguments)
        return create(functools.partial(make, next_creator), **arguments)

    def update_around(variable: Any, function: Any, args: Any, kwargs: Any, group: bool) -> Any:
        return update(
            lambda part, inner, arguments: apply(part, inner, tuple(arguments), kwargs, group), variable, function, args
        )

    extended._create_variable, extended._update = make_around, update_around
