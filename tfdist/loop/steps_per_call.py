"""The number of steps per call of the inner loop: until a callback must be called, but at most about half a second.

Keras calls batch hooks after every `steps_per_execution` steps. Here they are called that often only if a callback
needs them. A custom callback can define when it does:

    def batches_until_hook(self, batch: int) -> int | None:
        '''Returns the number of batches until the hooks must be called, counted from batch number `batch`.'''

`None` means that this epoch needs no call. Hooks may also be called at other times, for several batches at once.
"""

from __future__ import annotations

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
    """Chooses the number of steps of the next call from the needs of callbacks and the measured step time.

    Args:
        callbacks: the callbacks of the fit, evaluate or predict.
        kind: `"train"`, `"test"` or `"predict"`.
        steps_per_execution: the number of batches between calls of the hooks, where they are needed; the target
            duration does not shorten a call below it.
        at_most: the largest number of steps per call; `None` if only the duration limits it.
        seconds: the target duration of a call.
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
        needs = (_batches_until_hook(callback, kind, steps_per_execution) for callback in callbacks)
        self._needs = [need for need in needs if need is not None]
        self._at_least = steps_per_execution
        self._at_most = at_most
        self._step_seconds: float | None = None

    def steps(self, batch: int) -> int:
        """Returns the number of steps to run from batch number `batch` of the epoch, 1 or more."""
        by_time = int(self._seconds / self._step_seconds) if self._step_seconds else STEPS_OF_FIRST_CALL
        limits = [max(self._at_least, by_time), self._at_most, *(need(batch) for need in self._needs)]
        return max(1, min(limit for limit in limits if limit is not None))

    def ran(self, steps: int, seconds: float) -> None:
        """Records the duration of a call of `steps` steps, except for the first call, which also builds the graph."""
        if steps:
            is_first = self._step_seconds is None
            self._step_seconds = 0.0 if is_first else seconds / steps


def at_nan(callbacks: Sequence[Any]) -> AtNan:
    """Returns the reaction to a loss that is not finite, as the callbacks need it."""
    if any(isinstance(callback, keras.callbacks.TerminateOnNaN) for callback in callbacks):
        return AtNan.STOP
    return AtNan.FIND if any(getattr(c, "raises_at_nan", False) for c in callbacks) else AtNan.NOTHING


def _batches_until_hook(callback: Any, kind: str, steps_per_execution: int) -> Need | None:
    """Returns a function for the number of batches until `callback` needs its hooks; `None` if it never does."""
    custom = getattr(callback, "batches_until_hook", None)
    if custom is not None:
        return custom if kind == "train" else None
    hooks = [getattr(callback, name) for name in _HOOKS[kind]]
    if all(keras_internals.is_default(hook) for hook in hooks) or _calls_can_wait(callback):
        return None
    return lambda batch: steps_per_execution


def _calls_can_wait(callback: Any) -> bool:
    """Whether this is a Keras callback whose batch hooks, with its settings, do nothing that cannot wait."""
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
