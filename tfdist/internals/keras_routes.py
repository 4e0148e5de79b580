"""Routes `fit`, `evaluate` and `predict` of a prepared model to its strategy.

    model.fit(...)                   set on the model by `set_strategy`
    └─ type(model).fit(model, ...)   an override in a subclass, or a library's wrapper around Keras' function
       └─ Keras' own function        whose code is replaced during the call
          └─ strategy.fit(model, ...)

A wrapper refers to the function of Keras for which it was made, before tfdist was imported or long after. If tfdist
replaced the function, the replacement would therefore run without the wrapper, or never. So the function stays the same
object, and while a method of a prepared model runs, its code routes models that have a strategy to it. Outside of these
calls Keras is unchanged.

Written for Keras 3.15.1; `tests/test_keras_internals.py` fails when Keras changes a function that this uses.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from keras.src.backend.tensorflow import trainer as tensorflow_trainer

from tfdist.errors import UsageError
from tfdist.internals.patching import Attached, SharedPatch, surround

# The methods of a model that are routed to its strategy.
ROUTED = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
KINDS = ("train", "test", "predict")  # of steps

_strategy: Attached[Any] = Attached("strategy")
_made_in: Attached[Any] = Attached("made_in")
_is_routed: Attached[bool] = Attached("is_routed")  # for a method that `_set_method` has set
_validation_feed: Attached[Any] = Attached("validation_feed")


def set_strategy(model: Any, strategy: Any) -> None:
    """From now on the methods `ROUTED` of `model`, such as `fit`, call those of `strategy`, also from an override.

    With `None` for `strategy` they are Keras' again.
    """
    _strategy.set(model, strategy)
    for name in ROUTED:
        _set_method(model, name, _routed)
    for kind in KINDS:
        _set_method(model, f"make_{kind}_function", _making_guarded)
    # Keras' loop calls it before its first step, and computes a batch in it under a strategy of TensorFlow.
    _set_method(model, "_maybe_symbolic_build", _refusing)


@contextlib.contextmanager
def routed_to(model: Any, strategy: Any) -> Iterator[None]:
    """Within this context the methods `ROUTED` of `model`, such as `fit`, call those of `strategy`."""
    previous = _strategy.get(model)
    set_strategy(model, strategy)
    try:
        yield
    finally:
        set_strategy(model, previous)


@contextlib.contextmanager
def validating(model: Any, strategy: Any, feed: Any) -> Iterator[None]:
    """Within this context `evaluate` of `model` calls `strategy.evaluate`, which can use the data in `feed`."""
    _validation_feed.set(model, feed)
    try:
        with routed_to(model, strategy):
            yield
    finally:
        _validation_feed.set(model, None)


def validation_feed(model: Any) -> Any:
    """The `feed` of `validating` during a validation; `None` otherwise."""
    return _validation_feed.get(model)


def _set_method(model: Any, name: str, call: Callable[..., Any]) -> None:
    """Sets a method on `model` itself that returns `call(name, model, method, ...)`; `method` is the previous one."""
    previous = vars(model).get(name)
    if _is_routed.get(previous):
        return

    @functools.wraps(getattr(type(model), name))
    def method(model: Any, *arguments: Any, **named: Any) -> Any:
        # Looked up at each call, since a library may wrap it at any time.
        original = previous or functools.partial(getattr(type(model), name), model)
        return call(name, model, original, *arguments, **named)

    _is_routed.set(method, True)
    object.__setattr__(model, name, types.MethodType(method, model))


def _routed(name: str, model: Any, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    if _strategy.get(model) is None:
        # Keras' own methods under a strategy of TensorFlow fail, or return the rows of a batch once per replica.
        if name in ("fit", "train_on_batch") or model.distribute_strategy.num_replicas_in_sync > 1:
            _warn_of_unprepared(model, name)
        return method(*arguments, **named)
    with _routing:
        return method(*arguments, **named)


class _Function:
    """A function of Keras that can route prepared models to their strategies."""

    def __init__(self, name: str):
        self._name = name
        self._function: Any = inspect.unwrap(vars(tensorflow_trainer.TensorFlowTrainer)[name])

    def route(self) -> None:
        """From now on the function routes prepared models to their strategies."""
        function = self._function
        self._stock = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        # The new code runs with Keras' globals, so it receives the function to call as the default of an argument. In
        # this order another thread can call the function at any time.
        function.__kwdefaults__ = {"_tfdist_route": self._call}
        function.__code__, function.__defaults__ = _routed_code.__code__, None

    def restore(self) -> None:
        """Undoes `route`."""
        function = self._function
        function.__defaults__, function.__code__ = self._stock.__defaults__, self._stock.__code__
        function.__kwdefaults__ = None

    def _call(self, model: Any, *arguments: Any, **named: Any) -> Any:
        strategy = _strategy.get(model)
        if strategy is None:
            return self._stock(model, *arguments, **named)
        return getattr(strategy, self._name)(model, *arguments, **named)


def _routed_code(self: Any, *arguments: Any, _tfdist_route: Any = None, **named: Any) -> Any:
    return _tfdist_route(self, *arguments, **named)


@functools.cache
def _functions() -> list[_Function]:
    return [_Function(name) for name in ROUTED]


def _route_functions() -> Callable[[], None]:
    for function in _functions():
        function.route()

    def restore() -> None:
        for function in _functions():
            function.restore()

    return restore


# Applied while a method of any prepared model runs.
_routing = SharedPatch(_route_functions)


def _refuse(model: Any) -> None:
    """Raises `UsageError` if `model` has a strategy, because Keras' own loop is about to train it without."""
    if (strategy := _strategy.get(model)) is not None:
        raise UsageError(
            f"Keras' own loop was about to run a step of the model `{model.name}`, which is prepared for the strategy "
            f"`{strategy.name}`, outside of the strategy's loop",
            "call the method of the model, as in `model.fit(...)`, or that of the strategy, `strategy.fit(model, ...)`",
        )


def _refusing(name: str, model: Any, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    _refuse(model)
    return method(*arguments, **named)


class _Guarded:
    """A wrapper of Keras' function for the steps of a model, which raises an error while the model has a strategy."""

    def __init__(self, model: Any, function: Any):
        self._model, self.function = model, function

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        _refuse(self._model)
        return self.function(*arguments, **named)


def _making_guarded(name: str, model: Any, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    result = method(*arguments, **named)
    attribute = name.removeprefix("make_")  # such as "train_function"
    function = getattr(model, attribute)
    if _strategy.get(model) is None or isinstance(function, _Guarded) or function is None:
        return result
    guarded = _Guarded(model, function)
    setattr(model, attribute, guarded)
    return guarded if result is function else result


def unguarded(function: Any) -> Any:
    """Keras' function for the steps of a model, without the guard for models that have a strategy."""
    return function.function if isinstance(function, _Guarded) else function


class _Thread(threading.local):
    strategy: str | None = None  # the name of the strategy in whose scope the thread is


_thread = _Thread()


class Scope(contextlib.AbstractContextManager[Any]):
    """The scope of a strategy; models made in it record its name, to warn if they are trained without the strategy."""

    def __init__(self, strategy: str, scope: contextlib.AbstractContextManager[Any]):
        self._strategy = strategy
        self._scope = scope

    def __enter__(self) -> Any:
        entered = self._scope.__enter__()
        self._outer, _thread.strategy = _thread.strategy, self._strategy
        _recording.__enter__()
        return entered

    def __exit__(self, *raised: Any) -> bool | None:
        _recording.__exit__(*raised)
        _thread.strategy = self._outer
        return self._scope.__exit__(*raised)


def _record_scopes() -> Callable[[], None]:
    """Makes new models record the scope in which they are made."""

    def initialize(original: Callable[..., None], model: Any) -> None:
        original(model)
        if _thread.strategy is not None:
            _made_in.set(model, _thread.strategy)
            for name in ROUTED:
                _set_method(model, name, _routed)

    trainer = tensorflow_trainer.TensorFlowTrainer
    restore = surround(trainer, "__init__", initialize)
    recording = trainer.__init__

    def undo() -> None:
        if trainer.__init__ is recording:  # else another library has wrapped it meanwhile
            restore()

    return undo


# Applied while any thread is in a scope.
_recording = SharedPatch(_record_scopes)


def _warn_of_unprepared(model: Any, method: str) -> None:
    made_in = _made_in.get(model)
    if made_in is not None:
        warnings.warn(
            f"The model `{model.name}` was made in the scope of the strategy `{made_in}`, and `{method}` runs "
            f"without the strategy; call `strategy.prepare(model)` first, or `strategy.{method}(model, ...)`",
            stacklevel=4,
        )
