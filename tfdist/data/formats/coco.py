"""COCO's instance annotations, as masks with one class per pixel.

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
from tfdist.data.input.picture_files import Pictures
from tfdist.errors import DataError


@dataclass(frozen=True)
class Instances:
    """The instances in a picture.

    Attributes:
        size: height and width of the picture in pixels.
        outlines: class and outline of each instance, the largest first. An outline is a list of polygons `[x0, y0, x1,
            y1, ...]` in pixels or, for a crowd, a dict of `size` and `counts`, a list of run lengths.
    """

    size: tuple[int, int]
    outlines: Sequence[tuple[int, Any]]


# The pictures of a split, and the names of the classes.
Part = tuple[Pictures, tuple[str, ...]]


def read(annotations: Path, pictures: Path) -> Part:
    """The pictures of an annotation file, and the names of the classes: 0 is "background", then COCO's categories.

    Args:
        annotations: the annotation file, such as `instances_val2017.json`.
        pictures: the folder of the pictures.

    Raises:
        DataError: the file has another format, or names an unknown category.
    """
    try:
        content = json.loads(local_files.content(annotations))
        categories = sorted(content["categories"], key=lambda category: category["id"])
        number = {category["id"]: index for index, category in enumerate(categories, 1)}
        of_picture: dict[int, list[Any]] = {picture["id"]: [] for picture in content["images"]}
        for annotation in content["annotations"]:
            of_picture[annotation["image_id"]].append(annotation)
        instances = [
            Instances((picture["height"], picture["width"]), _outlines(of_picture[picture["id"]], number))
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
    """The mask: uint8 `[h, w]`, 0 for background; smaller instances cover larger ones."""
    mask = np.zeros(instances.size, np.uint8)
    for label, outline in instances.outlines:
        if isinstance(outline, dict):
            mask[_filled(outline)] = label
            continue
        for polygon in outline:
            mask[_inside(polygon, instances.size)] = label
    return mask


def _inside(polygon: Sequence[float], size: tuple[int, int]) -> np.ndarray:
    """The pixels whose centre is inside a polygon: bool `[h, w]`.

    Pillow is not used because its polygons include all pixels that the outline touches, and so are larger than COCO's.
    """
    height, width = size
    # COCO's coordinates begin at the edge of the picture; here 0 is the centre of the first pixel.
    x, y = np.reshape(polygon, (-1, 2)).T - 0.5
    next_x, next_y = np.roll(x, -1), np.roll(y, -1)
    rows = np.arange(height)[:, np.newaxis]
    row, side = np.nonzero((y <= rows) != (next_y <= rows))
    crossing = x[side] + (row - y[side]) * (next_x - x)[side] / (next_y - y)[side]
    crossings = np.zeros((height, width + 1), np.uint8)  # an overflow at 256 leaves even numbers even
    np.add.at(crossings, (row, np.ceil(crossing).clip(0, width).astype(int)), 1)
    return crossings.cumsum(axis=1, dtype=np.uint8)[:, :-1] % 2 == 1


def _outlines(annotations: list[Any], number: dict[int, int]) -> list[tuple[int, Any]]:
    largest_first = sorted(annotations, key=lambda annotation: -annotation["area"])
    return [(number[annotation["category_id"]], outline_of(annotation["segmentation"])) for annotation in largest_first]


def outline_of(segmentation: Any) -> Any:
    """Returns polygons unchanged, and run lengths as a list, which is decompressed if necessary.

    Raises:
        ValueError: the runs do not cover their picture.
    """
    if not isinstance(segmentation, dict):
        return segmentation
    (height, width), counts = segmentation["size"], segmentation["counts"]
    if isinstance(counts, str):
        counts = _uncompressed(counts)
    if min(counts) < 0 or sum(counts) != height * width:
        raise ValueError(f"run lengths add up to {sum(counts)}, but the picture has {height}x{width} pixels")
    return {"size": (height, width), "counts": counts}


def _uncompressed(text: str) -> list[int]:
    """The run lengths in a string of COCO's `rleToString`.

    A character minus "0" is six bits: five bits of a number, the lowest bits first, and whether more bits follow. The
    first three numbers are lengths; each later number is the difference from the length two positions before it.
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
    """The pixels that run lengths cover: bool `[h, w]`. Runs go down the columns, and the first run is background."""
    height, width = runs["size"]
    counts = runs["counts"]
    return np.repeat(np.arange(len(counts)) % 2 == 1, counts).reshape(width, height).T
