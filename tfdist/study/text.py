"""The report of a study in Markdown, whose tables the command shows too."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tfdist import strategies
from tfdist.study.results import Comparison, Row

MARK = "≠"  # before what is not equal work, or did not learn

# The columns of the table: a heading, and the text of a row; a column that no row has anything for is left out.
_COLUMNS: dict[str, Callable[[Row], str]] = {
    "strategy": lambda row: f"{MARK} {row.cell.name}" if row.marks else row.cell.name,
    "times as fast": lambda row: "1 (base)" if row.is_base else "" if row.speed is None else row.speed.text,
    "examples/s": lambda row: number(row.examples_per_second),
    "epoch, s": lambda row: seconds(row.epoch_seconds),
    "warm-up, s": lambda row: seconds(row.warm_up_seconds),
    "evaluation, s": lambda row: seconds(row.evaluation_seconds),
    "start-up, s": lambda row: seconds(row.startup_seconds),
    "reached target": lambda row: row.reached,
    "s to target": lambda row: seconds(row.seconds_to_target),
    "training s to target": lambda row: seconds(row.training_seconds_to_target),
    "epochs to target": lambda row: number(row.epochs_to_target),
    "loss": lambda row: number(row.loss),
    "validation accuracy": lambda row: "" if row.accuracy is None else f"{row.accuracy:.4f}",
    "strong scaling": lambda row: percent(row.strong_efficiency),
    "weak scaling": lambda row: percent(row.weak_efficiency),
    "peak memory of a process, MiB": lambda row: mebibytes(max(row.peak_memory_bytes, default=None)),
    "GPU memory, MiB": lambda row: mebibytes(row.peak_gpu_memory_bytes),
    "processor s": lambda row: seconds(row.cpu_seconds),
    "sent a step, KiB": lambda row: "" if (sent := row.network_bytes_a_step) is None else f"{sent / 2**10:,.0f}",
    "step: compute, communication, input, waiting": lambda row: " ".join(map(percent, row.breakdown.values())),
    "staleness": lambda row: number(row.staleness),
    "price": lambda row: "" if row.price is None else f"{row.price:.4g}",
    "runs": lambda row: f"{len(row.good)} of {len(row.runs)}" if len(row.good) < len(row.runs) else f"{len(row.runs)}",
}


def answer(comparison: Comparison) -> str:
    """What came out, in one sentence."""
    fastest, base, title = comparison.fastest, comparison.base, comparison.case.title
    if fastest is None:
        return f"{title}: no run did equal work and ended well, so that nothing can be said."
    if fastest.is_base:
        return f"{title}: nothing is faster than `{base.cell.name}`."
    if fastest.speed is None or not fastest.speed.is_difference:
        return f"{title}: no strategy is faster than `{base.cell.name}` by more than the runs differ among themselves."
    said = f"{title}: `{fastest.cell.name}` is fastest, {fastest.speed.text} times as fast as `{base.cell.name}`."
    asynchronous = strategies.traits(fastest.cell.strategy).asynchronous
    return f"{said} Its steps are not those of one device, by design: compare losses too." if asynchronous else said


def table(comparison: Comparison) -> str:
    """The figures of a case, as a table of Markdown."""
    cells = {name: [text(row).replace("|", "\\|") for row in comparison.rows] for name, text in _COLUMNS.items()}
    there = {name: column for name, column in cells.items() if any(column)}
    rows = [list(there), ["---"] * len(there), *(list(row) for row in zip(*there.values(), strict=True))]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def notes(comparison: Comparison) -> list[str]:
    """What is unequal, what did not learn, and what failed, a line for each."""
    found = [f"{MARK} `{row.cell.name}`: {mark}" for row in comparison.rows for mark in row.marks]
    for row in comparison.rows:
        failed = [run for run in row.runs if run.error]
        if failed:
            found.append(f"`{row.cell.name}` failed in {len(failed)} of {len(row.runs)} runs: {failed[-1].cause}")
    return found


def report(comparisons: Sequence[Comparison]) -> str:
    """The whole report."""
    parts = ["# Comparison of strategies"]
    for one in comparisons:
        parts += [f"## {one.case.title}", answer(one), table(one)]
        parts += ["\n".join(f"- {note}" for note in notes(one))] if notes(one) else []
        parts += [_conditions(one)]
    return "\n\n".join(parts) + "\n"


def _conditions(comparison: Comparison) -> str:
    """Machines, versions and commands."""
    lines = ["### Machines, versions, commands", ""]
    records = [run.record for row in comparison.rows for run in row.runs if run.record is not None]
    machines = dict.fromkeys(
        f"{one.machine.cpu}, {one.machine.cores} cores, {one.machine.memory_bytes / 2**30:.0f} GiB, "
        f"{', '.join(one.machine.gpus) or 'no GPU'}; Python {one.versions.python}, tfdist {one.versions.tfdist}, "
        f"TensorFlow {one.versions.tensorflow}, Keras {one.versions.keras}"
        for one in records
    )
    lines += [f"- {machine}" for machine in machines]
    for row in comparison.rows:
        run = row.runs[0]
        command = " ".join(run.measured.command if run.measured else run.record.typed[:1] if run.record else [])
        lines.append(f"- {row.cell.name}: `{command}`")
    return "\n".join(lines)


def number(value: float | None) -> str:
    """Three digits or more."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def seconds(value: float | None) -> str:
    """Two decimals, or three digits."""
    return "" if value is None else f"{value:.2f}" if value >= 1 else f"{value:.3g}"


def percent(value: float | None) -> str:
    """A share."""
    return "" if value is None else f"{value:.0%}"


def mebibytes(value: float | None) -> str:
    """A number of bytes."""
    return "" if value is None else f"{value / 2**20:,.0f}"
