"""The functions of TensorFlow that tfdist replaces: permanently, for one strategy, or within a context.

The replacements are in the modules that call the functions of this one.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import collective_ops


@contextlib.contextmanager
def surrounded(owner: Any, name: str, call: Callable[..., Any]) -> Iterator[None]:
    """In this context the function or method `name` of `owner` returns `call(original, ...)`."""
    original, is_own = getattr(owner, name), name in vars(owner)

    @functools.wraps(original)
    def method(*args: Any, **named: Any) -> Any:
        return call(original, *args, **named)

    setattr(owner, name, method)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


# The collectives of `tf.distribute.MultiWorkerMirroredStrategy`, in its steps and when it makes a variable.
COLLECTIVES = ("all_reduce_v2", "all_gather_v2", "broadcast_send", "broadcast_recv")


@contextlib.contextmanager
def computing_gradients_in(context: Callable[[], contextlib.AbstractContextManager[Any]]) -> Iterator[None]:
    """In this context, and this thread, each `tf.GradientTape.gradient` computes in the context `context()`."""
    thread = threading.get_ident()

    def call(original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        with context() if threading.get_ident() == thread else contextlib.nullcontext():
            return original(*arguments, **named)

    with surrounded(tf.GradientTape, "gradient", call):
        yield


def around_collectives(around: Callable[[Callable[[], tf.Tensor], Sequence[tf.Tensor]], tf.Tensor]) -> None:
    """From now on `around(make, inputs)` makes each collective operation of TensorFlow's strategies."""

    def counted(original: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
        @functools.wraps(original)
        def call(first: Any, *arguments: Any, **named: Any) -> tf.Tensor:
            # The receiver of a broadcast passes a shape in place of a tensor.
            inputs = [first] if tf.is_tensor(first) else []
            return around(lambda: original(first, *arguments, **named), inputs)

        return call

    for name in COLLECTIVES:
        setattr(collective_ops, name, counted(getattr(collective_ops, name)))


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
