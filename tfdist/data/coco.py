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

from tfdist.data import plain
from tfdist.data.pictures import Pictures
from tfdist.errors import DataError


@dataclass(frozen=True)
class Instances:
    """The instances in a picture.

    Attributes:
        size: height and width of the picture in pixels.
        outlines: class and outline of each, the largest first: polygons `[x0, y0, x1, y1, ...]` in pixels, or, for a
            crowd, run lengths as COCO writes them.
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
        content = json.loads(plain.content(annotations))
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
    from PIL import Image, ImageDraw

    height, width = instances.size
    canvas = Image.new("L", (width, height), 0)
    pen = ImageDraw.Draw(canvas)
    for label, outline in instances.outlines:
        if isinstance(outline, dict):
            canvas.paste(label, mask=Image.fromarray(_filled(outline) * np.uint8(255)))
            continue
        for polygon in outline:
            # COCO counts from the picture's edge, Pillow from the middle of its first pixel.
            pen.polygon([place - 0.5 for place in polygon], fill=label)
    return np.asarray(canvas)


def _outlines(annotations: list[Any], number: dict[int, int]) -> list[tuple[int, Any]]:
    largest_first = sorted(annotations, key=lambda annotation: -annotation["area"])
    found = [(number[annotation["category_id"]], annotation["segmentation"]) for annotation in largest_first]
    if any(isinstance(outline, dict) and isinstance(outline["counts"], str) for _, outline in found):
        raise ValueError("run lengths are compressed, and COCO's own are lists of numbers")
    return found


def _filled(runs: dict[str, Any]) -> np.ndarray:
    """What run lengths cover: uint8 `[h, w]`, 0 and 1; the runs go down the columns, and the first is empty."""
    height, width = runs["size"]
    counts = runs["counts"]
    return np.repeat(np.arange(len(counts)) % 2, counts).astype(np.uint8).reshape(width, height).T
