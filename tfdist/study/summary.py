"""The results in sentences and tables, for the page and the terminal, and the report in Markdown.

Sentences and tables have names in backticks. They are not escaped, although names may come from users: the caller has
to escape them.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tfdist.study import doubts, ratios, work
from tfdist.study.plan import REAL
from tfdist.study.results import Comparison, Row
from tfdist.study.runs import Run
from tfdist.study.verdicts import Verdict
from tfdist.study.verdicts import of as verdicts_of
from tfdist.terminal import counted

MARK = "≠"  # precedes rows with unequal work or without learning


@dataclass(frozen=True)
class Table:
    """Headings and rows; the first column has the name of the row."""

    headings: list[str]
    rows: list[list[str]]


def marked_name(row: Row) -> str:
    """Returns the name of a row's cell, with the mark if its work is not equal or it did not learn."""
    return f"{MARK} {row.cell.name}" if row.marks else row.cell.name


Columns = dict[str, Callable[[Row], str]]  # the text for a row, by heading; empty columns are left out

_SPEED: Columns = {
    "times as fast": lambda row: "1 (base)" if row.is_base else "" if row.speed is None else row.speed.text,
    "examples/s": lambda row: number(row.examples_per_second),
    "epoch, s": lambda row: seconds(row.epoch_seconds),
    "warm-up, s": lambda row: seconds(row.warm_up_seconds),
    "evaluation, s": lambda row: seconds(row.evaluation_seconds),
    "start-up, s": lambda row: seconds(row.startup_seconds),
    "strong scaling": lambda row: percent(row.strong_efficiency),
    "weak scaling": lambda row: percent(row.weak_efficiency),
    "runs": lambda row: f"{len(row.good)} of {len(row.runs)}" if len(row.good) < len(row.runs) else f"{len(row.runs)}",
}
_LEARNING: Columns = {
    "loss": lambda row: number(row.loss),
    "validation accuracy": lambda row: "" if row.accuracy is None else f"{row.accuracy:.4f}",
    "staleness": lambda row: number(row.staleness),
    "reached target": lambda row: row.reached,
    "s to target": lambda row: seconds(row.seconds_to_target),
    "training s to target": lambda row: seconds(row.training_seconds_to_target),
    "epochs to target": lambda row: number(row.epochs_to_target),
    "price": lambda row: "" if row.price is None else f"{row.price:.4g}",
}
_RESOURCES: Columns = {
    "peak memory of a process, MiB": lambda row: mebibytes(max(row.peak_memory_bytes, default=None)),
    "GPU memory, MiB": lambda row: mebibytes(row.peak_gpu_memory_bytes),
    "GPU memory in use, MiB": lambda row: mebibytes(row.gpu_memory_in_use_bytes),
    "GPUs busy": lambda row: "" if row.gpus_busy is None else f"{row.gpus_busy:.2f}",
    "GFLOPs per step": lambda row: "" if row.flops_per_step is None else f"{row.flops_per_step / 1e9:.3g}",
    "MFU": lambda row: percent(row.mfu),
    "CPU time, s": lambda row: seconds(row.cpu_seconds),
    "sent per step, KiB": lambda row: "" if (sent := row.network_bytes_per_step) is None else f"{sent / 2**10:,.0f}",
    "step: compute, communication, input, waiting": lambda row: " ".join(map(percent, row.breakdown.values())),
}
# Each group fits on a page as a table.
_GROUPS = {"Speed": _SPEED, "Learning": _LEARNING, "Resources": _RESOURCES}


def headline(comparisons: Sequence[Comparison]) -> str:
    """Returns the result of all cases in a sentence; cases with other than real input count only if all are such."""
    comparisons = [comparison for comparison in comparisons if comparison.case.input == REAL] or comparisons
    if len(comparisons) == 1:
        return answer(comparisons[0])
    winners = [comparison.fastest for comparison in comparisons if comparison.fastest is not None]
    if not winners:
        return f"In none of {len(comparisons)} cases is a strategy known to be the fastest."
    wins = Counter(row.cell.name for row in winners).most_common()
    parts = [f"{_code(name)} is fastest in {count}" for name, count in wins]
    undecided = len(comparisons) - len(winners)
    if undecided:
        parts.append(f"in {undecided} no strategy is known to be")
    return f"Of {len(comparisons)} cases, {', '.join(parts)}.{_by_design(comparisons)}"


def answer(comparison: Comparison) -> str:
    """Returns the result of a case in a sentence; it names only what the intervals show."""
    title, base = comparison.case.title, _code(comparison.base.cell.name)
    other = _by_design([comparison])
    if comparison.leader is None:
        return f"{title}: no conclusion, because no run did equal work and ended well."
    if not comparison.faster:
        return f"{title}: {_none_faster(comparison, base)}.{other}"
    first = comparison.faster[0]
    times = f"{first.speed.text} times as fast as {base}" if first.speed is not None else ""
    if comparison.fastest is not None:
        return f"{title}: {_code(first.cell.name)} is fastest, {times}.{other}"
    text = f"{title}: {_code(first.cell.name)} is {times}"
    rivals = [row for row in comparison.rows if row.cell in comparison.leads]
    open_ = [_code(row.cell.name) for row in rivals if not comparison.leads[row.cell].is_difference]
    if open_:
        text += f"; the runs do not show a difference between it and {' and '.join(open_)}"
    return f"{text}.{other}"


def _none_faster(comparison: Comparison, base: str) -> str:
    if len(comparison.rows) == 1:
        return f"there is nothing to compare with {base}"
    speeds = [row.speed for row in comparison.rows if row.speed is not None and not row.marks]
    if not speeds:
        return f"no other strategy did equal work and ended well, to compare with {base}"
    if all(speed.is_difference for speed in speeds):  # and slower
        return f"nothing is faster than {base}"
    if all(speed.is_settled for speed in speeds):
        return f"nothing is faster than {base} by more than {ratios.RESOLUTION - 1:.0%}"
    return f"no difference from {base} is certain enough to name a fastest strategy"


def _by_design(comparisons: Iterable[Comparison]) -> str:
    """A sentence about the rows whose strategy does not compute the same as one device."""
    rows = (row for comparison in comparisons for row in comparison.rows)
    names = [row.cell.name for row in rows if any(mark.startswith(work.BY_DESIGN) for mark in row.marks)]
    if not names:
        return ""
    does, are = ("does", "is") if len(set(names)) == 1 else ("do", "are")
    return f" By design, {_listed(names)} {does} other work than one device, and {are} not ranked: compare losses too."


def _listed(names: Iterable[str]) -> str:
    return " and ".join(map(_code, dict.fromkeys(names)))


def figures(comparison: Comparison) -> Table:
    """Returns the figures of a case."""
    return _table(comparison, {name: text for columns in _GROUPS.values() for name, text in columns.items()})


def speeds(comparison: Comparison) -> Table:
    """Returns how many times as fast each strategy is, with the intervals, and the times of an epoch."""
    shown = ("times as fast", "epoch, s", "warm-up, s", "runs")
    return _table(comparison, {name: _SPEED[name] for name in shown})


def figures_by_group(comparison: Comparison) -> dict[str, Table]:
    """Returns the figures of a case as several tables, by their titles."""
    tables = {title: _table(comparison, columns) for title, columns in _GROUPS.items()}
    return {title: table for title, table in tables.items() if len(table.headings) > 1}


def _table(comparison: Comparison, columns: Columns) -> Table:
    columns = {"strategy": marked_name, **columns}
    texts = {name: [text(row) for row in comparison.rows] for name, text in columns.items()}
    return _without_empty_columns(list(texts), list(zip(*texts.values(), strict=True)))


def bounds(verdicts: Sequence[Verdict]) -> Table:
    """Returns what bounds the training, with a row for each verdict."""
    kinds = ("input", "compute", "communication", "waiting")
    rows = []
    for verdict in verdicts:
        name = f"{verdict.cell.name}, {verdict.cell.case.title}"
        row = [
            f"{MARK} {name}" if verdict.unequal else name,
            {"waiting": "waiting (latency)", "": "not known"}.get(verdict.bound, verdict.bound),
            verdict.synthetic.text,
            "" if verdict.cached is None else verdict.cached.text,
            *(percent(verdict.shares.get(kind)) for kind in kinds),
        ]
        rows.append(row)
    headings = ["training", "bound by", "times as fast with synthetic input", "with cached input", *kinds]
    return _without_empty_columns(headings, rows)


def _without_empty_columns(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    kept = [index for index, column in enumerate(zip(*rows, strict=True)) if any(column)]
    return Table([headings[index] for index in kept], [[row[index] for index in kept] for row in rows])


def verdicts(verdicts: Sequence[Verdict]) -> list[str]:
    """Returns what bounds the training and what to do about it, a line for each verdict."""
    return [f"{_code(verdict.cell.name)}, {verdict.cell.case.title}: {verdict.advice}" for verdict in verdicts]


def checks(comparison: Comparison) -> Table:
    """Returns the values that show equal work, with the mark before each unequal value."""
    rows = [
        [
            marked_name(row),
            *(_marked_value(row, f"unequal {name}:", _fact(row, name)) for name in work.FACTS),
            _marked_value(row, "unequal loss", number(row.loss)),
            f"{MARK} no" if any(mark.startswith("did not learn") for mark in row.marks) else "yes",
        ]
        for row in comparison.rows
        if row.good
    ]
    return Table(["strategy", *work.FACTS, "last loss", "learned"], rows)


def _fact(row: Row, name: str) -> str:
    """A fact about the runs of a cell, whose values may differ: with several seeds, initial weights do."""
    records = (run.record for run in row.good if run.record is not None)
    values = list(dict.fromkeys(work.formatted(work.FACTS[name](record)) for record in records))
    return values[0] if len(values) == 1 else f"{len(values)} values"


def _marked_value(row: Row, beginning: str, value: str) -> str:
    """The value, preceded by the mark if a mark of the row begins with `beginning`."""
    return f"{MARK} {value}" if any(mark.startswith(beginning) for mark in row.marks) else value


def notes(comparison: Comparison) -> list[str]:
    """Returns a line about each unequal value, each cell that did not learn, and each cell with failed runs."""
    lines = [f"{MARK} {_code(row.cell.name)}: {mark}" for row in comparison.rows for mark in row.marks]
    for row in comparison.rows:
        if failed := failures(row):
            lines.append(f"{_code(row.cell.name)} failed in {len(failed)} of {len(row.runs)} runs: {failed[-1].cause}")
    return lines


def doubtful(comparison: Comparison) -> list[str]:
    """Returns a line about each reason to doubt the figures of a case."""
    return [f"doubtful: {sentence[0].lower()}{sentence[1:]}" for sentence in doubts.of(comparison)]


def failures(row: Row) -> list[Run]:
    """Returns the failed runs of a cell."""
    return [run for run in row.runs if run.error]


def extent(comparisons: Sequence[Comparison]) -> str:
    """Returns the size of the measurement, such as `21 runs of 7 strategies in 3 rounds, 2026-11-25`."""
    rows = [row for comparison in comparisons for row in comparison.rows]
    runs = [run for row in rows for run in row.runs]
    rounds = {(run.study, run.round) for run in runs if run.study}
    days = sorted({run.started[:10] for run in runs})
    names = {row.cell.name for row in rows}
    text = f"{counted(len(runs), 'run')} of {len(names)} {'strategy' if len(names) == 1 else 'strategies'}"
    text += f" in {counted(len(rounds), 'round')}" if rounds else ""
    return f"{text}, {' to '.join(dict.fromkeys((days[0], days[-1])))}"


def machines(comparisons: Iterable[Comparison]) -> list[str]:
    """Returns the distinct machines and versions of the runs."""
    runs = [run for comparison in comparisons for row in comparison.rows for run in row.runs]
    lines = {}
    for record in [run.record for run in runs if run.record is not None]:
        machine, versions = record.machine, record.versions
        line = (
            f"{machine.cpu}, {machine.cores} cores, {machine.memory_bytes / 2**30:.0f} GiB, "
            f"{', '.join(machine.gpus) or 'no GPU'}; Python {versions.python}, tfdist {versions.tfdist}, "
            f"TensorFlow {versions.tensorflow}, Keras {versions.keras}"
        )
        lines[line] = True
    return list(lines)


def commands(comparison: Comparison) -> dict[str, str]:
    """Returns the command of the first run of each cell, by the name of the cell."""
    return {row.cell.name: _command(row.runs[0]) for row in comparison.rows}


def _command(run: Run) -> str:
    if run.measured is not None:
        return shlex.join(run.measured.command)
    return run.record.typed[0] if run.record is not None and run.record.typed else ""


def _code(name: str) -> str:
    return "`" + name.replace("`", "'") + "`"


def number(value: float | None) -> str:
    """Formats a number with at least three digits."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def seconds(value: float | None) -> str:
    """Formats seconds with two decimals, or three digits."""
    return "" if value is None else f"{value:.2f}" if value >= 1 else f"{value:.3g}"


def percent(value: float | None) -> str:
    """Formats a share as a percentage."""
    return "" if value is None else f"{value:.0%}"


def mebibytes(value: float | None) -> str:
    """Formats a number of bytes in MiB."""
    return "" if value is None else f"{value / 2**20:,.0f}"


def markdown(comparisons: Sequence[Comparison], picture: str = "") -> str:
    """Returns the report in Markdown.

    Args:
        comparisons: the comparison of each case.
        picture: the file name of the picture with the result, in the folder of the report; "" for no picture.
    """
    parts = ["# Comparison of strategies"]
    parts += [_escaped(headline(comparisons))] if len(comparisons) > 1 else []
    parts += [f"![Times as fast, by strategy]({picture})"] if picture else []
    if of_cells := verdicts_of(comparisons):
        lines = [f"- {_escaped(line)}" for line in verdicts(of_cells)]
        parts += ["## What bounds the training", _markdown(bounds(of_cells)), "\n".join(lines)]
    for comparison in comparisons:
        parts += [f"## {_escaped(comparison.case.title)}", _escaped(answer(comparison)), table(comparison)]
        lines = [f"- {_escaped(note)}" for note in [*notes(comparison), *doubtful(comparison)]]
        parts += ["\n".join(lines)] if lines else []
        parts += ["### Equal work", _markdown(checks(comparison)), _conditions(comparison)]
    return "\n\n".join(parts) + "\n"


def table(comparison: Comparison) -> str:
    """Returns the figures of a case as a Markdown table."""
    return _markdown(figures(comparison))


def _markdown(table: Table) -> str:
    rows = [table.headings, ["---"] * len(table.headings), *([_escaped(cell) for cell in row] for row in table.rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _conditions(comparison: Comparison) -> str:
    lines = ["### Machines, versions, commands", ""]
    lines += [f"- {_escaped(machine)}" for machine in machines([comparison])]
    for name, command in commands(comparison).items():
        lines.append(f"- {_escaped(name)}: ``{_one_line(command)}``")
    return "\n".join(lines)


def _escaped(text: str) -> str:
    """Escapes the syntax of Markdown and HTML, except in names in backticks."""
    parts = re.split(r"(`[^`]*`)", _one_line(text))
    plain = (re.sub(r"[\\*\[\]|]", r"\\\g<0>", part.replace("&", "&amp;").replace("<", "&lt;")) for part in parts[::2])
    names = (part.replace("|", r"\|") for part in [*parts[1::2], ""])
    return "".join(part for pair in zip(plain, names, strict=True) for part in pair)


def _one_line(text: str) -> str:
    return " ".join(text.split())
