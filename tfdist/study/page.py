"""The report as a self-contained HTML page, whose pictures are drawn by an embedded copy of Vega, and its web server.

The template escapes names from users, also in the JSON of the pictures. In addition, the page's content security policy
allows no script but the page's own. The server serves browsers on this machine, and nothing but the page.

Synopsis:

    >>> import urllib.request
    >>> with serving("<p>all runs</p>") as server:
    ...     urllib.request.urlopen(address(server)).read()
    b'<p>all runs</p>'
"""

from __future__ import annotations

import base64
import hashlib
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import altair as alt
import jinja2
import vl_convert
from markupsafe import Markup, escape

from tfdist.errors import UsageError
from tfdist.study import charts, doubts, summary, verdicts
from tfdist.study.charts import Palette
from tfdist.study.results import Comparison

FOLDER = Path(__file__).parent
HOST = "127.0.0.1"
HTTP_PORT = 80  # which a browser leaves out of the Host header
PICTURE_WIDTH = 720  # pixels, for the picture of the Markdown report


@dataclass(frozen=True)
class Figure:
    """A picture of the page: the ID of its element, title, caption, Vega-Lite specification, and the parts of bars."""

    id: str
    title: str
    caption: str
    spec: dict[str, Any]
    parts: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Entry:
    """A strategy in the legend: its name, the number of its colour, its shape, and the lengths of its dashes."""

    name: str
    series: int
    shape: str
    dash: str


@dataclass(frozen=True)
class Section:
    """The section of a case, with its tables and pictures."""

    id: str
    title: str
    answer: str
    figures: dict[str, summary.Table]
    notes: list[str]
    doubts: list[str]
    checks: summary.Table
    errors: dict[str, str]
    commands: dict[str, str]
    legend: list[Entry]
    pictures: list[Figure] = field(default_factory=list)


def html(comparisons: Sequence[Comparison]) -> str:
    """Returns the page."""
    palette = Palette(comparisons)
    bounds = verdicts.of(comparisons)
    sections = [
        _section(f"case-{index}", comparison, palette, len(comparisons)) for index, comparison in enumerate(comparisons)
    ]
    first = _first(comparisons, palette)
    weak = _weak_scaling(comparisons, palette)
    pictures = [*([first] if first else []), *(figure for section in sections for figure in section.pictures), *weak]
    script = vl_convert.javascript_bundle((FOLDER / "page.js").read_text(encoding="utf-8"))
    script = script.replace("</script", "<\\/script")  # would end the element, even within a string
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
        any_mark=any(row.marks for comparison in comparisons for row in comparison.rows),
        first=first,
        first_legend=_legend(comparisons, palette) if len(comparisons) > 1 else [],
        bounds=summary.bounds(bounds) if bounds else None,
        verdicts=summary.verdicts(bounds),
        sections=sections,
        weak=weak,
        colors={"light": charts.LIGHT, "dark": charts.DARK},
        style=Markup((FOLDER / "page.css").read_text(encoding="utf-8")),
        font=Markup(charts.FONT),
        data={
            "config": charts.configuration(references),
            "datasets": {f"case-{index}": charts.curves(comparison) for index, comparison in enumerate(comparisons)},
            "figures": [{"id": figure.id, "spec": figure.spec} for figure in pictures],
        },
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def picture(comparisons: Sequence[Comparison]) -> str:
    """Returns the picture of the result as SVG on white; "" if there is nothing to compare."""
    first = _first(comparisons, Palette(comparisons))
    if first is None:
        return ""
    config = charts.configuration(charts.LIGHT) | {"background": charts.LIGHT["paper"], "padding": 16}
    return str(vl_convert.vegalite_to_svg(first.spec | {"width": PICTURE_WIDTH, "config": config}))


@contextmanager
def serving(html: str, port: int = 0) -> Iterator[ThreadingHTTPServer]:
    """Serves the page from a thread until the context ends, to requests that name this machine.

    Args:
        html: the page.
        port: the port to listen on; 0 for any free port.

    Raises:
        UsageError: the port is in use, or not valid.
    """
    page = html.encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers.get("Host") not in hosts:
                self.send_error(403, "Foreign Host header")
                return
            if self.path != "/":
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *_: object) -> None:
            """Does not log requests."""

    try:
        server = ThreadingHTTPServer((HOST, port), Handler)
    except (OSError, OverflowError) as error:
        raise UsageError(f"The report cannot be shown on port {port}: {error}", "name another `--port`") from error
    # A web site may let its name resolve to this machine (DNS rebinding); the requests of its pages have that name.
    names = {HOST, "localhost"}
    hosts = {f"{name}:{server.server_port}" for name in names} | (names if server.server_port == HTTP_PORT else set())
    with server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def address(server: ThreadingHTTPServer) -> str:
    """Returns the URL of the page."""
    return f"http://{HOST}:{server.server_port}/"


def _first(comparisons: Sequence[Comparison], palette: Palette) -> Figure | None:
    """The picture of the result."""
    caption = (
        "Ratio of the training times per epoch within a round: the geometric mean and its interval (Student's t). "
    )
    caption += "In at most 5 % of studies does any interval of a table miss the line at 1 without a difference."
    chart = charts.overview(comparisons, palette) if comparisons[1:] else charts.speed(comparisons[0], palette)
    return None if chart is None else Figure("answer", "", caption, _spec(chart))


def _weak_scaling(comparisons: Sequence[Comparison], palette: Palette) -> list[Figure]:
    figures: list[Figure] = []
    for case, chart in charts.weak_scaling(comparisons, palette).items():
        title = f"{case.model} on {case.dataset}, {case.batch_size} examples per worker"
        figures.append(Figure(f"weak-{len(figures)}", title, "", _spec(chart)))
    return figures


def _section(name: str, comparison: Comparison, palette: Palette, cases: int) -> Section:
    return Section(
        id=name,
        title=comparison.case.title,
        answer=summary.answer(comparison),
        figures=summary.figures_by_group(comparison),
        notes=summary.notes(comparison),
        doubts=doubts.of(comparison),
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
    """The pictures of a case for which there is data."""
    values = charts.curves(comparison)
    pictures: list[tuple[str, str, alt.LayerChart | None]] = []
    if cases > 1:
        pictures.append(("Speed", "", charts.speed(comparison, palette)))
    spread = "Medians of the runs, with the lowest and the highest."
    clock = f"{spread} Time starts at the first access to data, and includes evaluation."
    for metric, title in (("accuracy", "Validation accuracy"), ("loss", "Training loss")):
        for by, unit in (("epoch", "epoch"), ("seconds", "time")):
            has_data = any(value.get(metric) is not None and value.get(by) is not None for value in values)
            chart = charts.curve(values, metric, by, name, _target(comparison), palette) if has_data else None
            pictures.append((f"{title} by {unit}", spread if by == "epoch" else clock, chart))
    pictures += [
        ("Scaling", "The same global batch on more workers; dashed: ideal.", charts.scaling(comparison, palette)),
        ("Seconds of a run", "From the start of the command to its end.", charts.run_seconds(comparison)),
        ("Parts of a step", "From a separate run with a trace.", charts.steps(comparison)),
        ("Peak memory", "The resident set size of each process.", charts.memory(comparison)),
        ("Cost", "", charts.price(comparison)),
    ]
    return [
        Figure(f"{name}-picture-{index}", title, caption, (spec := _spec(chart)), charts.parts(spec))
        for index, (title, caption, chart) in enumerate(pictures)
        if chart is not None
    ]


def _target(comparison: Comparison) -> float | None:
    """The validation accuracy at which the runs stop; `None` without a target, or if the targets differ."""
    records = (run.record for row in comparison.rows for run in row.runs)
    targets = [record.time_to_target for record in records if record is not None and record.time_to_target]
    values = {target.target for target in targets if target.monitor == "val_accuracy"}
    return values.pop() if len(values) == 1 else None


def _legend(comparisons: Sequence[Comparison], palette: Palette) -> list[Entry]:
    cells = {row.cell.name: row.cell for comparison in comparisons for row in comparison.rows if row.good}
    entries = []
    for name, cell in cells.items():
        dash = " ".join(map(str, palette.dash(cell.workers)))
        entries.append(Entry(name, palette.series(cell.label), palette.shape(cell.label), dash))
    return entries


def _spec(chart: alt.LayerChart) -> dict[str, Any]:
    """Returns the specification without the entries that the page sets for all pictures."""
    spec: Mapping[str, Any] = chart.to_dict(validate=False)  # its parts were validated on creation
    return {name: value for name, value in spec.items() if name not in ("$schema", "config")}


def _with_code(text: str) -> Markup:
    """Escapes a text, and marks names in backticks as code."""
    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text))))
