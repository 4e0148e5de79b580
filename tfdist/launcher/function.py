"""A function with its arguments as the program of each process of a job, instead of a script.

The caller writes the call into a folder. Each process, `tfdist.launcher.call`, writes what the call returned or raised.

Files of pickle can run any code, so the folder must belong to the user, and no one else may write to it.
"""

from __future__ import annotations

import functools
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import cloudpickle

from tfdist.errors import TfdistError, UsageError

CALL = "call.pickle"


@dataclass(frozen=True)
class Outcome:
    """What a process has written.

    Attributes:
        value: what the function returned.
        error: the sentence about what it raised, which begins with the process; `None` if it returned.
        hint: what to do about the error.
        traceback: the error with its traceback, as Python prints it.
        is_consequence: whether the error says that another process is lost.
        unix_seconds: when the function ended.
    """

    value: Any = None
    error: str | None = None
    hint: str | None = None
    traceback: str = ""
    is_consequence: bool = False
    unix_seconds: float = 0.0


def pickled(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """A call as bytes. A function of `__main__`, as those of a notebook, is contained itself.

    Raises:
        UsageError: the function, or something that it uses, cannot be pickled.
    """
    try:
        call = cloudpickle.dumps((function, tuple(args), dict(kwargs)))
    except Exception as error:  # whatever the objects that the function uses raise
        reason = error.sentence if isinstance(error, TfdistError) else error
        raise UsageError(
            f"The function `{name(function)}` cannot be sent to other processes: {reason}",
            "create strategies, models and open files inside of the function",
        ) from error
    return pickle.dumps((sys.path, call))


def name(function: Callable[..., Any]) -> str:
    """The name of a function for a message."""
    return getattr(function, "__name__", None) or str(function)


def write_call(folder: Path, call: bytes) -> None:
    """Writes what `pickled` returned into a folder."""
    (folder / CALL).write_bytes(call)


def read_call(folder: Path) -> Callable[[], Any]:
    """The call that was written into a folder; it imports from where the caller could."""
    path, call = pickle.loads((folder / CALL).read_bytes())
    sys.path += [entry for entry in path if entry not in sys.path]
    function, args, kwargs = pickle.loads(call)
    return functools.partial(function, *args, **kwargs)


def outcomes(folder: Path, count: int) -> list[Outcome | None]:
    """The outcome of each rank; `None` for a process that has ended without one.

    Raises:
        UsageError: what the function returned cannot be unpickled here.
    """
    return [_outcome(_path(folder, rank), rank) for rank in range(count)]


def _outcome(path: Path, rank: int) -> Outcome | None:
    if not path.exists():
        return None
    try:
        return cast(Outcome, pickle.loads(path.read_bytes()))
    except Exception as error:  # whatever the classes of the objects raise
        raise UsageError(
            f"What the function returned in process {rank} cannot be read here: {type(error).__name__}: {error}",
            "return numbers, arrays or weights",
        ) from error


def first_failure(ended: Sequence[Outcome | None]) -> Outcome | None:
    """The failure that came first, or before those that say that another process is lost; `None` if there is none."""
    failures = [outcome for outcome in ended if outcome is not None and outcome.error is not None]
    return min(failures, key=lambda failure: (failure.is_consequence, failure.unix_seconds), default=None)


def write_outcome(folder: Path, rank: int, outcome: Outcome) -> None:
    """Writes the outcome of a rank.

    Raises:
        UsageError: what the function returned cannot be pickled.
    """
    try:
        data = cloudpickle.dumps(outcome)
    except Exception as error:  # whatever the objects that the function returned raise
        raise UsageError(
            f"The function returned a `{type(outcome.value).__name__}`, which cannot be sent back: {error}",
            "return numbers, arrays or weights",
        ) from error
    path = _path(folder, rank)
    path.with_suffix(".part").write_bytes(data)
    path.with_suffix(".part").rename(path)


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.pickle"
