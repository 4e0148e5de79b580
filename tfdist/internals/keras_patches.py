"""The functions of Keras that tfdist replaces: for good, for one optimizer or model, or within a context.

What Keras' functions do in the step of one replica among several is in `tfdist.core.keras_steps`; it uses `around`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
from keras.src.backend.tensorflow import nn as tensorflow_nn
from keras.src.backend.tensorflow import random as tensorflow_random
from keras.src.backend.tensorflow import trainer as tensorflow_trainer
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.losses import loss as loss_module
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.trainers import trainer as trainer_module


class _Thread(threading.local):
    applies_reduced_gradients = False
    strategy: str | None = None  # whose scope the thread is in


_thread = _Thread()


# The functions of Keras that can be replaced, see `around`.
REPLACEABLE: dict[str, tuple[Any, str]] = {
    "loss": (keras.losses.Loss, "__call__"),
    "reduce_weighted_values": (loss_module, "reduce_weighted_values"),
    "reduce_values": (loss_module, "reduce_values"),
    "apply_mask": (loss_module, "apply_mask"),
    "scale_loss": (loss_module, "scale_loss_for_distribution"),
    "unscale_loss": (loss_module, "unscale_loss_for_distribution"),
    "mean_update_state": (keras.metrics.Mean, "update_state"),
    "add_loss": (keras.Layer, "add_loss"),
    "get_own_losses": (keras.Layer, "_get_own_losses"),
    "clear_losses": (keras.Layer, "_clear_losses"),
    "compute_moments_sync": (tensorflow_nn, "_compute_moments_sync"),
    "masked_moments": (keras.layers.BatchNormalization, "_moments"),
    "apply": (BaseOptimizer, "apply"),
    "apply_scaled": (keras.optimizers.LossScaleOptimizer, "apply"),
    **{
        name: (tensorflow_random, name)
        for name in (
            "beta",
            "binomial",
            "categorical",
            "draw_seed",
            "dropout",
            "gamma",
            "normal",
            "randint",
            "truncated_normal",
            "uniform",
        )
    },
}


def around(function: str, call: Callable[..., Any]) -> None:
    """From now on Keras' function with a name of `REPLACEABLE` is `call(original, *args, **named)`."""
    owner, name = REPLACEABLE[function]
    original = getattr(owner, name)

    @functools.wraps(original)
    def replaced(*args: Any, **named: Any) -> Any:
        return call(original, *args, **named)

    setattr(owner, name, replaced)


@functools.cache
def install() -> None:
    """Lets optimizers apply gradients that are reduced already, where they are asked to."""
    for kind in (BaseOptimizer, keras.optimizers.LossScaleOptimizer):
        _patch_around_apply(kind)
    _patch_supports_xla()
    all_reduce = TFOptimizer._all_reduce_sum_gradients

    @functools.wraps(all_reduce)
    def once(optimizer: Any, grads_and_vars: Any) -> Any:
        return grads_and_vars if _thread.applies_reduced_gradients else all_reduce(optimizer, grads_and_vars)

    TFOptimizer._all_reduce_sum_gradients = once


@contextlib.contextmanager
def updating_with(
    optimizer: Any, update_step: Callable[[Any, Any, Any], None], before_each: Callable[[], None]
) -> Iterator[None]:
    """Meanwhile `optimizer` updates a variable by `update_step(gradient, variable, learning_rate)`.

    `before_each` is called before each update of all variables.
    """
    update_all = optimizer._backend_update_step

    def update(*arguments: Any) -> None:
        before_each()
        update_all(*arguments)

    # Set on the instance and past Keras' attribute tracking, so that nothing of it is saved with the model.
    object.__setattr__(optimizer, "update_step", update_step)
    object.__setattr__(optimizer, "_backend_update_step", update)
    try:
        yield
    finally:
        object.__delattr__(optimizer, "_backend_update_step")
        object.__delattr__(optimizer, "update_step")


@contextlib.contextmanager
def applying_reduced_gradients() -> Iterator[None]:
    """Optimizers take the gradients that they are given meanwhile for those of all replicas."""
    _thread.applies_reduced_gradients = True
    try:
        yield
    finally:
        _thread.applies_reduced_gradients = False


# `around(optimizer, gradients, variables, update)` reduces the gradients and calls `update(reduced)`.
AroundApply = Callable[[Any, list[Any], list[Any], Callable[[Sequence[Any]], None]], None]
_AROUND_APPLY = "_tfdist_around_apply"


def set_around_apply(optimizer: Any, around: AroundApply) -> None:
    """From now on `around` is called where `optimizer`, or one that scales its losses, is to apply gradients."""
    install()
    # Past Keras' attribute tracking, so that nothing of it is saved with the model.
    object.__setattr__(optimizer, _AROUND_APPLY, around)


def around_apply(optimizer: Any) -> AroundApply | None:
    """What was set for `optimizer` itself, or for the one inside it."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return vars(inner).get(_AROUND_APPLY) or vars(optimizer).get(_AROUND_APPLY)


def _patch_around_apply(kind: Any) -> None:
    original = kind.apply

    @functools.wraps(original)
    def apply(optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        around = None if _thread.applies_reduced_gradients else around_apply(optimizer)
        if around is None:
            return original(optimizer, grads, trainable_variables)
        variables = optimizer._trainable_variables if trainable_variables is None else trainable_variables

        def update(gradients: Sequence[Any]) -> None:
            with applying_reduced_gradients():
                original(optimizer, gradients, trainable_variables)

        return around(optimizer, list(grads), list(variables), update)

    kind.apply = apply


def _patch_supports_xla() -> None:
    """What goes around an update, Horovod's operations, is not known to XLA."""
    original = trainer_module.model_supports_jit

    @functools.wraps(original)
    def model_supports_jit(model: Any) -> bool:
        optimizer = getattr(model, "optimizer", None)
        return (optimizer is None or around_apply(optimizer) is None) and original(model)

    trainer_module.model_supports_jit = model_supports_jit


@contextlib.contextmanager
def counting(optimizer: Any, count: Callable[[Any], None]) -> Iterator[None]:
    """Meanwhile `count(variable)` adds one to the `iterations` of `optimizer`, which Keras reads and then writes."""
    iterations = optimizer._iterations
    object.__setattr__(iterations, "assign_add", lambda value: count(iterations._value))
    try:
        yield
    finally:
        object.__delattr__(iterations, "assign_add")


# `see(kind, of, value)` is told of what a step computes; of gradients it returns those to go on with.
See = Callable[[str, Any, Any], Any]


@contextlib.contextmanager
def watching(model: Any, see: See) -> Iterator[None]:
    """Meanwhile `see` is told of what the steps of `model` compute.

    | kind | of | value |
    |---|---|---|
    | "output" | a layer | what its call returned |
    | "added loss" | a layer | what it gave to `add_loss` |
    | "loss" | a `keras.losses.Loss` | what it returned |
    | "whole loss" | the model | what its `compute_loss` returned |
    | "gradients" | the variables | what an optimizer applies to them |
    """

    def returned(kind: str) -> Callable[..., Any]:
        def call(original: Callable[..., Any], of: Any, *args: Any, **named: Any) -> Any:
            value = original(of, *args, **named)
            see(kind, of, value)
            return value

        return call

    def add_loss(original: Callable[..., Any], layer: Any, loss: Any) -> Any:
        see("added loss", layer, loss)
        return original(layer, loss)

    def apply(original: Callable[..., Any], optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        of = optimizer._trainable_variables if trainable_variables is None else trainable_variables
        return original(optimizer, see("gradients", list(of), list(grads)), trainable_variables)

    around: list[tuple[Any, str, Callable[..., Any]]] = [
        (keras.Layer, "__call__", returned("output")),
        (keras.Layer, "add_loss", add_loss),
        (keras.losses.Loss, "__call__", returned("loss")),
        (type(model), "compute_loss", returned("whole loss")),
        (BaseOptimizer, "apply", apply),
        (keras.optimizers.LossScaleOptimizer, "apply", apply),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, call in around:
            stack.enter_context(_surrounded(owner, name, call))
        yield


@contextlib.contextmanager
def _surrounded(owner: Any, name: str, call: Callable[..., Any]) -> Iterator[None]:
    """Meanwhile a method is `call(original, ...)`."""
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


@functools.cache
def tell_callbacks_of_their_list() -> None:
    """From now on a callback that has `set_callback_list` is given the list that it is in, before its model.

    Keras tells a callback of its model, and never of the other callbacks, whose state belongs to the training.
    """
    original = keras.callbacks.CallbackList.set_model

    @functools.wraps(original)
    def set_model(callback_list: Any, model: Any) -> None:
        for callback in with_wrapped(callback_list.callbacks):
            if hasattr(callback, "set_callback_list"):
                callback.set_callback_list(callback_list)
        original(callback_list, model)

    keras.callbacks.CallbackList.set_model = set_model


def with_wrapped(callbacks: Iterable[Any]) -> Iterator[Any]:
    """Each callback, and those that it wraps as its attribute `callback`."""
    for callback in callbacks:
        inner = callback
        while isinstance(inner, keras.callbacks.Callback):
            yield inner
            inner = getattr(inner, "callback", None)


# The methods of a model that lead to its strategy.
ROUTED = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
_STRATEGY = "_tfdist_strategy"


def set_strategy(model: Any, strategy: Any) -> None:
    """From now on Keras' own `fit` and the like call `strategy.fit(model, ...)`, also where a class' own call them."""
    _route_methods()
    # Past Keras' attribute tracking, so that nothing of it is saved with the model.
    object.__setattr__(model, _STRATEGY, strategy)


@contextlib.contextmanager
def led_to(model: Any, strategy: Any) -> Iterator[None]:
    """Meanwhile Keras' own `fit` and the like of `model` call `strategy.fit(model, ...)`."""
    before = vars(model).get(_STRATEGY)
    set_strategy(model, strategy)
    try:
        yield
    finally:
        set_strategy(model, before)


_MADE_IN = "_tfdist_made_in"


class Scope(contextlib.AbstractContextManager[Any]):
    """The scope of a strategy, in which models note its name: a training without the strategy can then be told."""

    def __init__(self, strategy: str, scope: contextlib.AbstractContextManager[Any]):
        self._strategy = strategy
        self._scope = scope

    def __enter__(self) -> Any:
        _route_methods()
        entered = self._scope.__enter__()
        self._outer, _thread.strategy = _thread.strategy, self._strategy
        return entered

    def __exit__(self, *raised: Any) -> bool | None:
        _thread.strategy = self._outer
        return self._scope.__exit__(*raised)


@functools.cache
def _route_methods() -> None:
    kind = tensorflow_trainer.TensorFlowTrainer
    for name in ROUTED:
        setattr(kind, name, _routed(name))
    initialize = kind.__init__

    @functools.wraps(initialize)
    def noting_scope(model: Any) -> None:
        initialize(model)
        object.__setattr__(model, _MADE_IN, _thread.strategy)

    kind.__init__ = noting_scope


def _routed(name: str) -> Callable[..., Any]:
    original = getattr(tensorflow_trainer.TensorFlowTrainer, name)

    @functools.wraps(original)
    def method(model: Any, *arguments: Any, **named: Any) -> Any:
        strategy = vars(model).get(_STRATEGY)
        if strategy is None:
            if name in ("fit", "train_on_batch"):
                _warn_of_unprepared(model, name)
            return original(model, *arguments, **named)
        return getattr(strategy, name)(model, *arguments, **named)

    return method


def _warn_of_unprepared(model: Any, method: str) -> None:
    made_in = vars(model).get(_MADE_IN)
    if made_in is not None:
        warnings.warn(
            f"The model `{model.name}` was made in the scope of the strategy `{made_in}`, and `{method}` trains it "
            f"without the strategy; call `strategy.prepare(model)` first, or `strategy.{method}(model, ...)`",
            stacklevel=3,
        )
