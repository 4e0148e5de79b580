"""A callback that acts in one process of many.

Synopsis:

    model.fit(..., callbacks=[ChiefOnly(keras.callbacks.CSVLogger("history.csv"))])
"""

from __future__ import annotations

import os
from typing import Any

import keras

from tfdist.cluster.world import World

_HOOKS = tuple(name for name in dir(keras.callbacks.Callback) if name.startswith("on_"))
_TRAIN_BATCH_HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")


class ChiefOnly(keras.callbacks.Callback):
    """Hands every hook to `callback` on the chief, and does nothing in the other processes.

    For callbacks that write files or print. Not for those that steer training (EarlyStopping,
    ReduceLROnPlateau) and not for those that compute with the model's replicas: these must do the same in
    every process, or the processes part.

    Args:
        callback: any Keras callback.
        world: this process' place; by default read from the environment.
    """

    def __init__(self, callback: keras.callbacks.Callback, world: World | None = None):
        super().__init__()
        self.callback = callback
        self.acts = (world or World.detect(os.environ)).is_chief
        # Only the hooks that `callback` overrides become hooks of this object, as LambdaCallback's do: so
        # whoever looks for overridden batch hooks, Keras or a loop, sees through to `callback`.
        for hook in _HOOKS:
            if self.acts and _overrides(callback, hook):
                setattr(self, hook, getattr(callback, hook))

    def set_params(self, params: dict[str, Any]) -> None:
        """Hands on `fit`'s parameters."""
        super().set_params(params)
        if self.acts:
            self.callback.set_params(params)

    def set_model(self, model: keras.Model) -> None:
        """Hands on the model."""
        super().set_model(model)
        if self.acts:
            self.callback.set_model(model)

    def batches_until_hook(self, batch: int) -> int | None:
        """What `callback` asks for: nothing where it overrides no batch hook or does not act."""
        if not self.acts:
            return None
        if hasattr(self.callback, "batches_until_hook"):
            return self.callback.batches_until_hook(batch)
        return 1 if any(_overrides(self.callback, hook) for hook in _TRAIN_BATCH_HOOKS) else None


def _overrides(callback: keras.callbacks.Callback, hook: str) -> bool:
    # A hook set on the object itself (LambdaCallback) need not be a method.
    function = getattr(getattr(callback, hook), "__func__", None)
    return function is not getattr(keras.callbacks.Callback, hook)
