"""The functions of Keras that tfdist replaces: permanently, for one optimizer or model, or within a context."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.losses import loss as loss_module
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.trainers import trainer as trainer_module

from tfdist.errors import UsageError
from tfdist.internals.keras import inner
from tfdist.internals.patching import Attached, surround, surrounded, with_attributes


class _Thread(threading.local):
    applies_reduced_gradients = False


_thread = _Thread()


# The functions of Keras that can be replaced, see `around` and `replaced`.
REPLACEABLE: dict[str, tuple[Any, str]] = {
    "reduce_weighted_values": (loss_module, "reduce_weighted_values"),
    "reduce_values": (loss_module, "reduce_values"),
    "mean_update_state": (keras.metrics.Mean, "update_state"),
}


def around(function: str, call: Callable[..., Any]) -> None:
    """From now on the function of Keras with this name in `REPLACEABLE` returns `call(original, *args, **named)`."""
    surround(*REPLACEABLE[function], call)


@contextlib.contextmanager
def replaced(calls: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Within this context functions of `REPLACEABLE` return `call(original, *args, **named)`.

    Args:
        calls: each `call`, by the name of the function.
    """
    with contextlib.ExitStack() as stack:
        for function, call in calls.items():
            stack.enter_context(surrounded(*REPLACEABLE[function], call))
        yield


@functools.cache
def install() -> None:
    """Makes optimizers obey `applying_reduced_gradients` and `set_around_apply`."""

    def apply(original: Callable[..., Any], optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        around = None if _thread.applies_reduced_gradients else around_apply(optimizer)
        if around is None:
            return original(optimizer, grads, trainable_variables)
        variables = optimizer._trainable_variables if trainable_variables is None else trainable_variables

        def update(gradients: Sequence[Any]) -> None:
            with applying_reduced_gradients():
                original(optimizer, gradients, trainable_variables)

        return around(optimizer, list(grads), list(variables), update)

    def all_reduce(original: Callable[..., Any], optimizer: Any, grads_and_vars: Any) -> Any:
        return grads_and_vars if _thread.applies_reduced_gradients else original(optimizer, grads_and_vars)

    def model_supports_jit(original: Callable[..., Any], model: Any) -> bool:
        # XLA does not know Horovod's operations.
        optimizer = getattr(model, "optimizer", None)
        return (optimizer is None or around_apply(optimizer) is None) and original(model)

    surround(BaseOptimizer, "apply", apply)
    surround(keras.optimizers.LossScaleOptimizer, "apply", apply)
    surround(TFOptimizer, "_all_reduce_sum_gradients", all_reduce)
    surround(trainer_module, "model_supports_jit", model_supports_jit)


@contextlib.contextmanager
def updating_with(
    optimizer: Any, update_step: Callable[[Any, Any, Any], None], before_each: Callable[[], None]
) -> Iterator[None]:
    """Within this context `optimizer` updates a variable by `update_step(gradient, variable, learning_rate)`.

    `before_each` is called before each update of all variables.
    """
    update_all = optimizer._backend_update_step

    def update(*arguments: Any) -> None:
        before_each()
        update_all(*arguments)

    with with_attributes(optimizer, {"update_step": update_step, "_backend_update_step": update}):
        yield


@contextlib.contextmanager
def applying_reduced_gradients() -> Iterator[None]:
    """Within this context optimizers take the gradients that they receive as already reduced over all replicas."""
    _thread.applies_reduced_gradients = True
    try:
        yield
    finally:
        _thread.applies_reduced_gradients = False


# `around(optimizer, gradients, variables, update)` reduces the gradients and calls `update(reduced)`.
AroundApply = Callable[[Any, list[Any], list[Any], Callable[[Sequence[Any]], None]], None]
_around_apply: Attached[AroundApply] = Attached("around_apply")


def set_around_apply(optimizer: Any, around: AroundApply) -> None:
    """From now on `optimizer`, or a loss-scaling optimizer around it, calls `around` to apply gradients."""
    install()
    _around_apply.set(optimizer, around)


def around_apply(optimizer: Any) -> AroundApply | None:
    """The function that `set_around_apply` has set for `optimizer` or for its inner optimizer."""
    return _around_apply.get(inner(optimizer)) or _around_apply.get(optimizer)


def require_reduced_once(optimizer: Any) -> None:
    """Raises `UsageError` for an optimizer that reduces gradients itself, in a step of a strategy, which does so."""
    if around_apply(optimizer) is not None:
        raise UsageError(
            f"The gradients of `{optimizer.name}` are reduced both by the strategy and by `DistributedOptimizer`",
            "use only one of them",
        )


@contextlib.contextmanager
def counting(optimizer: Any, count: Callable[[Any], None]) -> Iterator[None]:
    """Within this context `count(variable)` adds one to the `iterations` of `optimizer`.

    Keras reads and then writes the variable, so that concurrent updates may be lost.
    """
    iterations = optimizer._iterations
    with with_attributes(iterations, {"assign_add": lambda value: count(iterations._value)}):
        yield


@contextlib.contextmanager
def applying_with(optimizer: Any, apply: Callable[..., None]) -> Iterator[None]:
    """Within this context `optimizer` applies gradients by `apply(original, gradients, variables)`.

    `variables` is `None` for all variables that it was built for; `original` is Keras' method.
    """
    original = optimizer.apply

    def applied(grads: Any, trainable_variables: Any = None) -> None:
        apply(original, list(grads), trainable_variables)

    with with_attributes(optimizer, {"apply": applied}):
        yield


# `see(kind, source, value)` receives the values that a step computes, and returns those that it goes on with. What it
# returns for an added loss is ignored.
See = Callable[[str, Any, Any], Any]


@contextlib.contextmanager
def watching(model: Any, see: See) -> Iterator[None]:
    """Within this context `see` receives the values that the steps of `model` compute, and may replace them.

    | kind | source | value |
    |---|---|---|
    | "output" | a layer | the result of its call |
    | "added loss" | a layer | the argument of `add_loss` |
    | "loss" | a `keras.losses.Loss` | its result |
    | "whole loss" | the model | the result of `compute_loss` |
    | "gradients" | the variables | the gradients that an optimizer applies to them |
    """

    def result_of(kind: str) -> Callable[..., Any]:
        def call(original: Callable[..., Any], source: Any, *args: Any, **named: Any) -> Any:
            return see(kind, source, original(source, *args, **named))

        return call

    def add_loss(original: Callable[..., Any], layer: Any, loss: Any) -> Any:
        see("added loss", layer, loss)
        return original(layer, loss)

    def apply(original: Callable[..., Any], optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        variables = optimizer._trainable_variables if trainable_variables is None else trainable_variables
        return original(optimizer, see("gradients", list(variables), list(grads)), trainable_variables)

    calls: list[tuple[Any, str, Callable[..., Any]]] = [
        (keras.Layer, "__call__", result_of("output")),
        (keras.Layer, "add_loss", add_loss),
        (keras.losses.Loss, "__call__", result_of("loss")),
        (type(model), "compute_loss", result_of("whole loss")),
        (BaseOptimizer, "apply", apply),
        (keras.optimizers.LossScaleOptimizer, "apply", apply),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, call in calls:
            stack.enter_context(surrounded(owner, name, call))
        yield


@contextlib.contextmanager
def noting_outputs(names: Iterable[str], note: Callable[[str, Any], None]) -> Iterator[None]:
    """Within this context `note(name, outputs)` receives the result of each call of a layer with one of the `names`."""
    wanted = set(names)

    def call(original: Callable[..., Any], layer: Any, *args: Any, **named: Any) -> Any:
        outputs = original(layer, *args, **named)
        if layer.name in wanted:
            note(layer.name, outputs)
        return outputs

    with surrounded(keras.Layer, "__call__", call) if wanted else contextlib.nullcontext():
        yield


Unary = Callable[[Any], Any]


def around_steps(
    around_step: Callable[[Any, Unary], Unary] = lambda model, step: step,
    around_call: Callable[[Unary], Unary] = lambda call: call,
) -> None:
    """From now on Keras' own loop runs other steps, except for models whose functions it has already made.

    Args:
        around_step: takes a model and its `train_step`, `test_step` or `predict_step`, and returns the step to run.
        around_call: takes the function that runs the steps of a call from an iterator, and returns another one.
    """

    def make_function(original: Callable[..., Any], model: Any, step: Unary) -> Any:
        return around_call(original(model, around_step(model, step)))

    surround(TensorFlowTrainer, "_make_function", make_function)


def add_to_callback_lists(kind: type, make: Callable[[Any], Any]) -> None:
    """From now on a callback list of a model ends with `make(callback_list)`, unless this is `None`.

    Lists that have a callback of the class `kind` stay as they are.
    """

    def set_model(original: Callable[..., Any], callback_list: Any, model: Any) -> None:
        exists = any(isinstance(callback, kind) for callback in callback_list.callbacks)
        if model is not None and not exists and (callback := make(callback_list)) is not None:
            callback_list.callbacks.append(callback)
        original(callback_list, model)

    surround(keras.callbacks.CallbackList, "set_model", set_model)


@functools.cache
def tell_callbacks_of_their_list() -> None:
    """From now on a callback that has `set_callback_list` receives its callback list, before its model.

    Keras gives a callback its model, but never the other callbacks, whose state a checkpoint must contain.
    """

    def set_model(original: Callable[..., Any], callback_list: Any, model: Any) -> None:
        for callback in with_wrapped(callback_list.callbacks):
            if hasattr(callback, "set_callback_list"):
                callback.set_callback_list(callback_list)
        original(callback_list, model)

    surround(keras.callbacks.CallbackList, "set_model", set_model)


def with_wrapped(callbacks: Iterable[Any]) -> Iterator[Any]:
    """Each callback, and the callbacks that it wraps in its attribute `callback`."""
    for callback in callbacks:
        inner = callback
        while isinstance(inner, keras.callbacks.Callback):
            yield inner
            inner = getattr(inner, "callback", None)
