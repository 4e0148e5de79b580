"""Compiles the model of a run: the requested optimizer, else the model's usual optimizer, else Adam.

The usual learning rate of a model is scaled to the batch of the run (`tfdist.models._training`). If the batch is larger
than the model's reference batch, the rate rises from 0 at the start: large steps along the gradients of new weights
diverge (P. Goyal and others, arXiv 1706.02677, section 2.2).

Synopsis:

    >>> config = TrainConfig(strategy="single", model="resnet20", dataset="digits", batch_size=64)
    >>> settings(config)
    {'optimizer': 'sgd', 'learning_rate': 0.05, 'momentum': 0.9, 'weight_decay': 0.0001}
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import keras

from tfdist import models, tasks
from tfdist.data.spec import DataSpec
from tfdist.errors import UsageError
from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_variables
from tfdist.run.config import TrainConfig

# Goyal and others train 90 epochs and warm up in the first 5; a shorter run warms up in its first tenth.
WARMUP_EPOCHS, WARMUP_SHARE = 5.0, 0.1
# The weights that are decayed (not biases, normalizations and embeddings), and the attributes of layers that regularize
# them.
_REGULARIZERS = {
    "kernel": ("kernel_regularizer", "depthwise_regularizer"),
    "recurrent_kernel": ("recurrent_regularizer",),
    "depthwise_kernel": ("depthwise_regularizer",),
    "pointwise_kernel": ("pointwise_regularizer",),
}


def settings(config: TrainConfig) -> dict[str, Any]:
    """Returns the optimizer's name under "optimizer", and its arguments.

    The model's settings apply only to its usual optimizer; another requested optimizer has its own defaults.
    """
    usual = _usual(config)
    defaults: dict[str, Any] = {"optimizer": config.optimizer or "adam"}
    if usual is not None:
        defaults = {
            "optimizer": usual.optimizer,
            "learning_rate": usual.rate(_batch_size(config)),
            "momentum": usual.momentum,
            "weight_decay": usual.weight_decay,
            "beta_1": usual.beta_1,
        }
    requested = {name: getattr(config, name) for name in ("learning_rate", "momentum", "weight_decay")}
    values = defaults | {name: value for name, value in requested.items() if value is not None}
    return {name: value for name, value in values.items() if value is not None}


def warmup_epochs(config: TrainConfig, steps_per_epoch: int | None) -> float:
    """The epochs in which the learning rate rises from 0: as requested, else by the size of the batch.

    Without a known number of steps there is no usual warm-up; one that is requested is refused later.
    """
    if config.warmup_epochs is not None:
        return config.warmup_epochs
    usual = _usual(config)
    if usual is None or config.learning_rate is not None or _batch_size(config) <= usual.batch_size:
        return 0.0
    return 0.0 if steps_per_epoch is None else min(WARMUP_EPOCHS, WARMUP_SHARE * config.epochs)


def scaling(config: TrainConfig, steps_per_epoch: int | None) -> str | None:
    """A sentence about the scaled learning rate; `None` if the rate was set, or is that of the reference batch."""
    usual, size = _usual(config), _batch_size(config)
    if usual is None or config.learning_rate is not None or size == usual.batch_size:
        return None
    epochs = warmup_epochs(config, steps_per_epoch)
    rises = f"; it rises from 0 in the first {epochs:g} {'epoch' if epochs == 1 else 'epochs'}" if epochs else ""
    return (
        f"The learning rate is {usual.rate(size):.3g}: {usual.learning_rate:g}, the usual rate of `{config.model}` for "
        f"{usual.batch_size} examples per update, scaled to {size}{rises}."
    )


def compile(model: keras.Model, spec: DataSpec, config: TrainConfig, steps_per_epoch: int | None) -> None:
    """Compiles `model` with the loss and metrics of its task and the optimizer of the run.

    Weight decay with SGD is L2 regularization: half the factor times the sum of squares of the kernels is added to the
    loss, so that the decay passes through the momentum as in the papers. Keras' SGD bypasses the momentum, which makes
    the decay weaker by the factor 1 / (1 - momentum).

    Args:
        model: a built model that is not compiled.
        spec: the spec of the dataset.
        config: the options of the run.
        steps_per_epoch: batches per epoch, for a schedule; `None` if unknown.

    Raises:
        UsageError: the optimizer does not have a setting, or a schedule needs an unknown number of steps.
    """
    options = settings(config)
    if options["optimizer"] == "sgd":
        _regularize(model, options.pop("weight_decay", 0.0))
    tasks.compile(model, spec, _optimizer(options, config, steps_per_epoch))


@contextlib.contextmanager
def compiled_without_memory(
    strategy: Any, config: TrainConfig, spec: DataSpec, steps_per_epoch: int | None, options: Mapping[str, Any]
) -> Iterator[keras.Model]:
    """The compiled model of a run whose variables have no memory, within this context, for tracing its steps.

    Args:
        strategy: a strategy with one replica.
        config: the options of the run.
        spec: the spec of its dataset.
        steps_per_epoch: the number of steps of an epoch; `None` if it is unknown.
        options: the options of the model.
    """
    with keras_variables.without_memory(), strategy.scope():
        model = models.build(config.model, spec, **options)
        if not model.compiled:
            compile(model, spec, config, steps_per_epoch)
        yield model


def _optimizer(options: dict[str, Any], config: TrainConfig, steps_per_epoch: int | None) -> keras.optimizers.Optimizer:
    # `keras.optimizers.get` does not accept the names of all optimizers.
    classes = {name.lower(): value for name, value in vars(keras.optimizers).items() if isinstance(value, type)}
    name = options.pop("optimizer")
    if config.gradient_accumulation > 1:
        options["gradient_accumulation_steps"] = config.gradient_accumulation
    try:
        optimizer = classes[name](**options)
    except (TypeError, ValueError) as error:
        values = ", ".join(f"`{option}` {value}" for option, value in options.items())
        raise UsageError(f"The optimizer `{name}` cannot have {values}: {error}", "leave it out") from error
    if config.schedule != "constant" or warmup_epochs(config, steps_per_epoch):
        optimizer.learning_rate = _schedule(config, float(optimizer.learning_rate.numpy()), steps_per_epoch)
    return optimizer


def _regularize(model: keras.Model, weight_decay: float) -> None:
    """Adds L2 regularization to the kernels of `model` that have none, and to the configs of their layers."""
    regularizer = keras.regularizers.L2(weight_decay / 2)
    for layer in keras_internals.all_layers(model) if weight_decay else ():
        for name, attributes in _REGULARIZERS.items():
            kernel = getattr(layer, name, None)
            if isinstance(kernel, keras.Variable) and kernel.trainable and kernel.regularizer is None:
                kernel.regularizer = regularizer
                for attribute in filter(layer.__dict__.__contains__, attributes):
                    setattr(layer, attribute, regularizer)


def _usual(config: TrainConfig) -> models.Training | None:
    """The model's usual training, if the run uses its optimizer."""
    usual = models.training(config.model)
    return usual if usual is not None and config.optimizer in (None, usual.optimizer) else None


def _batch_size(config: TrainConfig) -> int:
    """Examples per update."""
    return config.batch_size * config.gradient_accumulation


def _schedule(config: TrainConfig, learning_rate: float, steps_per_epoch: int | None) -> Any:
    if steps_per_epoch is None:
        option = "--warmup-epochs" if config.schedule == "constant" else f"--schedule {config.schedule}"
        raise UsageError(
            f"`{option}` depends on the number of steps, which is unknown for the dataset `{config.dataset}`",
            "leave it out",
        )
    updates_per_epoch = steps_per_epoch / config.gradient_accumulation
    warmup = round(warmup_epochs(config, steps_per_epoch) * updates_per_epoch)
    decay = max(1, round(config.epochs * updates_per_epoch) - warmup)
    return keras.optimizers.schedules.CosineDecay(
        0.0 if warmup else learning_rate,
        decay,
        alpha=0.0 if config.schedule == "cosine" else 1.0,
        warmup_target=learning_rate if warmup else None,
        warmup_steps=warmup,
    )
