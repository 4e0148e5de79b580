"""Replaces functions of other packages, and attaches values to a user's model, optimizer or variable.

A function is replaced permanently, for one object, or within a context. Attached values are in one record in one hidden
attribute. Each has a name and a type, and lives as long as the object:

>>> import types
>>> _next_pass: Attached[int] = Attached("next_pass")
>>> model = types.SimpleNamespace()
>>> _next_pass.get(model) is None
True
>>> _next_pass.set(model, 3)
>>> _next_pass.get(model)
3
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar


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


_RECORD = "_tfdist"

Value = TypeVar("Value")


class Attached(Generic[Value]):
    """The value of the record with this `name`."""

    def __init__(self, name: str):
        self.name = name

    def get(self, owner: Any) -> Value | None:
        """The value of `owner`; `None` if it has none."""
        value: Value | None = getattr(owner, "__dict__", {}).get(_RECORD, {}).get(self.name)
        return value

    def set(self, owner: Any, value: Value | None) -> None:
        """Sets the value for `owner`; `None` removes it."""
        # A new dictionary, because copies of `owner` share the old one.
        record = {**getattr(owner, "__dict__", {}).get(_RECORD, {}), self.name: value}
        # Bypasses Keras' attribute tracking, so that the record is not saved with the model.
        object.__setattr__(owner, _RECORD, {name: kept for name, kept in record.items() if kept is not None})
