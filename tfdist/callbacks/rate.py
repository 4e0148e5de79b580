"""The learning rate of an optimizer, for the callbacks that set it."""

from __future__ import annotations

from typing import Any

import keras

from tfdist.errors import UsageError
from tfdist.internals import keras as keras_internals


def current(optimizer: Any) -> float:
    """The rate of the next step."""
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))


def refuse_schedule(optimizer: Any, callback: str) -> None:
    """Raises `UsageError` if `callback` cannot set the rate because the optimizer follows a schedule."""
    rate = keras_internals.learning_rate(getattr(optimizer, "inner_optimizer", optimizer))
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        raise UsageError(
            f"{callback} cannot set the learning rate: the optimizer follows a schedule, `{type(rate).__name__}`",
            "compile the optimizer with a number, or build the warm-up into the schedule "
            "(`keras.optimizers.schedules.CosineDecay` has `warmup_target` and `warmup_steps`)",
        )
