"""Lines that are labelled at their ends: a legend of more than seven colours or shapes cannot be read.

Synopsis:

    >>> spread([10.0, 11.0, 50.0], gap=8.0, most=60.0)
    [10.0, 18.0, 50.0]
    >>> spread([58.0, 59.0], gap=8.0, most=60.0)
    [52.0, 60.0]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from tfdist import extras

WIDTH, HEIGHT = 300, 320  # pixels of a panel, without labels
LABELS, LEADER, GAP = 150, 16, 13  # pixels: room for labels, lines that lead to them, and from label to label
COLOURS = ("#1b1b1b", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b07d00", "#3f8fc4")  # Okabe and Ito's, darker
DASHES = ([1, 0], [6, 3], [2, 2])

Panel = Mapping[str, Mapping[int, float]]  # a number by x, by the label of the line


def panels(values: Mapping[str, Panel], x_title: str, y_title: str) -> Any:
    """Returns a chart with the panels, by their titles, next to each other; they have the same axes."""
    altair = _altair()
    numbers = [number for panel in values.values() for line in panel.values() for number in line.values()]
    charts = [_panel(title, panel, (min(numbers), max(numbers)), x_title, y_title) for title, panel in values.items()]
    return altair.hconcat(*charts, spacing=LABELS).configure_view(stroke=None).properties(padding={"right": LABELS})


def _altair() -> Any:
    with extras.importing("report", "The picture"):
        import altair
    return altair


def _panel(title: str, panel: Panel, domain: tuple[float, float], x_title: str, y_title: str) -> Any:
    altair = _altair()
    labels = [label for label, line in panel.items() if line]
    points = [
        {"label": label, "x": x, "y": y, "dash": index // len(COLOURS)}
        for index, label in enumerate(labels)
        for x, y in panel[label].items()
    ]
    ticks = sorted({number for line in panel.values() for number in line})
    scale = altair.Scale(domain=labels, range=[COLOURS[index % len(COLOURS)] for index in range(len(labels))])
    colour = altair.Color("label:N", scale=scale, legend=None)
    y = altair.Y("y:Q", title=y_title, scale=altair.Scale(domain=domain, nice=False, padding=6))
    x = altair.X("x:Q", title=x_title, axis=altair.Axis(values=ticks, grid=False), scale=altair.Scale(zero=False))
    dash = altair.StrokeDash("dash:O", scale=altair.Scale(domain=[0, 1, 2], range=DASHES), legend=None)
    chart = altair.Chart(altair.Data(values=points), title=altair.Title(title, anchor="start", fontSize=12)).encode(
        x=x, y=y, color=colour
    )
    ends = _ends(panel, labels, domain)
    leaders = altair.Chart(altair.Data(values=ends)).encode(color=colour)
    start, end = altair.value(WIDTH + 4), altair.value(WIDTH + LEADER)
    layers = [
        chart.mark_line(strokeWidth=2).encode(strokeDash=dash),
        chart.mark_point(filled=True, opacity=1, size=30),
        leaders.mark_rule(strokeWidth=1).encode(x=start, x2=end, y=altair.Y("y:Q"), y2="label_y:Q"),
        leaders.mark_text(align="left", dx=3, fontSize=11).encode(x=end, y=altair.Y("label_y:Q"), text="label:N"),
    ]
    return altair.layer(*layers).properties(width=WIDTH, height=HEIGHT)


def _ends(panel: Panel, labels: Sequence[str], domain: tuple[float, float]) -> list[dict[str, Any]]:
    """The last number of each line, and the number at whose height its label is."""
    low, high = domain
    per_pixel = (high - low) / HEIGHT or 1.0
    last = {label: panel[label][max(panel[label])] for label in labels}
    ordered = sorted(labels, key=last.__getitem__)
    heights = spread([(last[label] - low) / per_pixel for label in ordered], GAP, HEIGHT)
    return [
        {"label": label, "y": last[label], "label_y": low + height * per_pixel}
        for label, height in zip(ordered, heights, strict=True)
    ]


def spread(positions: Sequence[float], gap: float, most: float) -> list[float]:
    """Moves ascending positions up, and then down to at most `most`, until neighbours are `gap` apart."""
    moved = list(positions)
    for index, _ in enumerate(pairwise(positions), start=1):
        moved[index] = max(moved[index], moved[index - 1] + gap)
    limit = most
    for index in reversed(range(len(moved))):
        moved[index] = min(moved[index], limit)
        limit = moved[index] - gap
    return moved
