"""The report as a page: one HTML file, which loads nothing, with its pictures drawn by the Vega that it has inside.

What users have named is escaped by the template, in the JSON of the pictures too; beyond that the page's own policy
lets no script run but the page's.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import altair as alt
import jinja2
import vl_convert
from markupsafe import Markup, escape

from tfdist.study import charts, summary, verdicts
from tfdist.study.charts import Palette
from tfdist.study.results import Comparison

FOLDER = Path(__file__).parent
PICTURE_WIDTH = 720  # pixels, of the picture beside the report in Markdown


@dataclass(frozen=True)
class Figure:
    """A picture of the page: the element that holds it, what stands above and below it, and its specification."""

    id: str
    title: str
    caption: str
    spec: dict[str, Any]
    wide: bool = False


@dataclass(frozen=True)
class Entry:
    """A strategy in the legend: its name, and the number of its colour, its shape and its dashes."""

    name: str
    series: int
    shape: str
    dash: str


@dataclass(frozen=True)
class Section:
    """A case of the page, with its tables and pictures."""

    id: str
    title: str
    answer: str
    figures: summary.Table
    notes: list[str]
    checks: summary.Table
    errors: dict[str, str]
    commands: dict[str, str]
    legend: list[Entry]
    pictures: list[Figure] = field(default_factory=list)


def html(comparisons: Sequence[Comparison]) -> str:
    """The page."""
    palette = Palette(comparisons)
    found = verdicts.of(comparisons)
    sections = [_section(f"case-{index}", one, palette, len(comparisons)) for index, one in enumerate(comparisons)]
    first = _first(comparisons, palette)
    weak = [
        Figure(
            f"weak-{index}", f"{case.model} on {case.dataset}, {case.batch_size} examples a worker", "", _spec(chart)
        )
        for index, (case, chart) in enumerate(charts.weak_scaling(comparisons, palette).items())
    ]
    pictures = [*([first] if first else []), *(figure for one in sections for figure in one.pictures), *weak]
    script = vl_convert.javascript_bundle((FOLDER / "page.js").read_text(encoding="utf-8"))
    script = script.replace("</script", "<\\/script")  # which would end the element, even within a text
    references = {name: f"var(--{name})" for name in charts.LIGHT}
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["code"] = _with_code
    return environment.get_template("page.html.jinja").render(
        headline=summary.headline(comparisons),
        extent=summary.extent(comparisons),
        machines=summary.machines(comparisons),
        mark=summary.MARK,
        any_mark=any(row.marks for one in comparisons for row in one.rows),
        first=first,
        first_legend=_legend(comparisons, palette) if len(comparisons) > 1 else [],
        bounds=summary.bounds(found) if found else None,
        verdicts=summary.verdicts(found),
        sections=sections,
        weak=weak,
        colors={"light": charts.LIGHT, "dark": charts.DARK},
        style=Markup((FOLDER / "page.css").read_text(encoding="utf-8")),
        font=Markup(charts.FONT),
        data={
            "config": charts.configuration(references),
            "datasets": {f"case-{index}": charts.curves(one) for index, one in enumerate(comparisons)},
            "figures": [{"id": figure.id, "spec": figure.spec} for figure in pictures],
        },
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def picture(comparisons: Sequence[Comparison]) -> str:
    """The picture of the answer as SVG, on white; "" if there is nothing to compare."""
    first = _first(comparisons, Palette(comparisons))
    if first is None:
        return ""
    config = charts.configuration(charts.LIGHT) | {"background": charts.LIGHT["paper"], "padding": 16}
    return str(vl_convert.vegalite_to_svg(first.spec | {"width": PICTURE_WIDTH, "config": config}))


def _first(comparisons: Sequence[Comparison], palette: Palette) -> Figure | None:
    """The picture of the answer."""
    caption = "Ratio of the training time of an epoch, within a round: the median and its 95 % bootstrap interval. "
    caption += "Further right is faster; an interval that crosses the line at 1 is no difference."
    one, *others = comparisons
    chart = charts.overview(comparisons, palette) if others else charts.speed(one, palette)
    return None if chart is None else Figure("answer", "", caption, _spec(chart), wide=True)


def _weak(comparisons: Sequence[Comparison], palette: Palette) -> list[Figure]:
    """The pictures of a global batch that grows with the workers."""
    pictures = charts.weak_scaling(comparisons, palette).items()
    titles = [f"{case.model} on {case.dataset}, {case.batch_size} examples a worker" for case, _ in pictures]
    specs = [_spec(chart) for _, chart in pictures]
    return [Figure(f"weak-{index}", titles[index], "", spec) for index, spec in enumerate(specs)]


def _section(name: str, comparison: Comparison, palette: Palette, cases: int) -> Section:
    return Section(
        id=name,
        title=comparison.case.title,
        answer=summary.answer(comparison),
        figures=summary.figures(comparison),
        notes=summary.notes(comparison),
        checks=summary.checks(comparison),
        errors={
            f"{row.cell.name}, round {run.round + 1}": run.error
            for row in comparison.rows
            for run in summary.failures(row)
        },
        commands=summary.commands(comparison),
        legend=_legend([comparison], palette),
        pictures=_pictures(name, comparison, palette, cases),
    )


def _pictures(name: str, comparison: Comparison, palette: Palette, cases: int) -> list[Figure]:
    """The pictures of a case that there is something for."""
    values = charts.curves(comparison)
    found: list[tuple[str, str, alt.LayerChart | None]] = []
    if cases > 1:
        found.append(("Speed", "", charts.speed(comparison, palette)))
    spread = "Medians of the runs, with the lowest and the highest."
    clock = f"{spread} Time counts from the first touch of data, evaluation included."
    for metric, title in (("accuracy", "Validation accuracy"), ("loss", "Training loss")):
        for by, unit in (("epoch", "epoch"), ("seconds", "time")):
            there = any(value.get(metric) is not None and value.get(by) is not None for value in values)
            chart = charts.curve(values, metric, by, name, _target(comparison), palette) if there else None
            found.append((f"{title} by {unit}", spread if by == "epoch" else clock, chart))
    found += [
        ("Scaling", "The same global batch on more workers; dashed: ideal.", charts.scaling(comparison, palette)),
        ("Seconds of a run", "From the start of the command to its end.", charts.run_seconds(comparison)),
        ("What a step is spent on", "From a run of its own, with a trace.", charts.steps(comparison)),
        ("Peak memory", "The resident set of each process.", charts.memory(comparison)),
        ("Cost", "", charts.price(comparison)),
    ]
    return [
        Figure(f"{name}-picture-{index}", title, caption, _spec(chart))
        for index, (title, caption, chart) in enumerate(found)
        if chart is not None
    ]


def _target(comparison: Comparison) -> float | None:
    """The validation accuracy at which the runs end; `None` if there is none, or if it is not the same for all."""
    records = (run.record for row in comparison.rows for run in row.runs)
    targets = [record.time_to_target for record in records if record is not None and record.time_to_target]
    values = {one.target for one in targets if one.monitor == "val_accuracy"}
    return values.pop() if len(values) == 1 else None


def _legend(comparisons: Sequence[Comparison], palette: Palette) -> list[Entry]:
    cells = {row.cell.name: row.cell for one in comparisons for row in one.rows if row.good}
    return [
        Entry(name, palette.series(cell.label), palette.shape(cell.label), _dash(palette.dash(cell.workers)))
        for name, cell in cells.items()
    ]


def _dash(lengths: Sequence[int]) -> str:
    return " ".join(map(str, lengths))


def _spec(chart: alt.LayerChart) -> dict[str, Any]:
    """Without what the page says for all pictures."""
    found: Mapping[str, Any] = chart.to_dict(validate=False)  # its parts were validated when they were made
    return {name: value for name, value in found.items() if name not in ("$schema", "config")}


def _with_code(text: str) -> Markup:
    """Escaped, with names in backticks as code."""
    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text))))
