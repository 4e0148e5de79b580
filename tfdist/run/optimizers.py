"""Builds the optimizer of a run: the requested optimizer, else the model's usual optimizer, else Adam."""

from __future__ import annotations

from typing import Any

import keras

from tfdist import models
from tfdist.errors import UsageError
from tfdist.run.config import TrainConfig


def settings(config: TrainConfig) -> dict[str, Any]:
    """Returns the optimizer's name under "optimizer", and its arguments.

    The model's settings apply only to its usual optimizer; another requested optimizer has its own defaults.
    """
    defaults = {"optimizer": "adam"} | models.training(config.model)
    if config.optimizer not in (None, defaults["optimizer"]):
        defaults = {"optimizer": config.optimizer}
    requested = {name: getattr(config, name) for name in ("learning_rate", "momentum", "weight_decay")}
    return defaults | {name: value for name, value in requested.items() if value is not None}


def make(config: TrainConfig, steps_per_epoch: int | None) -> keras.optimizers.Optimizer:
    """Builds the optimizer of a run.

    Args:
        config: the options of the run.
        steps_per_epoch: batches per epoch, for a schedule; `None` if unknown.

    Raises:
        UsageError: the optimizer does not have a setting, or a schedule needs an unknown number of steps.
    """
    # `keras.optimizers.get` does not accept the names of all optimizers.
    classes = {name.lower(): value for name, value in vars(keras.optimizers).items() if isinstance(value, type)}
    options = settings(config)
    name = options.pop("optimizer")
    if config.gradient_accumulation > 1:
        options["gradient_accumulation_steps"] = config.gradient_accumulation
    try:
        optimizer = classes[name](**options)
    except (TypeError, ValueError) as error:
        values = ", ".join(f"`{option}` {value}" for option, value in options.items())
        raise UsageError(f"The optimizer `{name}` cannot have {values}: {error}", "leave it out") from error
    if config.schedule != "constant" or config.warmup_epochs:
        optimizer.learning_rate = _schedule(config, float(optimizer.learning_rate.numpy()), steps_per_epoch)
    return optimizer


def _schedule(config: TrainConfig, learning_rate: float, steps_per_epoch: int | None) -> Any:
    if steps_per_epoch is None:
        option = "--warmup-epochs" if config.schedule == "constant" else f"--schedule {config.schedule}"
        raise UsageError(
            f"`{option}` depends on the number of steps, which is unknown for the dataset `{config.dataset}`",
            "leave it out",
        )
    updates_per_epoch = steps_per_epoch / config.gradient_accumulation
    warmup = round(config.warmup_epochs * updates_per_epoch)
    decay = max(1, round(config.epochs * updates_per_epoch) - warmup)
    return keras.optimizers.schedules.CosineDecay(
        0.0 if warmup else learning_rate,
        decay,
        alpha=0.0 if config.schedule == "cosine" else 1.0,
        warmup_target=learning_rate if warmup else None,
        warmup_steps=warmup,
    )
