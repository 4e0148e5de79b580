"""The report of a study in Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tfdist.study import summary, verdicts
from tfdist.study.results import Comparison


def report(comparisons: Sequence[Comparison], picture: str = "") -> str:
    """The whole report.

    Args:
        comparisons: one for each case.
        picture: the name of a file with the picture of the answer, beside the report; "" for none.
    """
    parts = ["# Comparison of strategies"]
    parts += [_escaped(summary.headline(comparisons))] if len(comparisons) > 1 else []
    parts += [f"![Times as fast, by strategy]({picture})"] if picture else []
    found = verdicts.of(comparisons)
    if found:
        lines = [f"- {_escaped(line)}" for line in summary.verdicts(found)]
        parts += ["## What bounds the training", _markdown(summary.bounds(found)), "\n".join(lines)]
    for one in comparisons:
        parts += [f"## {_escaped(one.case.title)}", _escaped(summary.answer(one)), table(one)]
        notes = [f"- {_escaped(note)}" for note in summary.notes(one)]
        parts += ["\n".join(notes)] if notes else []
        parts += ["### Equal work", _markdown(summary.checks(one)), _conditions(one)]
    return "\n\n".join(parts) + "\n"


def table(comparison: Comparison) -> str:
    """The figures of a case, as a table of Markdown."""
    return _markdown(summary.figures(comparison))


def _markdown(table: summary.Table) -> str:
    rows = [table.headings, ["---"] * len(table.headings), *([_escaped(cell) for cell in row] for row in table.rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _conditions(comparison: Comparison) -> str:
    """Machines, versions and commands."""
    lines = ["### Machines, versions, commands", ""]
    lines += [f"- {_escaped(machine)}" for machine in summary.machines([comparison])]
    for name, command in summary.commands(comparison).items():
        lines.append(f"- {_escaped(name)}: ``{_one_line(command)}``")
    return "\n".join(lines)


def _escaped(text: str) -> str:
    """Without what Markdown or HTML would take for its own; names in backticks stay as they are."""
    parts = re.split(r"(`[^`]*`)", _one_line(text))
    plain = (re.sub(r"[\\*\[\]|]", r"\\\g<0>", part.replace("&", "&amp;").replace("<", "&lt;")) for part in parts[::2])
    names = (part.replace("|", r"\|") for part in [*parts[1::2], ""])
    return "".join(piece for pair in zip(plain, names, strict=True) for piece in pair)


def _one_line(text: str) -> str:
    return " ".join(text.split())
