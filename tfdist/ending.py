"""What must happen when this process ends with an error, so that others of its job do not wait for it for ever.

A command that ends with an error calls `fail`; an exception that nobody catches does so by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType

_hooks: list[Callable[[int], None]] = []


def at_failure(hook: Callable[[int], None]) -> None:
    """Has `hook(exit_code)` called when this process ends with an error."""
    if not _hooks:
        before = sys.excepthook

        def on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            before(kind, error, trace)
            fail(getattr(error, "exit_code", 1))

        sys.excepthook = on_exception
    _hooks.append(hook)


def fail(exit_code: int) -> None:
    """Calls the hooks, the last one first; a hook may end the process."""
    sys.stderr.flush()
    while _hooks:
        _hooks.pop()(exit_code)
