"""The number of steps in one call of the inner loop: until a callback must be called, and at most about half a second.

Keras calls batch hooks after every `steps_per_execution` steps. Here they are called that often only if a callback
needs them. A callback of the user's own can say when it does:

    def batches_until_hook(self, batch: int) -> int | None:
        '''The number of batches, from batch number `batch` of the epoch on, until the hooks must be called.'''

`None` means not in this epoch. Hooks may be called at other times too, for several batches at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import keras

from tfdist.interface.program import AtNan
from tfdist.internals import keras as keras_internals

SECONDS_PER_CALL = 0.5
STEPS_OF_FIRST_CALL = 8

_HOOKS = {
    "train": ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end"),
    "test": ("on_test_batch_begin", "on_test_batch_end"),
    "predict": ("on_predict_batch_begin", "on_predict_batch_end"),
}

Need = Callable[[int], int | None]


class Pace:
    """Chooses the length of the next call from the needs of callbacks and the measured time of a step.

    Args:
        callbacks: the callbacks of the fit, evaluate or predict.
        kind: `"train"`, `"test"` or `"predict"`.
        steps_per_execution: the number of batches between calls of the hooks, where they are needed; the clock does
            not shorten a call below it.
        at_most: a bound on the steps of a call, `None` if only the clock bounds them.
        seconds: the wanted duration of a call.
    """

    def __init__(
        self,
        callbacks: Sequence[Any],
        kind: str,
        steps_per_execution: int,
        at_most: int | None,
        seconds: float = SECONDS_PER_CALL,
    ):
        self._seconds = seconds
        self._needs = [need for c in callbacks if (need := _need(c, kind, steps_per_execution)) is not None]
        self._at_least = steps_per_execution
        self._at_most = at_most
        self._step_seconds: float | None = None

    def steps(self, batch: int) -> int:
        """The number of steps to run from batch number `batch` of the epoch on, 1 or more."""
        limits = [self._by_the_clock(), self._at_most, *(need(batch) for need in self._needs)]
        return max(1, min(limit for limit in limits if limit is not None))

    def ran(self, steps: int, seconds: float) -> None:
        """Notes the time of a call of `steps` steps; the first call is left out, since it also builds the graph."""
        if steps:
            known = self._step_seconds is not None
            self._step_seconds = seconds / steps if known else 0.0

    def _by_the_clock(self) -> int:
        steps = int(self._seconds / self._step_seconds) if self._step_seconds else STEPS_OF_FIRST_CALL
        return max(self._at_least, steps)


def now() -> float:
    """Seconds on a clock that only goes forward."""
    return time.perf_counter()


def at_nan(callbacks: Sequence[Any]) -> AtNan:
    """What the callbacks ask of the inner loop."""
    if any(isinstance(callback, keras.callbacks.TerminateOnNaN) for callback in callbacks):
        return AtNan.STOP
    return AtNan.FIND if any(getattr(c, "raises_at_nan", False) for c in callbacks) else AtNan.NOTHING


def _need(callback: Any, kind: str, steps_per_execution: int) -> Need | None:
    """A function for the number of batches until `callback` needs its batch hooks; `None` if it never does."""
    own = getattr(callback, "batches_until_hook", None)
    if own is not None:
        return own if kind == "train" else None
    hooks = [getattr(callback, name) for name in _HOOKS[kind]]
    if all(keras_internals.is_default(hook) for hook in hooks) or _calls_can_wait(callback):
        return None
    return lambda batch: steps_per_execution


def _calls_can_wait(callback: Any) -> bool:
    """Whether this is a callback of Keras whose batch hooks, with its settings, do nothing that cannot wait."""
    kind = type(callback)
    if kind in (keras_internals.ProgbarLogger, keras.callbacks.TerminateOnNaN):  # see `at_nan`
        return True
    if kind in (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore):
        return callback.save_freq == "epoch"
    if kind is keras.callbacks.TensorBoard:
        return (
            callback.update_freq == "epoch"
            and not callback.write_steps_per_second
            and not keras_internals.traces_batches(callback)
        )
    return False
