"""A callback that acts only in the chief process.

Synopsis:

    model.fit(..., callbacks=[ChiefOnly(keras.callbacks.CSVLogger("history.csv"))])
"""

from __future__ import annotations

import os
from typing import Any

import keras

from tfdist.jobs.world import World
from tfdist.options import checks_arguments

_HOOKS = tuple(name for name in dir(keras.callbacks.Callback) if name.startswith("on_"))
_TRAIN_BATCH_HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")


class ChiefOnly(keras.callbacks.Callback):
    """Passes every hook to `callback` in the chief, and does nothing in the other processes.

    Use it for callbacks that write files or print. Do not use it for callbacks that control training, such as
    EarlyStopping and ReduceLROnPlateau, or that compute with the model's replicas: they must do the same in every
    process, or the processes diverge.

    Args:
        callback: any Keras callback.
        world: the rank of this process; by default detected from the environment.
    """

    @checks_arguments
    def __init__(self, callback: keras.callbacks.Callback, world: World | None = None):
        super().__init__()
        self.callback = callback
        self.acts = (world or World.detect(os.environ)).is_chief
        # Only the hooks that `callback` overrides become hooks of this object, as in LambdaCallback, so that Keras and
        # tfdist's loop see which batch hooks it overrides.
        for hook in _HOOKS:
            if self.acts and _overrides(callback, hook):
                setattr(self, hook, getattr(callback, hook))

    def set_params(self, params: dict[str, Any]) -> None:
        super().set_params(params)
        if self.acts:
            self.callback.set_params(params)

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        if self.acts:
            self.callback.set_model(model)

    def batches_until_hook(self, batch: int) -> int | None:
        """Returns the answer of `callback`; `None` if it overrides no batch hook, or in other processes."""
        if not self.acts:
            return None
        if hasattr(self.callback, "batches_until_hook"):
            return self.callback.batches_until_hook(batch)
        return 1 if any(_overrides(self.callback, hook) for hook in _TRAIN_BATCH_HOOKS) else None


def _overrides(callback: keras.callbacks.Callback, hook: str) -> bool:
    # A hook set on the object itself (LambdaCallback) need not be a method.
    function = getattr(getattr(callback, hook), "__func__", None)
    return function is not getattr(keras.callbacks.Callback, hook)
