"""Whether the runs of a case did equal work, and whether they learnt: what is to be marked in every table.

Work is equal where initial weights, global batch, optimizer, its steps, the examples of an epoch and, under strategies
that compute what one device computes, the loss agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tfdist import strategies
from tfdist.run.schema import RunRecord
from tfdist.study.plan import SYNTHETIC
from tfdist.study.runs import Run
from tfdist.terminal import counted

# Of the training loss of the last epoch, relative. Roundings stay below it; other masks of dropout do not always.
LOSS_TOLERANCE = 0.01
# A loss that falls by less than this part over all epochs is taken for one that does not fall.
LEAST_FALL = 0.01


def _steps_an_epoch(record: RunRecord) -> float | None:
    if record.optimizer_steps is None or not record.epochs:
        return None
    return record.optimizer_steps / len(record.epochs)


# What runs of equal work have alike; `None` where a run does not say.
FACTS: dict[str, Callable[[RunRecord], Any]] = {
    "initial weights": lambda record: record.initial_weights,
    "global batch": lambda record: record.global_batch_size,
    "optimizer": lambda record: (record.optimizer, record.learning_rate),
    "dtype policy": lambda record: record.dtype_policy,
    "parameters": lambda record: record.model.parameters,
    "training examples": lambda record: record.dataset.examples.get("train"),
    "steps of an epoch": _steps_an_epoch,
}


def unequal(run: Run, base: Run) -> list[str]:
    """What is not equal in the work of `run` and `base`, both of a case and with a seed, as short phrases."""
    if run.record is None or base.record is None:
        return []
    found = []
    for name, fact in FACTS.items():
        mine, other = fact(run.record), fact(base.record)
        if mine is not None and other is not None and mine != other:
            found.append(f"{name}: {shown(mine)} instead of {shown(other)}")
    other_data = run.cell.case.input != base.cell.case.input
    if not other_data and not any(strategies.traits(one.cell.strategy).asynchronous for one in (run, base)):
        found += _loss(run, base)
    return found


def learnt(run: Run) -> str:
    """Why it did not learn; "" if it did, if a single epoch does not tell, or if there was nothing to learn from."""
    if run.cell.case.input == SYNTHETIC:
        return ""
    losses = [epoch.metrics.get("loss") for epoch in run.epochs]
    if any(loss is None for loss in losses):
        return "its loss is not finite"
    if len(losses) > 1 and losses[0] and losses[-1] > losses[0] * (1 - LEAST_FALL):  # type: ignore[operator]
        return f"its training loss went from {losses[0]:.3g} to {losses[-1]:.3g}"
    return ""


def marks(runs: Sequence[Run], base: Sequence[Run]) -> list[str]:
    """What is to be said of the runs of a cell, beside those of the cell that it is compared with.

    Each thing is said once, as it is in the first round that it is true of.
    """
    of_round = {run.occasion: run for run in base}
    found: dict[str, list[str]] = {}
    for run in runs:
        other = of_round.get(run.occasion)
        for phrase in [] if other is None else unequal(run, other):
            found.setdefault(phrase.partition(":")[0], []).append(f"unequal {phrase}")
        if not run.error and (reason := learnt(run)):
            found.setdefault("learnt", []).append(f"did not learn: {reason}")
    return [_once(phrases) for phrases in found.values()]


def _once(phrases: Sequence[str]) -> str:
    """The first of them, and how many others there are."""
    others = len(phrases) - 1
    return f"{phrases[0]} (and so in {counted(others, 'other run')})" if others else phrases[0]


def _loss(run: Run, base: Run) -> list[str]:
    """The loss of the last epoch that both have."""
    both = list(zip(run.epochs, base.epochs, strict=False))
    mine, other = (epoch.metrics.get("loss") for epoch in both[-1]) if both else (None, None)
    if mine is None or other is None or abs(mine - other) <= LOSS_TOLERANCE * abs(other):
        return []
    return [f"loss of epoch {len(both)}: {mine:.4g} instead of {other:.4g}, more than roundings explain"]


def shown(value: Any) -> str:
    """A value of `FACTS`, as text; "" for one that is not known."""
    if value is None:
        return ""
    if isinstance(value, tuple):
        return " ".join(map(shown, value))
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
