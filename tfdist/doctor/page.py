"""The doctor's report: the findings with their hints, and which strategies are ready."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from tfdist import __version__, terminal
from tfdist.doctor.finding import Finding
from tfdist.doctor.links import Measurement
from tfdist.doctor.readiness import Readiness

STYLES = {"ok": "green", "note": "yellow", "problem": "bold red", "ready": "green", "not ready": "bold red"}
_STATE_WIDTH = max(map(len, STYLES))


def show(findings: Sequence[Finding], strategies: Sequence[Readiness]) -> None:
    """Prints the report. Lines are wrapped only on a terminal; elsewhere each sentence and each hint is one line."""
    console = Console(soft_wrap=True, highlight=False, markup=False)
    sections = (
        [(finding.state, finding.subject, finding.sentence, finding.hint) for finding in findings],
        [
            ("ready" if readiness.ready else "not ready", readiness.strategy, readiness.reason, readiness.command)
            for readiness in strategies
        ],
    )
    for rows in sections:
        width = max(len(subject) for _, subject, _, _ in rows)
        for state, subject, sentence, hint in rows:
            console.print(_line(console, f"{state:{_STATE_WIDTH}}  {subject:{width}}  ", sentence, STYLES[state]))
            if hint:
                console.print(_line(console, " " * (_STATE_WIDTH + width + 4), f"hint: {hint}", ""))
        console.print()
    console.print(summary(findings, strategies))


def _line(console: Console, head: str, text: str, style: str) -> Text:
    """Returns `head` and `text`, which is wrapped and indented if it is wider than the terminal."""
    width = console.width - len(head) if console.is_terminal else 0
    lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) if width > 20 else [text]
    # A `Text`, because text from variables, files and programs must not be parsed as markup.
    line = Text(head + ("\n" + " " * len(head)).join(lines))
    line.stylize(style, 0, _STATE_WIDTH)
    line.rstrip()
    return line


def summary(findings: Sequence[Finding], strategies: Sequence[Readiness]) -> str:
    """The report in one line."""
    problems = [finding.subject for finding in findings if finding.state == "problem"]
    subjects = f" ({', '.join(dict.fromkeys(problems))})" if problems else ""
    notes = terminal.counted(sum(finding.state == "note" for finding in findings), "note")
    ready = sum(readiness.ready for readiness in strategies)
    return (
        f"{terminal.counted(len(problems), 'problem')}{subjects}, {notes}; "
        f"{ready} of {len(strategies)} strategies are ready"
    )


def as_json(findings: Sequence[Finding], measurements: Sequence[Measurement], strategies: Sequence[Readiness]) -> str:
    """The report as JSON: the findings, the measurements and the strategies."""
    report = {
        "tfdist": __version__,
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "all_reduce": [dataclasses.asdict(each.link) for each in measurements if each.link is not None],
        "strategies": [dataclasses.asdict(readiness) for readiness in strategies],
    }
    return json.dumps(report, indent=2)
