"""The doctor's page: what was found out, what to do, and which strategies are ready."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from tfdist import __version__, terminal
from tfdist.doctor.finding import Finding
from tfdist.doctor.links import Tried
from tfdist.doctor.readiness import Readiness

STYLES = {"ok": "green", "note": "yellow", "problem": "bold red", "ready": "green", "not ready": "bold red"}
_STATES = max(map(len, STYLES))


def show(findings: Sequence[Finding], strategies: Sequence[Readiness]) -> None:
    """Prints the page: elsewhere than on a terminal, each sentence and each hint in one line."""
    console = Console(soft_wrap=True, highlight=False, markup=False)
    found = [(one.state, one.subject, one.sentence, one.hint) for one in findings]
    named = [("ready" if one.ready else "not ready", one.strategy, one.reason, one.command) for one in strategies]
    for rows in (found, named):
        subjects = max(len(subject) for _, subject, _, _ in rows)
        for state, subject, sentence, hint in rows:
            console.print(_line(console, f"{state:{_STATES}}  {subject:{subjects}}  ", sentence, STYLES[state]))
            if hint:
                console.print(_line(console, " " * (_STATES + subjects + 4), f"hint: {hint}", ""))
        console.print()
    console.print(summary(findings, strategies))


def _line(console: Console, head: str, text: str, style: str) -> Text:
    """A line in which `text` is broken behind `head` if it is longer than the terminal is wide."""
    room = console.width - len(head) if console.is_terminal else 0
    broken = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) if room > 20 else [text]
    # What comes from variables, files and programs is text: it must not be taken for markup.
    line = Text(head + ("\n" + " " * len(head)).join(broken))
    line.stylize(style, 0, _STATES)
    line.rstrip()
    return line


def summary(findings: Sequence[Finding], strategies: Sequence[Readiness]) -> str:
    """The page in one line."""
    problems, notes = ([one.subject for one in findings if one.state == state] for state in ("problem", "note"))
    counts = [terminal.counted(len(found), kind) for found, kind in ((problems, "problem"), (notes, "note"))]
    named = f" ({', '.join(dict.fromkeys(problems))})" if problems else ""
    ready = sum(one.ready for one in strategies)
    return f"{counts[0]}{named}, {counts[1]}; {ready} of {len(strategies)} strategies are ready"


def as_json(findings: Sequence[Finding], tried: Sequence[Tried], strategies: Sequence[Readiness]) -> str:
    """The page for programs: the findings, the measurements and the strategies."""
    page = {
        "tfdist": __version__,
        "findings": [dataclasses.asdict(one) for one in findings],
        "all_reduce": [dataclasses.asdict(one.link) for one in tried if one.link is not None],
        "strategies": [dataclasses.asdict(one) for one in strategies],
    }
    return json.dumps(page, indent=2)
