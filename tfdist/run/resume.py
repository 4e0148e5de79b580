"""Checks that the options of a resumed run fit the earlier run, and combines their commands."""

from __future__ import annotations

from collections.abc import Mapping

from tfdist import terminal
from tfdist.errors import UsageError
from tfdist.run.config import TrainConfig
from tfdist.run.schema import RunRecord


def continued(before: list[str], now: list[str]) -> list[str]:
    """The command of a resumed run: `now`, preceded by `before` unless `now` is complete."""
    complete = any(argument == "--strategy" or argument.startswith("--strategy=") for argument in now)
    return now if complete else [*before, *now[2:]]


def refuse_other_run(config: TrainConfig, earlier: RunRecord) -> None:
    """Raises `UsageError` unless the resumed run has the same model and the same examples in the same order."""
    now_options = {name: str(value) for name, value in config.load_options.items()}
    before_options = earlier.dataset.options
    names = sorted(before_options | now_options)
    settings = [
        ("--dataset", earlier.dataset.name, config.dataset),
        *(("--data-option", _setting(name, before_options), _setting(name, now_options)) for name in names),
        ("--augment", earlier.dataset.augment, config.augment),
        ("--input", earlier.dataset.input, config.input),
        ("--model", earlier.model.name, config.model),
        ("--batch-size", earlier.global_batch_size, config.batch_size),
        ("--seed", earlier.seed, config.seed),
    ]
    for option, before, now in settings:
        if before != now:
            raise UsageError(
                f"The run in `{config.run_dir}` was started with `{option} {before}`, and it is resumed with "
                f"`{option} {now}`",
                f"use `{option} {before}`, or start a new run in another `--run-dir`",
            )


def about(config: TrainConfig, earlier: RunRecord) -> str | None:
    """Returns a warning if no epoch is left to train, or if the learning rate schedule has changed; else `None`."""
    done, before, now = len(earlier.epochs), earlier.planned_epochs, config.epochs
    if done >= now:
        trained = terminal.counted(done, "epoch")
        return f"The run has trained {trained} already, and `--epochs` is {now}: the model is only evaluated"
    if config.schedule == "constant" or before in (None, now):
        return None
    return (
        f"The run was started with `--epochs {before}`, and it is resumed with `--epochs {now}`: "
        f"`--schedule {config.schedule}` now ends after epoch {now}, and the learning rates of the earlier epochs "
        f"differ from those of a run that was started with `--epochs {now}`"
    )


def _setting(name: str, options: Mapping[str, str]) -> str:
    return f"{name}={options[name]}" if name in options else f"{name} unset"
