"""Folders in COCO's layout, as semantic segmentation: masks are drawn from the instance annotations.

Source: T.-Y. Lin and others, "Microsoft COCO: Common Objects in Context", ECCV 2014.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path

import numpy as np

from tfdist.data.formats import coco, local_files
from tfdist.data.input.picture_headers import MAX_PIXELS
from tfdist.data.input.pictures import PictureSource
from tfdist.data.spec import DataSpec
from tfdist.errors import DataError
from tfdist.options import Count, Fraction, Size

TASKS = ("segmentation",)
FILES = "local"


def load(
    data_dir: str | PathLike[str] | None = None,
    *,
    year: Count = 2017,
    size: Size = (256, 256),
    validation: Fraction = 0.1,
    cache: str = "auto",
    on_bad_example: str = "fail",
    max_pixels: Count = MAX_PIXELS,
) -> PictureSource:
    """x float32 `[N, H, W, 3]` in [0, 1], y int32 `[N, H, W]`: 0 is background, then the categories by their ids.

    COCO does not publish the labels of its test split, so its validation split is the test split here.

    Args:
        data_dir: the folder with `annotations/instances_train2017.json`, `train2017/` or `images/train2017/`, and the
            same for `val2017`.
        year: the year in the names of annotations and folders.
        size: height and width to which pictures and masks are resized.
        validation: the fraction of the training pictures, drawn at random, for validation.
        cache: one of `tfdist.data.input.pictures.CACHES`.
        on_bad_example: "fail" or "skip".
        max_pixels: the most pixels of a picture; a larger one is a bad example, and is not decoded.

    Raises:
        UsageError: no folder is given.
        DataError: the files do not exist; or, during reading, a picture cannot be decoded or does not have the size
            in the annotations.
    """
    directory = local_files.folder(data_dir, "coco_folder")
    parts = {split: _read(directory, f"{name}{year}") for split, name in (("train", "train"), ("test", "val"))}
    return source_of("coco_folder", parts, size, validation, cache, on_bad_example, max_pixels)


def source_of(
    name: str,
    parts: Mapping[str, coco.Part],
    size: Sequence[int],
    validation: float,
    cache: str,
    policy: str,
    max_pixels: int,
) -> PictureSource:
    """The source `name` from the results of `tfdist.data.formats.coco.read` for "train" and "test"; see `load`."""
    (train, names), (test, names_of_test) = parts["train"], parts["test"]
    if names != names_of_test:
        raise DataError(
            f"The training and test pictures of `{name}` have different categories",
            "use the annotations of one release for both",
        )
    shuffled = np.random.default_rng(0).permutation(len(train))
    first = len(train) - round(len(train) * validation)
    files = {"train": train.keep(sorted(shuffled[:first].tolist())), "test": test}
    if first < len(train):
        files["validation"] = train.keep(sorted(shuffled[first:].tolist()))
    height, width = size
    spec = DataSpec(name, "segmentation", (height, width, 3), len(names), {}, names, target_shape=(height, width))
    return PictureSource(spec, files, cache=cache, policy=policy, max_pixels=max_pixels)


def _read(directory: Path, split: str) -> coco.Part:
    (annotations,) = local_files.find(directory, f"annotations/instances_{split}.json", "coco", "year")
    folders = [directory / split, directory / "images" / split]
    pictures = next((folder for folder in folders if folder.is_dir()), None)
    if pictures is None:
        raise DataError(
            f"`{directory}` has the annotations of `{split}`, but not its pictures",
            f"put them into `{folders[0]}` or `{folders[1]}`",
        )
    return coco.read(annotations, pictures)
