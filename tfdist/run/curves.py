"""The picture of a run: loss and accuracy by epoch, for training and validation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdist.run.schema import EpochRecord, RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's blue and vermilion differ for any colour vision; in grey the line styles differ.
_TRAIN: dict[str, Any] = {
    "color": "#0072B2",
    "linestyle": "--",
    "marker": "o",
    "markersize": 4,
    "label": "training",
}
_VALIDATION: dict[str, Any] = {
    "color": "#D55E00",
    "linestyle": "-",
    "marker": "s",
    "markersize": 4,
    "label": "validation",
}


def draw(record: RunRecord, path: Path) -> None:
    """Draws `record`, which has at least one epoch, into the picture `path`."""
    # No pyplot: it would keep the figure, and choose a window system.
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    names = ["loss", *_second_panel(record)]
    figure = Figure(figsize=(5.4 * len(names), 4.2), dpi=120, layout=ConstrainedLayoutEngine(wspace=0.06))
    figure.suptitle(_title(record), fontweight="bold")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        _draw_panel(axes, record.epochs, name)
    figure.savefig(path)


def _title(record: RunRecord) -> str:
    replicas = f" on {record.strategy.replicas} replicas" if record.strategy.replicas > 1 else ""
    status = "" if record.status in ("running", "completed") else f" ({record.status})"
    return f"{record.model.name}, {record.dataset.name}, {record.strategy.name}{replicas}{status}"


def _second_panel(record: RunRecord) -> list[str]:
    """The accuracy where there is one, else the first metric beside the loss."""
    names = dict.fromkeys(name for epoch in record.epochs for name in epoch.metrics)
    others = [n for n in names if not n.startswith("val_") and n not in ("loss", "learning_rate")]
    return sorted(others, key=lambda name: "accuracy" not in name)[:1]


def _draw_panel(axes: Axes, epochs: Sequence[EpochRecord], name: str) -> None:
    from matplotlib.ticker import MaxNLocator

    percent = "accuracy" in name
    numbers = [epoch.epoch for epoch in epochs]
    train = _series(epochs, name, percent)
    validation = _series(epochs, f"val_{name}", percent)
    for values, style in ((train, _TRAIN), (validation, _VALIDATION)):
        if any(map(math.isfinite, values)):
            axes.plot(numbers, values, **style)
    judged = validation if any(map(math.isfinite, validation)) else train
    _mark_best(axes, numbers, judged, largest=percent)
    axes.set_xlabel("epoch")
    axes.set_ylabel(f"{name} (%)" if percent else f"{name} (mean per example)")
    axes.set_xlim(numbers[0] - 0.5, numbers[-1] + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        # Above the axes the legend covers no point.
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3, frameon=False, fontsize=9, columnspacing=1.2)
    else:
        axes.text(0.5, 0.5, "no finite values", ha="center", transform=axes.transAxes)


def _series(epochs: Sequence[EpochRecord], name: str, percent: bool) -> list[float]:
    """The metric by epoch; an epoch without it is NaN, a gap in the line."""
    values = (epoch.metrics.get(name) for epoch in epochs)
    return [math.nan if value is None else value * (100 if percent else 1) for value in values]


def _mark_best(axes: Axes, numbers: Sequence[int], values: Sequence[float], largest: bool) -> None:
    finite = [(value, number) for value, number in zip(values, numbers, strict=True) if math.isfinite(value)]
    if not finite:
        return
    best, number = max(finite) if largest else min(finite)
    label = f"best: {best:.2f} % in epoch {number}" if largest else f"best: {best:.4g} in epoch {number}"
    axes.plot(
        [number],
        [best],
        "o",
        markersize=12,
        fillstyle="none",
        color="black",
        markeredgewidth=1.5,
        label=label,
    )
