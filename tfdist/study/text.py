"""The report in Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tfdist.study import summary, verdicts
from tfdist.study.results import Comparison


def report(comparisons: Sequence[Comparison], picture: str = "") -> str:
    """Returns the report.

    Args:
        comparisons: the comparison of each case.
        picture: the file name of the picture with the result, in the folder of the report; "" for no picture.
    """
    parts = ["# Comparison of strategies"]
    parts += [_escaped(summary.headline(comparisons))] if len(comparisons) > 1 else []
    parts += [f"![Times as fast, by strategy]({picture})"] if picture else []
    if bounds := verdicts.of(comparisons):
        lines = [f"- {_escaped(line)}" for line in summary.verdicts(bounds)]
        parts += ["## What bounds the training", _markdown(summary.bounds(bounds)), "\n".join(lines)]
    for comparison in comparisons:
        parts += [f"## {_escaped(comparison.case.title)}", _escaped(summary.answer(comparison)), table(comparison)]
        notes = [f"- {_escaped(note)}" for note in summary.notes(comparison)]
        parts += ["\n".join(notes)] if notes else []
        parts += ["### Equal work", _markdown(summary.checks(comparison)), _conditions(comparison)]
    return "\n\n".join(parts) + "\n"


def table(comparison: Comparison) -> str:
    """Returns the figures of a case as a Markdown table."""
    return _markdown(summary.figures(comparison))


def _markdown(table: summary.Table) -> str:
    rows = [table.headings, ["---"] * len(table.headings), *([_escaped(cell) for cell in row] for row in table.rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _conditions(comparison: Comparison) -> str:
    """The section on machines, versions and commands."""
    lines = ["### Machines, versions, commands", ""]
    lines += [f"- {_escaped(machine)}" for machine in summary.machines([comparison])]
    for name, command in summary.commands(comparison).items():
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
