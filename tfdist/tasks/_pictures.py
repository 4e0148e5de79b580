"""The figures at the end of a run: grids of images, a confusion matrix, and a calibration curve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfdist import extras, files


def grid(path: Path, columns: Sequence[tuple[str, Sequence[Any]]], title: str) -> None:
    """Draws a grid of images.

    Args:
        path: the PNG file.
        columns: the title of each column, and its images, one per row: `[H, W, 1]` or `[H, W, 3]` in [0, 1].
        title: the title of the figure.
    """
    rows = len(columns[0][1])
    figure = _figure((2.4 * len(columns), 1.9 * rows + 0.6))
    figure.suptitle(title, fontweight="bold")
    axes = figure.subplots(rows, len(columns), squeeze=False)
    for column, (name, images) in enumerate(columns):
        axes[0][column].set_title(name)
        for row, image in enumerate(images):
            axes[row][column].imshow(np.squeeze(np.clip(image, 0, 1)), cmap="gray", vmin=0, vmax=1)
            axes[row][column].set_axis_off()
    files.write_atomically(path, figure.savefig)


def mosaics(path: Path, panels: Sequence[tuple[str, np.ndarray]], title: str) -> None:
    """Draws sets of images side by side, each set as a square of tiles.

    Args:
        path: the PNG file.
        panels: the title of each set, and its images: `[N, H, W, 1]` or `[N, H, W, 3]` in [0, 1].
        title: the title of the figure.
    """
    figure = _figure((5.0 * len(panels), 5.6))
    figure.suptitle(title, fontweight="bold")
    for axes, (name, images) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        axes.set_title(name)
        axes.imshow(np.squeeze(_tiled(np.clip(images, 0, 1))), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        axes.set_axis_off()
    files.write_atomically(path, figure.savefig)


def _tiled(images: np.ndarray) -> np.ndarray:
    """Images `[N, H, W, C]` as one image, row by row, with a pixel between neighbours."""
    side = math.ceil(math.sqrt(len(images)))
    missing = side * side - len(images)
    tiles = np.pad(images, ((0, missing), (0, 1), (0, 1), (0, 0)), constant_values=1)
    _, height, width, channels = tiles.shape
    rows = tiles.reshape(side, side, height, width, channels).swapaxes(1, 2)
    return rows.reshape(side * height, side * width, channels)[:-1, :-1]


def colours(mask: np.ndarray, classes: int, ignored_class: int | None) -> np.ndarray:
    """A mask `[H, W]` of class numbers as an image `[H, W, 3]`: one colour per class, and black for ignored pixels."""
    with extras.importing("train", "The picture"):
        import matplotlib

    palette = matplotlib.colormaps["tab20"](np.arange(classes) % 20)[:, :3]
    image = palette[np.clip(mask, 0, classes - 1)]
    if ignored_class is not None:
        image[mask == ignored_class] = 0
    return image


def confusion(path: Path, matrix: np.ndarray, names: Sequence[str], title: str) -> None:
    """Draws a confusion matrix: how often class i (row) was predicted as class j (column).

    Args:
        path: the PNG file.
        matrix: counts `[classes, classes]`.
        names: the names of the classes; if empty, their numbers are shown.
        title: the title of the figure.
    """
    classes = len(matrix)
    fractions = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    side = min(12.0, 3.0 + 0.5 * classes)
    figure = _figure((side + 1.2, side))
    axes = figure.subplots()
    image = axes.imshow(fractions, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, label="fraction of the class")
    axes.set(title=title, xlabel="predicted", ylabel="true")
    if classes <= 30:
        ticks = list(names) or list(map(str, range(classes)))
        axes.set_xticks(range(classes), ticks, rotation=90 if max(map(len, ticks)) > 3 else 0)
        axes.set_yticks(range(classes), ticks)
        for row, column in np.argwhere(matrix):
            colour = "white" if fractions[row, column] > 0.5 else "black"
            axes.text(column, row, f"{matrix[row, column]:,}", ha="center", va="center", color=colour, fontsize=7)
    files.write_atomically(path, figure.savefig)


def calibration(path: Path, points: np.ndarray, title: str) -> None:
    """Draws how often an event happens over how often it was predicted; the diagonal is a perfect calibration.

    Args:
        path: the PNG file.
        points: the mean predicted probability and the fraction of events of each group of examples, `[groups, 2]`.
        title: the title of the figure.
    """
    figure = _figure((5.6, 5.2))
    axes = figure.subplots()
    axes.set_title(title, fontsize=9)
    largest = min(1.0, 1.1 * points.max()) or 1.0  # clicks are rare
    axes.plot([0, largest], [0, largest], color="gray", linestyle="--", linewidth=1)
    axes.plot(*points.T, marker="o")
    axes.set(xlabel="predicted probability", ylabel="fraction of clicks", xlim=(0, largest), ylim=(0, largest))
    files.write_atomically(path, figure.savefig)


def _figure(size: tuple[float, float]) -> Any:
    # Not pyplot, which would keep the figure in memory and choose a window system.
    with extras.importing("train", "The picture"):
        from matplotlib.figure import Figure

    return Figure(figsize=size, dpi=120, layout="constrained")
