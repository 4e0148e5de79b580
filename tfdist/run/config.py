"""The options of a training run: a frozen dataclass, checked before anything slow is imported.

Synopsis:

    >>> TrainConfig(strategy="mirrored", model="cnn", dataset="digits", devices=2).batch_size
    32
    >>> parse_devices("2"), parse_devices("GPU:0,GPU:1"), parse_range("10:20")
    (2, ('GPU:0', 'GPU:1'), (10, 20))
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfdist import data, extras, models, registry, strategies
from tfdist.data.input import augmentation as augmentations
from tfdist.data.input import bad_examples
from tfdist.errors import UnknownNameError, UsageError
from tfdist.interface.strategy_options import SET_BY_THE_COMMAND

# The class names of Keras' optimizers in lower case; a test compares them with Keras.
OPTIMIZERS = (
    *("adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "ftrl", "lamb", "lion", "muon", "nadam"),
    *("rmsprop", "schedulefreeadamw", "sgd"),
)
SCHEDULES = ("constant", "cosine")
# The input of training steps: read by the dataset; read once and cached in memory; one repeated batch.
INPUTS = ("real", "cached", "synthetic")
DTYPE_POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")
# The trackers, with the extra that each needs.
EXTRAS_OF_TRACKERS = {"mlflow": "mlflow", "wandb": "wandb", "tensorboard": "profile"}
# Options of strategies that are also options of the command, and the placeholders that `--help` shows for their values.
STRATEGY_FLAGS = {
    "communication": "NAME",
    "compression": "NAME",
    "shard": "NAME",
    "speeds": "3,1|auto",
    "staleness": "N",
    "shard_bytes": "N",
    "sync_every": "epoch|N",
    "timeline": "FILE",
    "timeout_seconds": "S",
    "callback_timeout_seconds": "S",
}


@dataclass(frozen=True)
class TrainConfig:
    """The options of `tfdist train`.

    Attributes:
        strategy: a name from `tfdist.strategies.names()`, or `module:Class`.
        model: a name from `tfdist.models.names()`, or `module:function`.
        dataset: a name from `tfdist.data.names()`, or `module:function`.
        epochs: passes over the training examples.
        batch_size: examples in a global batch, over all replicas.
        model_options: the options of the model, by name.
        strategy_options: the options of the strategy, by name.
        optimizer: one of `OPTIMIZERS`; by default the usual optimizer of the model.
        learning_rate: by default, with the model's usual optimizer, its usual rate, scaled from its reference batch to
            the batch of the run; with another optimizer the optimizer's default.
        momentum: by default the usual value of the model with its usual optimizer, else the optimizer's default.
        weight_decay: likewise; with `sgd` L2 regularization of the kernels, with others decoupled from the gradient.
        schedule: the learning rate schedule, one of `SCHEDULES`; "cosine" ends at 0 after the last epoch.
        warmup_epochs: the number of epochs, or fraction, over which the learning rate rises from 0; by default a tenth
            of the epochs, at most 5, if the usual learning rate of the model is scaled up to the batch, else 0.
        dtype_policy: one of `DTYPE_POLICIES`.
        gradient_accumulation: batches per update; their gradients are averaged.
        devices: number of devices, or their names; `None` is the strategy's default.
        seed: the seed of the initial weights, the order of the examples and the random layers.
        limit: number of training examples to use; `None` is all.
        data_dir: the folder of the dataset's files.
        data_options: the options of the dataset, by name.
        augment: one of `tfdist.data.input.augmentation.NAMES`.
        on_bad_example: one of `tfdist.data.input.bad_examples.POLICIES`; `None` is the dataset's default, "fail".
        input: the input of training, one of `INPUTS`; validation and test always read the dataset.
        run_dir: the run's folder; `None` creates a folder in `runs/`.
        resume: continue the run in `run_dir`.
        checkpoint_steps: steps between two checkpoints within an epoch; `None` saves only at its end.
        target_accuracy: validation accuracy at which to stop, 0 to 1.
        tensorboard: write TensorBoard logs.
        tracker: the tracker that the run is sent to, one of `EXTRAS_OF_TRACKERS`.
        profile: the first step to trace, and the step before which to stop.
        verify_steps: compare this number of steps with one device instead of training; `None` trains.
        quiet: show errors only.
        verbose: show TensorFlow's messages too.

    Raises:
        UsageError: a value is invalid.
    """

    strategy: str
    model: str
    dataset: str
    epochs: int = 5
    batch_size: int = 32
    learning_rate: float | None = None
    model_options: Mapping[str, Any] = field(default_factory=dict)
    strategy_options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    schedule: str = "constant"
    warmup_epochs: float | None = None
    dtype_policy: str = "float32"
    gradient_accumulation: int = 1
    devices: int | tuple[str, ...] | None = None
    seed: int = 0
    limit: int | None = None
    data_dir: Path | None = None
    data_options: Mapping[str, Any] = field(default_factory=dict)
    augment: str = "none"
    on_bad_example: str | None = None
    input: str = "real"
    run_dir: Path | None = None
    resume: bool = False
    checkpoint_steps: int | None = None
    target_accuracy: float | None = None
    tensorboard: bool = False
    tracker: str | None = None
    profile: tuple[int, int] | None = None
    verify_steps: int | None = None
    quiet: bool = False
    verbose: bool = False

    def __post_init__(self) -> None:
        if ":" not in self.strategy:
            registry.require_known(self.strategy, "strategy", strategies.names())
        _check_strategy_options(self)
        if ":" not in self.model:
            registry.require_known(self.model, "model", models.names())
        if ":" not in self.dataset:
            registry.require_known(self.dataset, "dataset", data.names())
        _known("dtype policy", self.dtype_policy, DTYPE_POLICIES)
        _check_data(self)
        for name in ("epochs", "batch_size", "gradient_accumulation", "limit", "checkpoint_steps", "verify_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"`{_option(name)}` is {value}", "use 1 or more")
        if not 0 <= self.seed < 2**32:
            raise UsageError(f"`--seed` is {self.seed}", "use a number from 0 to 4294967295")
        if self.target_accuracy is not None and not 0 < self.target_accuracy <= 1:
            hint = "use a number above 0, at most 1, such as 0.9"
            raise UsageError(f"`--target-accuracy` is {self.target_accuracy}", hint)
        require_run_to_resume(self.resume, self.run_dir)
        if self.resume and self.verify_steps is not None:
            raise UsageError(
                "`--verify-steps` and `--resume` are both set, but a verification starts from new weights",
                "leave one of them out",
            )
        if self.quiet and self.verbose:
            raise UsageError("`--quiet` and `--verbose` are both set", "use one of them")
        _check_optimizer(self)
        if self.profile is not None:
            extras.require("profile", "`--profile`")
        if self.tracker is not None:
            _known("tracker", self.tracker, tuple(EXTRAS_OF_TRACKERS))
            extras.require(EXTRAS_OF_TRACKERS[self.tracker], f"`--tracker {self.tracker}`")

    @property
    def traits(self) -> strategies.Traits:
        """The traits of the strategy."""
        return strategies.traits(self.strategy)

    @property
    def load_options(self) -> dict[str, Any]:
        """The options for `tfdist.data.load`."""
        policy = {} if self.on_bad_example is None else {"on_bad_example": self.on_bad_example}
        return dict(self.data_options) | policy


def require_run_to_resume(resume: Any, run_dir: Any) -> None:
    """Raises `UsageError` for `--resume` without `--run-dir`."""
    if resume and run_dir is None:
        raise UsageError("`--resume` needs `--run-dir`, which is not set", "name the run's folder with `--run-dir`")


def _check_data(config: TrainConfig) -> None:
    _known("augmentation", config.augment, augmentations.NAMES)
    _known("input", config.input, INPUTS)
    if config.on_bad_example is not None:
        _known("policy for bad examples", config.on_bad_example, bad_examples.POLICIES)
    if config.input == "cached" and config.augment == "resized_crop":
        raise UsageError(
            "`--input cached` and `--augment resized_crop` are both set, but the augmentation needs images of the "
            "original size, which are not cached in memory",
            "use another augmentation, or `--input real` with `--data-option cache=disk`",
        )


def with_flags(strategy: str, settings: Mapping[str, Any], flags: Mapping[str, str]) -> dict[str, Any]:
    """The options of a strategy: `settings` of `--strategy-option`, and those of `STRATEGY_FLAGS` that are set.

    Raises:
        UsageError: the strategy does not take an option that has a flag, or an option is set twice.
    """
    signature = strategies.signature(strategy)
    for name in flags:
        if signature.complete and name not in signature.options:
            hint = (
                f"give the class an argument `{name}`, or leave it out"
                if ":" in strategy
                else f"leave it out, or use one of {', '.join(f'`{other}`' for other in strategies.taking(name))}"
            )
            raise UsageError(f"`{_option(name)}` is set, but `{strategy}` does not take it", hint)
        if name in settings:
            raise UsageError(
                f"`{_option(name)}` and `--strategy-option {name}=...` are both set", "leave one of them out"
            )
    return {**settings, **flags}


def _check_strategy_options(config: TrainConfig) -> None:
    """Refuses an option that the strategy does not take, a value that it cannot have, and what the command sets."""
    for name in config.strategy_options:
        if name in ("devices", "seed"):
            raise UsageError(f"`--strategy-option` sets `{name}`, which the command sets", f"use `{_option(name)}`")
        if name == SET_BY_THE_COMMAND:
            raise UsageError("`--strategy-option` sets `job_settings`, which the command sets", "leave it out")
    strategies.signature(config.strategy).check(config.strategy, config.strategy_options)


def _check_optimizer(config: TrainConfig) -> None:
    if config.optimizer is not None:
        _known("optimizer", config.optimizer, OPTIMIZERS)
    _known("schedule", config.schedule, SCHEDULES)
    if config.learning_rate is not None and not 0 < config.learning_rate < math.inf:
        raise UsageError(f"`--learning-rate` is {config.learning_rate}", "use a number above 0, such as 0.001")
    if config.momentum is not None and not 0 <= config.momentum < 1:
        raise UsageError(f"`--momentum` is {config.momentum}", "use 0 or more, below 1")
    if config.weight_decay is not None and not 0 <= config.weight_decay < math.inf:
        raise UsageError(f"`--weight-decay` is {config.weight_decay}", "use 0 or more, such as 1e-4")
    if config.warmup_epochs is not None and not 0 <= config.warmup_epochs < config.epochs:
        raise UsageError(
            f"`--warmup-epochs` is {config.warmup_epochs:g} of {config.epochs} epochs", "use fewer than all of them"
        )


def parse_devices(text: str) -> int | tuple[str, ...]:
    """Parses `2` as a number of devices, and `GPU:0,GPU:1` as their names."""
    if text.strip().lstrip("-").isdigit():
        count = int(text)
        if count < 1:
            raise UsageError(f"`--devices` is {count}", "use 1 or more, or names such as `GPU:0,GPU:1`")
        return count
    return tuple(name.strip() for name in text.split(","))


def parse_range(text: str) -> tuple[int, int]:
    """Parses `FIRST:LAST` as two step numbers."""
    first, separator, last = text.partition(":")
    if not (separator and first.isdigit() and last.isdigit() and int(first) < int(last)):
        raise UsageError(
            f"`--profile` is `{text}`, which is not FIRST:LAST with FIRST below LAST",
            "write for example `--profile 10:20` to trace ten steps, starting with step 10",
        )
    return int(first), int(last)


def _known(kind: str, name: str, names: list[str] | tuple[str, ...]) -> None:
    if name not in names:
        raise UnknownNameError(kind, name, names)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
