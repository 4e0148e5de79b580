"""Whether the runs of a case did equal work, and whether they learned; tables mark those that did not.

Work is equal if initial weights, global batch, optimizer, steps and examples per epoch agree and, for strategies that
compute the same as one device, the loss. A strategy that averages weights or updates them asynchronously does other
work by design: an epoch of it is a different training, so that it is not called the fastest beside equal work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tfdist import strategies
from tfdist.run.schema import RunRecord
from tfdist.study.plan import SYNTHETIC
from tfdist.study.runs import Run
from tfdist.terminal import counted

# Relative, for the training loss of the last epoch. Rounding stays below it, but different dropout masks may not.
LOSS_TOLERANCE = 0.01
# A run has learned if its loss has decreased by at least this fraction over all epochs.
MIN_DECREASE = 0.01
BY_DESIGN = "other work by design"


def _steps_per_epoch(record: RunRecord) -> float | None:
    if record.optimizer_steps is None or not record.epochs:
        return None
    return record.optimizer_steps / len(record.epochs)


# The values that agree in runs of equal work; `None` if a run's record does not have the value.
FACTS: dict[str, Callable[[RunRecord], Any]] = {
    "initial weights": lambda record: record.initial_weights,
    "global batch": lambda record: record.global_batch_size,
    "optimizer": lambda record: (record.optimizer, record.learning_rate),
    "dtype policy": lambda record: record.dtype_policy,
    "parameters": lambda record: record.model.parameters,
    "training examples": lambda record: record.dataset.examples.get("train"),
    "steps per epoch": _steps_per_epoch,
}


def unequal(run: Run, base: Run) -> list[str]:
    """Returns the differences between the work of two runs of a case with the same seed, as short phrases."""
    if run.record is None or base.record is None:
        return []
    differences = []
    for name, fact in FACTS.items():
        value, expected = fact(run.record), fact(base.record)
        if value is not None and expected is not None and value != expected:
            differences.append(f"{name}: {formatted(value)} instead of {formatted(expected)}")
    same_input = run.cell.case.input == base.cell.case.input
    if same_input and not (is_other_by_design(run) or is_other_by_design(base)):
        differences += _loss_difference(run, base)
    return differences


def is_other_by_design(run: Run) -> bool:
    """Whether the steps of a run's strategy differ from those of one device by design."""
    as_one_device = None if run.record is None else run.record.strategy.as_one_device
    return strategies.traits(run.cell.strategy).asynchronous if as_one_device is None else not as_one_device


def no_learning(run: Run) -> str:
    """Returns why the run did not learn; "" if it did, or if a single epoch or synthetic input cannot show it."""
    if run.cell.case.input == SYNTHETIC:
        return ""
    losses = [epoch.metrics.get("loss") for epoch in run.epochs]
    if any(loss is None for loss in losses):
        return "its loss is not finite"
    if len(losses) > 1 and losses[0] and losses[-1] > losses[0] * (1 - MIN_DECREASE):  # type: ignore[operator]
        return f"its training loss went from {losses[0]:.3g} to {losses[-1]:.3g}"
    return ""


def marks(runs: Sequence[Run], base: Sequence[Run]) -> list[str]:
    """Returns what a report has to mark about the runs of a cell, compared with those of the base cell.

    Each kind of mark appears once, as it is in the first round to which it applies.
    """
    base_runs = {run.occasion: run for run in base}
    phrases_of: dict[str, list[str]] = {}
    for run in runs:
        base_run = base_runs.get(run.occasion)
        for phrase in [] if base_run is None else unequal(run, base_run):
            phrases_of.setdefault(phrase.partition(":")[0], []).append(f"unequal {phrase}")
        if base_run is not None and run.cell.strategy != base_run.cell.strategy and is_other_by_design(run):
            phrases_of.setdefault(BY_DESIGN, []).append(f"{BY_DESIGN}: its steps differ from those of one device")
        if not run.error and (reason := no_learning(run)):
            phrases_of.setdefault("learning", []).append(f"did not learn: {reason}")
    return [_first_phrase(phrases) for phrases in phrases_of.values()]


def _first_phrase(phrases: Sequence[str]) -> str:
    others = len(phrases) - 1
    return f"{phrases[0]} (similar in {counted(others, 'other run')})" if others else phrases[0]


def _loss_difference(run: Run, base: Run) -> list[str]:
    """The difference between the losses of the last epoch that both runs have, if it is too large."""
    epochs = list(zip(run.epochs, base.epochs, strict=False))
    loss, expected = (epoch.metrics.get("loss") for epoch in epochs[-1]) if epochs else (None, None)
    if loss is None or expected is None or abs(loss - expected) <= LOSS_TOLERANCE * abs(expected):
        return []
    return [f"loss of epoch {len(epochs)}: {loss:.4g} instead of {expected:.4g}, more than rounding explains"]


def formatted(value: Any) -> str:
    """Formats a value of `FACTS`; "" if it is unknown."""
    if value is None:
        return ""
    if isinstance(value, tuple):
        return " ".join(map(formatted, value))
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
