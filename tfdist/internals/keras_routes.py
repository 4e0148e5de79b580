"""The way from Keras' `fit`, `evaluate` and `predict` of a prepared model to its strategy.

    model.fit(...)                   set on the model by `set_strategy`
    └─ type(model).fit(model, ...)   what a subclass defines, or a library has wrapped around Keras' function
       └─ Keras' own function        its code is another one during the call
          └─ strategy.fit(model, ...)

A wrapper holds the function of Keras that it was made for, and may be made before tfdist is imported or long after. A
function that takes the place of Keras' own would therefore run without the wrapper, or never. So the function stays
the same object, and while a method of a prepared model runs, its code leads models that have a strategy to it. Outside
of these calls Keras is as it was.

The functions were read in Keras 3.15.1, as `tests/test_keras_internals.py` says.
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
from tfdist.internals.attached import Attached

# The methods of a model that call its strategy.
ROUTED = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
KINDS = ("train", "test", "predict")  # of steps

_strategy: Attached[Any] = Attached("strategy")
_made_in: Attached[Any] = Attached("made_in")
_is_routed: Attached[bool] = Attached("is_routed")  # of a method that `_set_method` has set
_validation_feed: Attached[Any] = Attached("validation_feed")


def set_strategy(model: Any, strategy: Any) -> None:
    """From now on `fit` and the others of `ROUTED` of `model` call `strategy.fit(model, ...)`, also from an override.

    `None` for `strategy` leaves them to Keras again.
    """
    _strategy.set(model, strategy)
    for name in ROUTED:
        _set_method(model, name, _routed)
    for kind in KINDS:
        _set_method(model, f"make_{kind}_function", _making_guarded)
    # Keras' loop calls it before its first step, and under a strategy of TensorFlow computes with a batch in it.
    _set_method(model, "_maybe_symbolic_build", _refusing)


@contextlib.contextmanager
def led_to(model: Any, strategy: Any) -> Iterator[None]:
    """In this context `fit` of `model` and the others of `ROUTED` call `strategy.fit(model, ...)`."""
    before = _strategy.get(model)
    set_strategy(model, strategy)
    try:
        yield
    finally:
        set_strategy(model, before)


@contextlib.contextmanager
def validating(model: Any, strategy: Any, feed: Any) -> Iterator[None]:
    """In this context `evaluate` of `model` calls `strategy.evaluate`, which can take the validation data in `feed`."""
    _validation_feed.set(model, feed)
    try:
        with led_to(model, strategy):
            yield
    finally:
        _validation_feed.set(model, None)


def validation_feed(model: Any) -> Any:
    """The `feed` of `validating`, during a validation."""
    return _validation_feed.get(model)


def _set_method(model: Any, name: str, call: Callable[..., Any]) -> None:
    """Sets a method on `model` itself, which returns `call(name, model, method, ...)` of the method without it."""
    before = vars(model).get(name)
    if _is_routed.get(before):
        return

    @functools.wraps(getattr(type(model), name))
    def method(model: Any, *arguments: Any, **named: Any) -> Any:
        # Looked up now, since a library may wrap it at any time.
        without = before or functools.partial(getattr(type(model), name), model)
        return call(name, model, without, *arguments, **named)

    _is_routed.set(method, True)
    object.__setattr__(model, name, types.MethodType(method, model))


def _routed(name: str, model: Any, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    if _strategy.get(model) is None:
        # Keras' own methods under a strategy of TensorFlow fail, or return the rows of a batch once for each replica.
        if name in ("fit", "train_on_batch") or model.distribute_strategy.num_replicas_in_sync > 1:
            _warn_of_unprepared(model, name)
        return method(*arguments, **named)
    with _leading():
        return method(*arguments, **named)


class _Function:
    """A function of Keras that can lead prepared models to their strategies."""

    def __init__(self, name: str):
        self._name = name
        self._function: Any = inspect.unwrap(vars(tensorflow_trainer.TensorFlowTrainer)[name])

    def lead(self) -> None:
        """From now on prepared models are led to their strategies."""
        function = self._function
        self._stock = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        # The new code finds what to call as the default of an argument: it runs with the global names of Keras. In this
        # order, so that another thread can call the function at any time.
        function.__kwdefaults__ = {"_tfdist_lead": self._lead}
        function.__code__, function.__defaults__ = _led.__code__, None

    def restore(self) -> None:
        """The function is what it was before `lead`."""
        function = self._function
        function.__defaults__, function.__code__ = self._stock.__defaults__, self._stock.__code__
        function.__kwdefaults__ = None

    def _lead(self, model: Any, *arguments: Any, **named: Any) -> Any:
        strategy = _strategy.get(model)
        if strategy is None:
            return self._stock(model, *arguments, **named)
        return getattr(strategy, self._name)(model, *arguments, **named)


def _led(self: Any, *arguments: Any, _tfdist_lead: Any = None, **named: Any) -> Any:
    return _tfdist_lead(self, *arguments, **named)


_lock = threading.Lock()
_leads = 0  # calls of methods of prepared models that run now, in all threads


@functools.cache
def _functions() -> list[_Function]:
    return [_Function(name) for name in ROUTED]


@contextlib.contextmanager
def _leading() -> Iterator[None]:
    """In this context Keras' functions lead prepared models to their strategies."""
    global _leads
    with _lock:
        if _leads == 0:
            for function in _functions():
                function.lead()
        _leads += 1
    try:
        yield
    finally:
        with _lock:
            _leads -= 1
            if _leads == 0:
                for function in _functions():
                    function.restore()


def _refuse(model: Any) -> None:
    """Raises `UsageError` if `model` has a strategy: steps of Keras' own loop would train it otherwise."""
    if (strategy := _strategy.get(model)) is not None:
        raise UsageError(
            f"Keras' own loop was about to run a step of the model `{model.name}`, which is prepared for the strategy "
            f"`{strategy.name}`, and the strategy's loop does not run",
            "call the method of the model, as in `model.fit(...)`, or that of the strategy, `strategy.fit(model, ...)`",
        )


def _refusing(name: str, model: Any, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    del name
    _refuse(model)
    return method(*arguments, **named)


class _Guarded:
    """Keras' function for the steps of a model, which refuses to run while the model has a strategy."""

    def __init__(self, model: Any, function: Any):
        self._model, self.function = model, function

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        _refuse(self._model)
        return self.function(*arguments, **named)


def _making_guarded(name: str, model: Any, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    made = method(*arguments, **named)
    attribute = name.removeprefix("make_")  # such as "train_function"
    function = getattr(model, attribute)
    if _strategy.get(model) is None or isinstance(function, _Guarded) or function is None:
        return made
    guarded = _Guarded(model, function)
    setattr(model, attribute, guarded)
    return guarded if made is function else made


def unguarded(function: Any) -> Any:
    """Keras' function for the steps of a model, as it is for a model without a strategy."""
    return function.function if isinstance(function, _Guarded) else function


class _Thread(threading.local):
    strategy: str | None = None  # the name of the strategy whose scope the thread is in


_thread = _Thread()


class Scope(contextlib.AbstractContextManager[Any]):
    """The scope of a strategy. Models made in it note its name, to warn of training without the strategy."""

    def __init__(self, strategy: str, scope: contextlib.AbstractContextManager[Any]):
        self._strategy = strategy
        self._scope = scope

    def __enter__(self) -> Any:
        entered = self._scope.__enter__()
        self._outer, _thread.strategy = _thread.strategy, self._strategy
        _notes.begin()
        return entered

    def __exit__(self, *raised: Any) -> bool | None:
        _notes.end()
        _thread.strategy = self._outer
        return self._scope.__exit__(*raised)


class _Notes:
    """Lets new models note the scope that they are made in, while any thread is in a scope."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._scopes = 0

    def begin(self) -> None:
        with self._lock:
            self._scopes += 1
            if self._scopes == 1:
                self._initialize = tensorflow_trainer.TensorFlowTrainer.__init__
                self._noting = _noting_scope(self._initialize)
                tensorflow_trainer.TensorFlowTrainer.__init__ = self._noting

    def end(self) -> None:
        with self._lock:
            self._scopes -= 1
            # A wrapper that was set meanwhile stays.
            if self._scopes == 0 and tensorflow_trainer.TensorFlowTrainer.__init__ is self._noting:
                tensorflow_trainer.TensorFlowTrainer.__init__ = self._initialize


_notes = _Notes()


def _noting_scope(initialize: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(initialize)
    def noting_scope(model: Any) -> None:
        initialize(model)
        if _thread.strategy is not None:
            _made_in.set(model, _thread.strategy)
            for name in ROUTED:
                _set_method(model, name, _routed)

    return noting_scope


def _warn_of_unprepared(model: Any, method: str) -> None:
    made_in = _made_in.get(model)
    if made_in is not None:
        warnings.warn(
            f"The model `{model.name}` was made in the scope of the strategy `{made_in}`, and `{method}` runs "
            f"without the strategy; call `strategy.prepare(model)` first, or `strategy.{method}(model, ...)`",
            stacklevel=4,
        )
