"""The picture of predictions: examples a second by the number of workers, beside a line without any loss."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tfdist.advisor.predictions import Prediction
from tfdist.errors import UsageError

FORMATS = (".svg", ".png", ".html")
# Okabe and Ito's colours, which differ for any colour vision.
_COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]
IDEAL = "ideal"


def require_format(path: Path) -> None:
    """Raises `UsageError` unless pictures are written in the format of `path`."""
    if path.suffix not in FORMATS:
        raise UsageError(f"`--curves` is `{path}`", f"name a file that ends with one of {', '.join(FORMATS)}")


def draw(found: Sequence[Prediction], path: Path) -> None:
    """Draws predictions into the file `path`.

    Raises:
        UsageError: it cannot be written.
    """
    import altair

    single = next(one.examples_per_second for one in found if one.strategy == "single")
    counts = sorted({one.workers for one in found} | {1})
    points = [
        {"workers": one.workers, "examples per second": one.examples_per_second, "strategy": one.strategy}
        for one in found
    ]
    names = list(dict.fromkeys(one.strategy for one in found if one.strategy != "single"))
    points += [{"workers": 1, "examples per second": single, "strategy": name} for name in names]
    points += [{"workers": n, "examples per second": n * single, "strategy": IDEAL} for n in counts]
    domain = ["single", *names, IDEAL]
    colours = altair.Scale(domain=domain, range=[*_COLOURS[: len(names) + 1], "#999999"])
    chart = (
        altair.Chart(altair.Data(values=points), title="Predicted training speed")
        .mark_line(point=True)
        .encode(
            x=altair.X("workers:Q", axis=altair.Axis(tickMinStep=1)),
            y=altair.Y("examples per second:Q"),
            color=altair.Color("strategy:N", scale=colours),
            strokeDash=altair.condition(f"datum.strategy == '{IDEAL}'", altair.value([4, 4]), altair.value([1, 0])),
            shape=altair.Shape("strategy:N", scale=altair.Scale(domain=domain)),
            tooltip=["strategy:N", "workers:Q", altair.Tooltip("examples per second:Q", format=",.0f")],
        )
        .properties(width=480, height=320)
    )
    try:
        chart.save(str(path), inline=True) if path.suffix == ".html" else chart.save(str(path))
    except OSError as error:
        raise UsageError(f"The curves cannot be written to `{path}`: {error.strerror}", "name another file") from error
