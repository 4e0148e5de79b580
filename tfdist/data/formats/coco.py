"""COCO's annotations of instances, as masks with a class a pixel.

Source: T.-Y. Lin and others, "Microsoft COCO: Common Objects in Context", ECCV 2014.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tfdist.data.formats import local_files
from tfdist.data.pipeline.picture_files import Pictures
from tfdist.errors import DataError


@dataclass(frozen=True)
class Instances:
    """The instances in a picture.

    Attributes:
        size: height and width of the picture in pixels.
        outlines: class and outline of each, the largest first: polygons `[x0, y0, x1, y1, ...]` in pixels, or, for a
            crowd, `size` and `counts`, a list of run lengths.
    """

    size: tuple[int, int]
    outlines: Sequence[tuple[int, Any]]


# The pictures of a split, and the names of their classes.
Part = tuple[Pictures, tuple[str, ...]]


def read(annotations: Path, pictures: Path) -> Part:
    """The pictures of a file of annotations, and the names of the classes: 0 is "background", then COCO's categories.

    Args:
        annotations: such as `instances_val2017.json`.
        pictures: the folder of the pictures.

    Raises:
        DataError: the file is no such file, or names an unknown category.
    """
    try:
        content = json.loads(local_files.content(annotations))
        categories = sorted(content["categories"], key=lambda category: category["id"])
        number = {category["id"]: index for index, category in enumerate(categories, 1)}
        found: dict[int, list[Any]] = {picture["id"]: [] for picture in content["images"]}
        for annotation in content["annotations"]:
            found[annotation["image_id"]].append(annotation)
        instances = [
            Instances((picture["height"], picture["width"]), _outlines(found[picture["id"]], number))
            for picture in content["images"]
        ]
        paths = [str(pictures / picture["file_name"]) for picture in content["images"]]
        names = ("background", *(str(category["name"]) for category in categories))
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"`{annotations}` is not a file of COCO's instances: {type(error).__name__} {error}",
            "fetch the annotations again",
        ) from error
    return Pictures(paths, instances, draw), names


def draw(instances: Instances) -> np.ndarray:
    """The mask: uint8 `[h, w]`, 0 where nothing is; what is smaller lies on what is larger."""
    mask = np.zeros(instances.size, np.uint8)
    for label, outline in instances.outlines:
        if isinstance(outline, dict):
            mask[_filled(outline)] = label
            continue
        for polygon in outline:
            mask[_inside(polygon, instances.size)] = label
    return mask


def _inside(polygon: Sequence[float], size: tuple[int, int]) -> np.ndarray:
    """The pixels whose middle is inside of a polygon: bool `[h, w]`.

    Pillow's polygons have all pixels that the outline touches besides, so that they are larger than COCO's area.
    """
    height, width = size
    # COCO counts from the picture's edge; here 0 is the middle of the first pixel.
    x, y = np.reshape(polygon, (-1, 2)).T - 0.5
    next_x, next_y = np.roll(x, -1), np.roll(y, -1)
    rows = np.arange(height)[:, np.newaxis]
    row, side = np.nonzero((y <= rows) != (next_y <= rows))
    crossing = x[side] + (row - y[side]) * (next_x - x)[side] / (next_y - y)[side]
    crossings = np.zeros((height, width + 1), np.uint8)  # an even number stays even beyond 255
    np.add.at(crossings, (row, np.ceil(crossing).clip(0, width).astype(int)), 1)
    return crossings.cumsum(axis=1, dtype=np.uint8)[:, :-1] % 2 == 1


def _outlines(annotations: list[Any], number: dict[int, int]) -> list[tuple[int, Any]]:
    largest_first = sorted(annotations, key=lambda annotation: -annotation["area"])
    return [(number[annotation["category_id"]], _outline(annotation["segmentation"])) for annotation in largest_first]


def _outline(segmentation: Any) -> Any:
    """Polygons as they are; run lengths as a list, also where they are compressed.

    Raises:
        ValueError: the runs do not cover their picture.
    """
    if not isinstance(segmentation, dict):
        return segmentation
    (height, width), counts = segmentation["size"], segmentation["counts"]
    if isinstance(counts, str):
        counts = _uncompressed(counts)
    if min(counts) < 0 or sum(counts) != height * width:
        raise ValueError(f"run lengths add up to {sum(counts)}, and the picture has {height}x{width} pixels")
    return {"size": (height, width), "counts": counts}


def _uncompressed(text: str) -> list[int]:
    """The run lengths that COCO's `rleToString` wrote.

    A character is six bits, counted from "0": five bits of a number, the lowest first, and whether more of it follows.
    The numbers are lengths; from the fourth on, how much a length is above the last but one.
    """
    lengths: list[int] = []
    number = shift = 0
    for byte in text.encode():
        bits = byte - ord("0")
        number |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            continue
        if bits & 16:  # the sign
            number -= 1 << shift
        lengths.append(number + (lengths[-2] if len(lengths) > 2 else 0))
        number = shift = 0
    return lengths


def _filled(runs: dict[str, Any]) -> np.ndarray:
    """What run lengths cover: bool `[h, w]`; the runs go down the columns, and the first is empty."""
    height, width = runs["size"]
    counts = runs["counts"]
    return np.repeat(np.arange(len(counts)) % 2 == 1, counts).reshape(width, height).T
