"""Replaces functions of TensorFlow and Keras: permanently, for one object, or within a context."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import collective_ops


def surround(owner: Any, name: str, call: Callable[..., Any]) -> Callable[[], None]:
    """Makes the function or method `name` of `owner` return `call(original, ...)`.

    Returns:
        A function that restores the original.
    """
    original, is_own = getattr(owner, name), name in vars(owner)

    @functools.wraps(original)
    def method(*args: Any, **named: Any) -> Any:
        return call(original, *args, **named)

    setattr(owner, name, method)
    return (lambda: setattr(owner, name, original)) if is_own else (lambda: delattr(owner, name))


@contextlib.contextmanager
def surrounded(owner: Any, name: str, call: Callable[..., Any]) -> Iterator[None]:
    """Within this context the function or method `name` of `owner` returns `call(original, ...)`."""
    restore = surround(owner, name, call)
    try:
        yield
    finally:
        restore()


class SharedPatch:
    """A patch that several contexts share, in any thread: applied by the first of them, and undone after the last.

    Args:
        apply: applies the patch, and returns a function that undoes it.
    """

    def __init__(self, apply: Callable[[], Callable[[], None]]):
        self._apply = apply
        self._lock = threading.Lock()
        self._contexts = 0

    def __enter__(self) -> None:
        with self._lock:
            if self._contexts == 0:
                self._undo = self._apply()
            self._contexts += 1

    def __exit__(self, *raised: Any) -> None:
        with self._lock:
            self._contexts -= 1
            if self._contexts == 0:
                self._undo()


@contextlib.contextmanager
def with_attributes(thing: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Within this context `thing` has these attributes, which Keras neither tracks nor saves."""
    absent = object()
    previous = {name: vars(thing).get(name, absent) for name in attributes}
    try:
        for name, value in attributes.items():
            object.__setattr__(thing, name, value)
        yield
    finally:
        for name, value in previous.items():
            if value is absent:
                object.__delattr__(thing, name)
            else:
                object.__setattr__(thing, name, value)


# The collectives that `tf.distribute.MultiWorkerMirroredStrategy` uses in its steps and when it makes a variable.
COLLECTIVES = ("all_reduce_v2", "all_gather_v2", "broadcast_send", "broadcast_recv")


@contextlib.contextmanager
def computing_gradients_in(context: Callable[[], contextlib.AbstractContextManager[Any]]) -> Iterator[None]:
    """Within this context and thread each `tf.GradientTape.gradient` computes in the context `context()`."""
    thread = threading.get_ident()

    def call(original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        with context() if threading.get_ident() == thread else contextlib.nullcontext():
            return original(*arguments, **named)

    with surrounded(tf.GradientTape, "gradient", call):
        yield


def around_collectives(around: Callable[[Callable[[], tf.Tensor], Sequence[tf.Tensor]], tf.Tensor]) -> None:
    """From now on `around(make, inputs)` makes each collective operation of TensorFlow's strategies."""

    def call(original: Callable[..., tf.Tensor], first: Any, *arguments: Any, **named: Any) -> tf.Tensor:
        # The receiver of a broadcast passes a shape in place of a tensor.
        inputs = [first] if tf.is_tensor(first) else []
        return around(lambda: original(first, *arguments, **named), inputs)

    for name in COLLECTIVES:
        surround(collective_ops, name, call)


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
