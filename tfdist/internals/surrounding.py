"""Replaces a function of a class or a module within a context."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any


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
