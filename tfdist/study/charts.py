"""The pictures of a report, as Vega-Lite specifications, which Altair validates.

Each strategy has a colour and a shape, and each number of workers a dash pattern, so pictures can be read without
colours. All pictures have the parameter `hidden`, the names of cells that are not drawn. `configuration` sets the
colours, so a page can define them in its style sheet, for light and dark screens and for print.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import altair as alt

from tfdist.study import summary
from tfdist.study.plan import Case
from tfdist.study.results import Comparison, Row
from tfdist.study.runs import Run, median

Values = list[dict[str, Any]]

# Okabe and Ito, "Color Universal Design" (2008), without yellow, which is too light for lines on white.
SERIES = ("#1b1b1b", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "triangle-left")
DASHES = ((1, 0), (6, 3), (2, 2), (9, 3, 2, 3), (12, 4), (4, 1, 1, 1))
# From dark to light, so that neighbours also differ in grey.
PARTS = ("#08306b", "#2a6ea6", "#6aa7d0", "#a9cfe6", "#dcebf5")
LIGHT = {
    **{"ink": "#1f2328", "muted": "#656d76", "line": "#d8dee4", "paper": "#ffffff"},
    **{f"series-{index}": color for index, color in enumerate(SERIES)},
    **{f"part-{index}": color for index, color in enumerate(PARTS)},
}
DARK = {
    **LIGHT,
    **{"ink": "#e6edf3", "muted": "#9aa4af", "line": "#343b44", "paper": "#14181d"},
    **{"series-0": "#f0f0f0", "series-1": "#4aa3df", "series-2": "#f07d2a", "series-3": "#20c09a"},
    **{f"part-{index}": color for index, color in enumerate(("#f1f7fc", "#a9cfe6", "#6aa7d0", "#2a6ea6", "#174a80"))},
}
MOST_SHOWN = 2.0  # a wider interval, of few rounds, ends at the mean times or divided by this factor
LABEL_PIXELS = 150  # longer names end in an ellipsis
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"

_SHOWN = "indexof(hidden, datum.cell) < 0"
_WIDTH = alt.value("width")  # the right edge


def configuration(colors: Mapping[str, str]) -> dict[str, Any]:
    """Returns the Vega-Lite configuration of all pictures.

    Args:
        colors: CSS colors, or references such as `var(--ink)`, by the names in `LIGHT`.
    """
    ink, muted, line = colors["ink"], colors["muted"], colors["line"]
    axis = {"domainColor": line, "gridColor": line, "tickColor": line, "labelColor": muted, "titleColor": muted}
    return {
        "background": None,
        "font": FONT,
        "view": {"stroke": None},
        "axis": {
            **axis,
            "labelFontSize": 12,
            "titleFontSize": 12,
            "titleFontWeight": "normal",
            "labelLimit": LABEL_PIXELS,
        },
        "axisY": {"domain": False, "ticks": False, "labelPadding": 6},
        "axisX": {"grid": False},
        "legend": {"labelColor": muted, "titleColor": muted, "labelFontSize": 12, "symbolStrokeWidth": 0},
        "text": {"color": ink, "fill": ink, "fontSize": 13},
        "style": {"outline": {"stroke": colors["paper"], "strokeWidth": 5, "strokeJoin": "round"}, "label": {}},
        "rule": {"color": muted},
        "bar": {"color": colors["part-1"], "stroke": colors["paper"], "strokeWidth": 1},
        "point": {"size": 70, "strokeWidth": 2},
        "line": {"strokeWidth": 2},
        "range": {
            "category": [colors[f"series-{index}"] for index in range(len(SERIES))],
            "ordinal": [colors[f"part-{index}"] for index in range(len(PARTS))],
            "symbol": list(SHAPES),
        },
    }


class Palette:
    """The appearance of the strategies, the same in all pictures of a report."""

    def __init__(self, comparisons: Iterable[Comparison]):
        cells = [row.cell for comparison in comparisons for row in comparison.rows]
        self.labels = list(dict.fromkeys(cell.label for cell in cells))
        self.workers = sorted({cell.workers for cell in cells})

    def series(self, label: str) -> int:
        """Returns the number of a strategy's colour."""
        return self.labels.index(label) % len(SERIES)

    def shape(self, label: str) -> str:
        """Returns the name of a strategy's shape."""
        return SHAPES[self.labels.index(label) % len(SHAPES)]

    def dash(self, workers: int) -> tuple[int, ...]:
        """Returns the lengths of dashes and gaps for a number of workers."""
        return DASHES[self.workers.index(workers) % len(DASHES)]

    @property
    def channels(self) -> dict[str, Any]:
        """The Vega-Lite encodings of colour and shape."""
        return {
            "color": alt.Color("label:N", scale=alt.Scale(domain=self.labels), legend=None),
            "shape": alt.Shape("label:N", scale=alt.Scale(domain=self.labels), legend=None),
        }

    @property
    def dashes(self) -> alt.StrokeDash:
        """The Vega-Lite encoding of the dash pattern."""
        range_ = [list(self.dash(count)) for count in self.workers]
        return alt.StrokeDash("workers:O", scale=alt.Scale(domain=self.workers, range=range_), legend=None)


def speed(comparison: Comparison, palette: Palette) -> alt.LayerChart | None:
    """Draws how many times as fast as the base each cell is, with its interval, from the fastest to the slowest."""
    values = sorted(_speeds(comparison), key=lambda value: -value["times"])
    if len(values) < 2:
        return None
    y = alt.Y("name:N", sort=[value["name"] for value in values], axis=None)
    text = alt.Chart().encode(y=y)
    layers = [
        *_intervals(y, palette, f"times as fast as {comparison.base.cell.name}", yOffset=7),
        *_on_paper(text, x=alt.value(0), text="name:N", align="left", dy=-11, limit=LABEL_PIXELS),
        *_on_paper(text, x=_WIDTH, text="text:N", align="right", dy=-11),
    ]
    return _layers(layers, values, alt.Step(46))


def overview(comparisons: Sequence[Comparison], palette: Palette) -> alt.LayerChart | None:
    """Draws the speed of the cells of several cases, with a band for each case."""
    values = [{**value, "case": comparison.case.title} for comparison in comparisons for value in _speeds(comparison)]
    if not values:
        return None
    cases = list(dict.fromkeys(value["case"] for value in values))
    cells = list(dict.fromkeys(value["cell"] for value in values))
    scale = alt.Scale(paddingInner=0.3, paddingOuter=0.3)
    y = alt.Y("case:N", sort=cases, axis=None, scale=scale)
    title = alt.Y("case:N", sort=cases, axis=None, scale=scale, bandPosition=0)
    by_case = alt.Chart().transform_aggregate(groupby=["case"])
    layers = [
        *_intervals(y, palette, "times as fast"),
        *_on_paper(by_case.encode(y=title), x=alt.value(0), text="case:N", align="left", dy=-8, limit=2 * LABEL_PIXELS),
    ]
    for layer in layers[1:3]:  # the intervals and their means
        layer.encoding.yOffset = alt.YOffset("cell:N", sort=cells)
    return _layers(layers, values, len(cases) * (34 + 13 * len(cells)))


def _on_paper(chart: alt.Chart, x: Any, text: str, **mark: Any) -> list[alt.Chart]:
    """Draws texts on an outline in the colour of the paper, which interrupts the lines below them."""
    return [chart.mark_text(style=style, **mark).encode(x=x, text=text) for style in ("outline", "label")]


def _speeds(comparison: Comparison) -> Values:
    values = []
    for row in comparison.rows:
        ratio = row.speed
        if ratio is None and not row.is_base:
            continue
        value = _named(row) | {"times": 1.0, "low": 1.0, "high": 1.0, "text": "1 (base)"}
        if ratio is not None:
            low, high = ratio.low or ratio.estimate, ratio.high or ratio.estimate
            value |= {"times": ratio.estimate}
            value |= {"low": max(low, ratio.estimate / MOST_SHOWN), "high": min(high, ratio.estimate * MOST_SHOWN)}
            value |= {"text": ratio.text}
        values.append(_rounded(value))
    return values


def _intervals(y: alt.Y, palette: Palette, title: str, **place: Any) -> list[alt.Chart]:
    """The line at 1, the intervals, and the means, which are hollow for unequal work."""
    axis = alt.Axis(title=f"{title} (logarithmic)", format="~g", tickCount=6)
    scale = alt.Scale(type="log", nice=False, padding=24)
    x = alt.X("times:Q", scale=scale, axis=axis)
    channels = palette.channels
    shown = alt.Chart()
    tooltip = _tooltip(("name", "strategy"), ("text", "times as fast"), ("notes", "marks"))
    hollow = alt.FillOpacity("equal:O", scale=alt.Scale(domain=[True, False], range=[1, 0]), legend=None)
    return [
        alt.Chart(alt.InlineData(values=[{}])).mark_rule(strokeDash=[4, 4]).encode(x=alt.datum(1, scale=scale)),
        shown.mark_rule(strokeWidth=2.5, **place).encode(
            y=y, x=alt.X("low:Q", scale=scale, axis=axis), x2="high:Q", color=channels["color"], tooltip=tooltip
        ),
        shown.mark_point(filled=False, opacity=1, size=90, **place).encode(
            y=y, x=x, fill=alt.Fill("label:N", scale=alt.Scale(domain=palette.labels), legend=None), fillOpacity=hollow,
            tooltip=tooltip, **channels,
        ),
    ]  # fmt: skip


def curves(comparison: Comparison) -> Values:
    """Returns for each epoch of each cell when it ended, and the median, lowest and highest metrics of its runs."""
    values = []
    for row in comparison.rows:
        for number in range(1, max((len(run.epochs) for run in row.good), default=0) + 1):
            epochs = [run.epochs[number - 1] for run in row.good if len(run.epochs) >= number]
            value = _named(row) | {"workers": row.cell.workers, "epoch": number, "runs": len(epochs)}
            value["seconds"] = median(epoch.elapsed_seconds for epoch in epochs)
            for name, metric in (("accuracy", "val_accuracy"), ("loss", "loss")):
                known = [metric_value for epoch in epochs if (metric_value := epoch.metrics.get(metric)) is not None]
                if known:
                    value |= {name: median(known), f"{name}_low": min(known), f"{name}_high": max(known)}
            values.append(_rounded(value))
    return values


def curve(values: Values, metric: str, by: str, data: str, target: float | None, palette: Palette) -> alt.LayerChart:
    """Draws a metric over the training, a line per cell, with the lowest and the highest value of its runs.

    Args:
        values: the result of `curves`.
        metric: `accuracy` for the validation accuracy, or `loss` for the training loss.
        by: `epoch`, or `seconds` from the first access to data.
        data: the name under which the page has `values`.
        target: the accuracy at which to draw a line; `None` for no line.
        palette: the palette of the report.
    """
    titles = {"epoch": "epoch", "seconds": "seconds from the first access to data"}
    whole_numbers = {"tickMinStep": 1, "format": "d"} if by == "epoch" else {}
    axis = alt.Axis(title=titles[by], labelOverlap=True, **whole_numbers)
    x = alt.X(f"{by}:Q", axis=axis, scale=alt.Scale(zero=False, nice=False, padding=8))
    title = "validation accuracy" if metric == "accuracy" else "training loss"
    y_axis = {"title": title, "scale": alt.Scale(zero=False)}
    y = alt.Y(f"{metric}:Q", **y_axis)
    tooltip = _tooltip(("name", "strategy"), ("epoch", "epoch"), ("seconds", "seconds"), (metric, metric))
    tooltip += _tooltip(
        (f"{metric}_low", "lowest"), (f"{metric}_high", "highest"), ("runs", "runs"), ("notes", "marks")
    )
    base, channels = alt.Chart().encode(x=x), palette.channels
    layers = [
        base.mark_rule(opacity=0.45).encode(
            y=alt.Y(f"{metric}_low:Q", **y_axis), y2=f"{metric}_high:Q", color=channels["color"]
        ),
        base.mark_line().encode(y=y, detail="cell:N", strokeDash=palette.dashes, color=channels["color"]),
        base.mark_point(filled=True, opacity=1, size=45).encode(y=y, tooltip=tooltip, **channels),
    ]
    if target is not None and metric == "accuracy":
        line = alt.Chart(alt.InlineData(values=[{}]))
        layers.append(line.mark_rule(strokeDash=[4, 4]).encode(y=alt.datum(target)))
        text = {"align": "right", "dy": -6, "fontSize": 11}
        layers.append(line.mark_text(text=f"target {target:g}", **text).encode(y=alt.datum(target), x=_WIDTH))
    return _layers(layers, alt.NamedData(name=data), 220)


def scaling(comparison: Comparison, palette: Palette) -> alt.LayerChart | None:
    """Draws examples per second relative to a single worker, with the same global batch, over the workers."""
    return _scaling([(row, row.strong_efficiency) for row in comparison.rows], palette)


def weak_scaling(comparisons: Sequence[Comparison], palette: Palette) -> dict[Case, alt.LayerChart]:
    """Draws weak scaling, where the global batch grows with the workers; a picture for each case of a single worker."""
    by_case: dict[Case, list[tuple[Row, float | None]]] = {}
    for row in (row for comparison in comparisons for row in comparison.rows if row.weak_efficiency is not None):
        case = row.cell.case
        case_of_one = replace(case, batch_size=case.batch_size // row.cell.workers)
        by_case.setdefault(case_of_one, []).append((row, row.weak_efficiency))
    charts = {case: _scaling(rows, palette) for case, rows in by_case.items()}
    return {case: chart for case, chart in charts.items() if chart is not None}


def _scaling(rows: Sequence[tuple[Row, float | None]], palette: Palette) -> alt.LayerChart | None:
    values: Values = []
    for row, efficiency in rows:
        if efficiency is None:
            continue
        workers = row.cell.workers
        label = row.cell.label
        if not any(value["label"] == label for value in values):
            base = {"label": label, "cell": "", "name": f"{label} on 1", "workers": 1, "times": 1, "efficiency": 1}
            values.append(base)
        values.append(
            _rounded(_named(row) | {"workers": workers, "times": efficiency * workers, "efficiency": efficiency})
        )
    if not values:
        return None
    counts = sorted({value["workers"] for value in values})
    ideal = alt.InlineData(values=[{"workers": 1, "times": 1, "most": counts[-1]}])
    scale = alt.Scale(zero=False, nice=False, padding=16)
    x = alt.X("workers:Q", title="workers", scale=scale, axis=alt.Axis(values=counts, format="d"))
    y = alt.Y("times:Q", title="times one worker's examples/s", scale=alt.Scale(domainMin=0))
    tooltip = _tooltip(("name", "strategy"), ("times", "times one worker's"), ("notes", "marks"))
    tooltip.append(alt.Tooltip("efficiency:Q", format=".0%"))
    chart, channels = alt.Chart().encode(x=x, y=y), palette.channels
    end = {"x": alt.X("most:Q"), "y": alt.Y("most:Q")}
    layers = [
        alt.Chart(ideal).mark_rule(strokeDash=[4, 4]).encode(x=x, y=y, x2="most:Q", y2="most:Q"),
        alt.Chart(ideal).mark_text(text="ideal", align="right", dx=-10, dy=-2, fontSize=11).encode(**end),
        chart.mark_line().encode(detail="label:N", color=channels["color"]),
        chart.mark_point(filled=True, opacity=1, size=60).encode(tooltip=tooltip, **channels),
    ]
    return _layers(layers, values, 240)


_OTHER = "other"
_RUN_PARTS: dict[str, Callable[[Run], float | None]] = {
    "start-up": lambda run: run.record.startup_seconds if run.record else None,
    "warm-up": lambda run: run.warm_up_seconds,
    "training": lambda run: _sum(epoch.train_seconds for epoch in run.epochs) - (run.warm_up_seconds or 0.0),
    "evaluation": lambda run: _sum(epoch.evaluation_seconds for epoch in run.epochs),
}


def run_seconds(comparison: Comparison) -> alt.LayerChart | None:
    """Draws the parts of the time of a run."""
    values = []
    for row in comparison.rows:
        parts = {name: row.median(figure) or 0.0 for name, figure in _RUN_PARTS.items()}
        if row.wall_seconds is not None:
            parts[_OTHER] = max(0.0, row.wall_seconds - sum(parts.values()))
        values += [_rounded(_named(row) | {"part": name, "value": value}) for name, value in parts.items() if row.good]
    order = [*_RUN_PARTS, _OTHER]
    return stacked(values, order, "seconds of a run, median of each part", "seconds") if values else None


def steps(comparison: Comparison) -> alt.LayerChart | None:
    """Draws the parts of a step, for cells with a trace."""
    values = [
        _rounded(_named(row) | {"part": part, "value": 100 * share})
        for row in comparison.rows
        for part, share in row.breakdown.items()
    ]
    order = list(dict.fromkeys(value["part"] for value in values))
    return stacked(values, order, "% of a traced step", "%") if values else None


def memory(comparison: Comparison) -> alt.LayerChart | None:
    """Draws the peak memory of each process."""
    values = [
        _rounded(_named(row) | {"part": f"process {rank}", "value": peak / 2**20})
        for row in comparison.rows
        for rank, peak in enumerate(row.peak_memory_bytes)
    ]
    return stacked(values, None, "MiB, the peaks of all processes added up", "MiB") if values else None


def price(comparison: Comparison) -> alt.LayerChart | None:
    """Draws the price of a run, or of reaching the target."""
    rows = [row for row in comparison.rows if row.price is not None]
    values = [_rounded(_named(row) | {"part": "price", "value": row.price}) for row in rows]
    to_target = any(row.reached for row in comparison.rows)
    title = "price until the target is reached" if to_target else "price of a run"
    return stacked(values, None, title, "price") if values else None


def stacked(values: Values, order: list[str] | None, title: str, unit: str) -> alt.LayerChart:
    """Draws stacked bars.

    Args:
        values: results of `_named` with `part` and `value`.
        order: the order of the parts, for which the page has a legend; `None` draws all parts in the same colour.
        title: the title of the axis.
        unit: the unit of the values, for the tooltip.
    """
    names = list(dict.fromkeys(value["name"] for value in values))
    parts = order or list(dict.fromkeys(value["part"] for value in values))
    values = [value | {"position": parts.index(value["part"])} for value in values]
    tooltip = _tooltip(("name", "strategy"), ("part", "part"), ("value", unit), ("notes", "marks"))
    bars = alt.Chart().mark_bar(height={"band": 0.62}).encode(
        y=alt.Y("name:N", sort=names, title=None),
        x=alt.X("value:Q", title=title, axis=alt.Axis(grid=True, tickCount=5)),
        order=alt.Order("position:Q"),
        tooltip=tooltip,
    )  # fmt: skip
    if order:
        scale = alt.Scale(domain=order)
        bars = bars.encode(color=alt.Color("part:O", sort=order, scale=scale, legend=None))
    return _layers([bars], values, alt.Step(30))


def parts(spec: Mapping[str, Any]) -> list[str]:
    """Returns the parts of stacked bars from their specification, in the order of their colours; else []."""
    color = spec["layer"][0].get("encoding", {}).get("color", {})
    return list(color["scale"]["domain"]) if color.get("field") == "part" else []


def _layers(layers: list[alt.Chart], data: Values | alt.NamedData, height: Any) -> alt.LayerChart:
    source = data if isinstance(data, alt.NamedData) else alt.InlineData(values=data)
    chart = alt.layer(*layers, data=source).properties(width="container", height=height)
    return chart.transform_filter(_SHOWN).add_params(alt.param(name="hidden", value=[]))


def _named(row: Row) -> dict[str, Any]:
    value: dict[str, Any] = {"cell": row.cell.name, "label": row.cell.label, "name": summary.marked_name(row)}
    return value | {"equal": not row.marks, "notes": "; ".join(row.marks)}


def _tooltip(*fields: tuple[str, str]) -> list[alt.Tooltip]:
    return [alt.Tooltip(field=field, title=title) for field, title in fields]


def _rounded(value: dict[str, Any]) -> dict[str, Any]:
    """Rounds to five digits, which suffice for pictures and tooltips."""
    return {name: float(f"{item:.5g}") if isinstance(item, float) else item for name, item in value.items()}


def _sum(values: Iterable[float | None]) -> float:
    return sum(value or 0.0 for value in values)
