"""What the runs of a case say, in words and numbers: for the report in Markdown, the page, and the terminal.

Texts have names in backticks, and what users have named as it is: who writes them to a file escapes them.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tfdist import strategies
from tfdist.study import work
from tfdist.study.plan import REAL
from tfdist.study.results import Comparison, Row
from tfdist.study.runs import Run
from tfdist.study.verdicts import Verdict
from tfdist.terminal import counted

MARK = "≠"  # before what is not equal work, or did not learn


@dataclass(frozen=True)
class Table:
    """Headings, and the rows below them; the first column names the row."""

    headings: list[str]
    rows: list[list[str]]


def marked_name(row: Row) -> str:
    """The name of a row's cell, with the mark if its work is not equal or it did not learn."""
    return f"{MARK} {row.cell.name}" if row.marks else row.cell.name


# The columns of the table: a heading, and the text of a row; a column that no row has anything for is left out.
_COLUMNS: dict[str, Callable[[Row], str]] = {
    "strategy": marked_name,
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
    "GPU memory in use, MiB": lambda row: mebibytes(row.gpu_memory_in_use_bytes),
    "GPUs busy": lambda row: "" if row.gpus_busy is None else f"{row.gpus_busy:.2f}",
    "processor s": lambda row: seconds(row.cpu_seconds),
    "sent a step, KiB": lambda row: "" if (sent := row.network_bytes_a_step) is None else f"{sent / 2**10:,.0f}",
    "step: compute, communication, input, waiting": lambda row: " ".join(map(percent, row.breakdown.values())),
    "staleness": lambda row: number(row.staleness),
    "price": lambda row: "" if row.price is None else f"{row.price:.4g}",
    "runs": lambda row: f"{len(row.good)} of {len(row.runs)}" if len(row.good) < len(row.runs) else f"{len(row.runs)}",
}


def headline(comparisons: Sequence[Comparison]) -> str:
    """What came out of all cases, in one sentence; those with another input than real are there for comparison."""
    comparisons = [one for one in comparisons if one.case.input == REAL] or comparisons
    if len(comparisons) == 1:
        return answer(comparisons[0])
    winners = [row for row in map(_winner, comparisons) if row is not None]
    if not winners:
        return f"In none of {len(comparisons)} cases is a strategy faster than what it is compared with."
    wins = Counter(row.cell.name for row in winners).most_common()
    first, *others = (f"{_code(name)} is fastest in {count}" for name, count in wins)
    rest = len(comparisons) - len(winners)
    parts = [f"Of {len(comparisons)} cases, {first}", *others, *([f"in {rest} no strategy is"] if rest else [])]
    return f"{', '.join(parts)}.{_by_design(winners)}"


def answer(comparison: Comparison) -> str:
    """What came out, in one sentence."""
    fastest, base, title = comparison.fastest, comparison.base, comparison.case.title
    if fastest is None:
        return f"{title}: no run did equal work and ended well, so that nothing can be said."
    if fastest.is_base:
        return f"{title}: nothing is faster than {_code(base.cell.name)}."
    speed = fastest.speed
    if speed is None or not speed.is_difference:
        than = f"{_code(base.cell.name)} by more than the runs differ among themselves"
        return f"{title}: no strategy is faster than {than}."
    said = f"{title}: {_code(fastest.cell.name)} is fastest, {speed.text} times as fast as {_code(base.cell.name)}."
    return said + _by_design([fastest])


def _by_design(rows: Iterable[Row]) -> str:
    """A sentence on those that compute something else than one device."""
    asynchronous = (row.cell.name for row in rows if strategies.traits(row.cell.strategy).asynchronous)
    names = " and ".join(map(_code, dict.fromkeys(asynchronous)))
    return f" The steps of {names} are not those of one device, by design: compare losses too." if names else ""


def _winner(comparison: Comparison) -> Row | None:
    fastest = comparison.fastest
    return fastest if fastest is not None and fastest.speed is not None and fastest.speed.is_difference else None


def figures(comparison: Comparison) -> Table:
    """The figures of a case."""
    cells = {name: [text(row) for row in comparison.rows] for name, text in _COLUMNS.items()}
    there = {name: column for name, column in cells.items() if any(column)}
    return Table(list(there), [list(row) for row in zip(*there.values(), strict=True)])


def bounds(found: Sequence[Verdict]) -> Table:
    """What bounds the training, a row for each verdict."""
    kinds = ("input", "compute", "communication", "waiting")
    rows = [
        [
            f"{MARK} {_verdict_name(one)}" if one.unequal else _verdict_name(one),
            {"waiting": "waiting (latency)", "": "not known"}.get(one.bound, one.bound),
            one.synthetic.text,
            "" if one.cached is None else one.cached.text,
            *(percent(one.shares.get(kind)) for kind in kinds),
        ]
        for one in found
    ]
    headings = ["training", "bound by", "times as fast with synthetic input", "with cached input", *kinds]
    there = [index for index, column in enumerate(zip(*rows, strict=True)) if any(column)]
    return Table([headings[index] for index in there], [[row[index] for index in there] for row in rows])


def verdicts(found: Sequence[Verdict]) -> list[str]:
    """What bounds the training and what to do about it, a line for each verdict."""
    return [f"{_code(one.cell.name)}, {one.cell.case.title}: {one.advice}" for one in found]


def _verdict_name(found: Verdict) -> str:
    return f"{found.cell.name}, {found.cell.case.title}"


def checks(comparison: Comparison) -> Table:
    """What makes the work of the cells equal, with the mark where it is not."""
    rows = [
        [
            marked_name(row),
            *(_checked(row, name) for name in work.FACTS),
            _beside(row, "unequal loss", number(row.loss)),
            f"{MARK} no" if any(mark.startswith("did not learn") for mark in row.marks) else "yes",
        ]
        for row in comparison.rows
        if row.good
    ]
    return Table(["strategy", *work.FACTS, "last loss", "learnt"], rows)


def _checked(row: Row, name: str) -> str:
    """The value of a fact in the runs of a cell; those of several seeds have several initial weights."""
    records = (run.record for run in row.good if run.record is not None)
    values = list(dict.fromkeys(work.shown(work.FACTS[name](record)) for record in records))
    value = values[0] if len(values) == 1 else f"{len(values)} values"
    return _beside(row, f"unequal {name}:", value)


def _beside(row: Row, beginning: str, value: str) -> str:
    """`value`, with the mark before it if a mark of the row begins so."""
    return f"{MARK} {value}" if any(mark.startswith(beginning) for mark in row.marks) else value


def notes(comparison: Comparison) -> list[str]:
    """What is unequal, what did not learn, and what failed, a line for each."""
    found = [f"{MARK} {_code(row.cell.name)}: {mark}" for row in comparison.rows for mark in row.marks]
    for row in comparison.rows:
        failed = failures(row)
        if failed:
            found.append(f"{_code(row.cell.name)} failed in {len(failed)} of {len(row.runs)} runs: {failed[-1].cause}")
    return found


def failures(row: Row) -> list[Run]:
    """The runs of a cell that failed."""
    return [run for run in row.runs if run.error]


def extent(comparisons: Sequence[Comparison]) -> str:
    """How much was measured, such as `21 runs of 7 strategies in 3 rounds, 2026-11-25`."""
    rows = [row for one in comparisons for row in one.rows]
    runs = [run for row in rows for run in row.runs]
    rounds = {(run.study, run.round) for run in runs if run.study}
    days = sorted({run.begun[:10] for run in runs})
    names = {row.cell.name for row in rows}
    text = f"{counted(len(runs), 'run')} of {len(names)} {'strategy' if len(names) == 1 else 'strategies'}"
    text += f" in {counted(len(rounds), 'round')}" if rounds else ""
    return f"{text}, {' to '.join(dict.fromkeys((days[0], days[-1])))}"


def machines(comparisons: Iterable[Comparison]) -> list[str]:
    """The machines and versions of the runs, each once."""
    records = [run.record for one in comparisons for row in one.rows for run in row.runs if run.record is not None]
    found = dict.fromkeys(
        f"{one.machine.cpu}, {one.machine.cores} cores, {one.machine.memory_bytes / 2**30:.0f} GiB, "
        f"{', '.join(one.machine.gpus) or 'no GPU'}; Python {one.versions.python}, tfdist {one.versions.tfdist}, "
        f"TensorFlow {one.versions.tensorflow}, Keras {one.versions.keras}"
        for one in records
    )
    return list(found)


def commands(comparison: Comparison) -> dict[str, str]:
    """For each cell the command of its first run."""
    return {row.cell.name: _command(row.runs[0]) for row in comparison.rows}


def _command(run: Run) -> str:
    if run.measured is not None:
        return shlex.join(run.measured.command)
    return run.record.typed[0] if run.record is not None and run.record.typed else ""


def _code(name: str) -> str:
    return "`" + name.replace("`", "'") + "`"


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
