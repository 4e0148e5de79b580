"""The optimizer of a run: the requested one, else the usual one of the model, else Keras' Adam."""

from __future__ import annotations

from typing import Any

import keras

from tfdist import models
from tfdist.errors import UsageError
from tfdist.run.config import TrainConfig


def settings(config: TrainConfig) -> dict[str, Any]:
    """The optimizer's name as "optimizer", and its arguments.

    The model's settings are for its usual optimizer; if another optimizer is requested, its own defaults count.
    """
    found = {"optimizer": "adam"} | models.training(config.model)
    if config.optimizer not in (None, found["optimizer"]):
        found = {"optimizer": config.optimizer}
    asked = {name: getattr(config, name) for name in ("learning_rate", "momentum", "weight_decay")}
    return found | {name: value for name, value in asked.items() if value is not None}


def make(config: TrainConfig, steps_per_epoch: int | None) -> keras.optimizers.Optimizer:
    """The optimizer of a run.

    Args:
        config: the run.
        steps_per_epoch: batches per epoch, for a schedule; `None` if unknown.

    Raises:
        UsageError: a setting that this optimizer does not have, or a schedule over an unknown number of steps.
    """
    # `keras.optimizers.get` does not know all of them by name.
    classes = {name.lower(): value for name, value in vars(keras.optimizers).items() if isinstance(value, type)}
    options = settings(config)
    name = options.pop("optimizer")
    if config.gradient_accumulation > 1:
        options["gradient_accumulation_steps"] = config.gradient_accumulation
    try:
        optimizer = classes[name](**options)
    except (TypeError, ValueError) as error:
        raise UsageError(f"The optimizer `{name}` cannot have {_named(options)}: {error}", "leave it out") from error
    if config.schedule != "constant" or config.warmup_epochs:
        optimizer.learning_rate = _schedule(config, float(optimizer.learning_rate.numpy()), steps_per_epoch)
    return optimizer


def _schedule(config: TrainConfig, learning_rate: float, steps_per_epoch: int | None) -> Any:
    if steps_per_epoch is None:
        option = "--warmup-epochs" if config.schedule == "constant" else f"--schedule {config.schedule}"
        raise UsageError(
            f"`{option}` counts steps, and the dataset `{config.dataset}` does not say how many there are",
            "leave it out",
        )
    updates_per_epoch = steps_per_epoch / config.gradient_accumulation
    warmup = round(config.warmup_epochs * updates_per_epoch)
    whole = max(1, round(config.epochs * updates_per_epoch) - warmup)
    return keras.optimizers.schedules.CosineDecay(
        0.0 if warmup else learning_rate,
        whole,
        alpha=0.0 if config.schedule == "cosine" else 1.0,
        warmup_target=learning_rate if warmup else None,
        warmup_steps=warmup,
    )


def _named(options: dict[str, Any]) -> str:
    return ", ".join(f"`{name}` {value}" for name, value in options.items())
