"""Draws a contact sheet: some examples with their labels, masks or words in one picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tfdist.data.spec import PADDING, DataSpec

COLUMNS, ROWS = 6, 4
_INCHES, _DOTS = 1.6, 100


def write(path: Path, spec: DataSpec, x: Any, y: np.ndarray) -> None:
    """Writes a PNG of the first examples of (x, y), which `tfdist.data.spec` describes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(COLUMNS * _INCHES, ROWS * _INCHES), dpi=_DOTS, layout="constrained")
    if len(spec.input_shape) == 3:
        _draw_pictures(figure, spec, x, y)
    else:
        figure.text(0.02, 0.98, "\n".join(_lines(spec, x, y)), va="top", family="monospace", size=7)
    figure.savefig(path)


def _draw_pictures(figure: Any, spec: DataSpec, x: np.ndarray, y: np.ndarray) -> None:
    """Draws each picture below its class, or beside its mask."""
    masks = spec.task == "segmentation"
    panels = 2 if masks else 1
    axes = figure.subplots(ROWS, COLUMNS).reshape(-1)
    for panel in axes:
        panel.set_axis_off()
    for number, example in enumerate(x[: len(axes) // panels]):
        grey = example.shape[-1] == 1
        panel = axes[number * panels]
        panel.imshow(example[..., 0] if grey else example, cmap="gray" if grey else None, vmin=0, vmax=1)
        if masks:
            # 20 colours distinguish neighbouring classes; ignored pixels stay white.
            shown = np.ma.masked_equal(y[number], -1 if spec.ignored_class is None else spec.ignored_class)
            axes[number * panels + 1].imshow(shown % 20, cmap="tab20", vmin=0, vmax=19, interpolation="nearest")
        elif spec.task == "classification":
            panel.set_title(_class(spec, int(y[number])), size=8)


def _lines(spec: DataSpec, x: Any, y: np.ndarray) -> list[str]:
    if spec.task == "translation":
        return [
            line
            for source, target in zip(x["source"][: ROWS * 3], y, strict=False)
            for line in (_words(spec.vocabulary, source), "    " + _words(spec.target_vocabulary, target))
        ]
    if spec.task == "characters":
        pairs = zip(x[: ROWS * 6], y, strict=False)
        return [f"{_characters(spec, text)}  ->  {_characters(spec, target)}" for text, target in pairs]
    words = spec.task == "text_classification"
    return [
        f"{_class(spec, int(label)):>10}  "
        + (_words(spec.vocabulary, example) if words else np.array2string(example, precision=3))
        for example, label in zip(x[: ROWS * 6], y, strict=False)
    ]


def _class(spec: DataSpec, label: int) -> str:
    return spec.class_names[label] if spec.class_names else str(label)


def _words(vocabulary: tuple[str, ...], tokens: np.ndarray, longest: int = 150) -> str:
    words = [vocabulary[token] if vocabulary else str(token) for token in tokens if token != PADDING]
    # A dollar would begin a formula in Matplotlib.
    text = " ".join(words).replace("$", r"\$")
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _characters(spec: DataSpec, tokens: np.ndarray) -> str:
    text = "".join(spec.vocabulary[token] if spec.vocabulary else chr(97 + token % 26) for token in tokens[:60])
    return repr(text).replace("$", r"\$")
