"""A folder of pictures by class: `train/CLASS/NAME.jpg`, with `validation/` (or `val/`) and `test/` beside `train/`.

Without a folder `train`, each subfolder of the dataset's folder is a class. A tenth of the pictures, always the same
random ones, is then for validation, and another tenth for the test; the classes have the same proportions in all three
splits. Hidden folders and files, such as `.thumbs`, and those that systems and archives add, such as `__MACOSX`, are no
classes and no pictures.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tfdist.data.formats import local_files
from tfdist.data.input.picture_files import Pictures, size_of
from tfdist.data.input.picture_headers import MAX_PIXELS
from tfdist.data.input.pictures import PictureSource
from tfdist.data.spec import DataSpec
from tfdist.errors import DataError
from tfdist.options import Count, Size

TASKS = ("classification",)
FILES = "local"
_FOLDERS = {"train": ("train",), "validation": ("validation", "val"), "test": ("test",)}


def load(
    data_dir: str | PathLike[str] | None = None,
    *,
    size: Size | None = None,
    channels: Literal[1, 3] = 3,
    cache: str = "auto",
    on_bad_example: str = "fail",
    max_pixels: Count = MAX_PIXELS,
) -> PictureSource:
    """x float32 `[N, H, W, channels]` in [0, 1], y int32 `[N]`; the classes are in alphabetical order.

    Args:
        data_dir: the folder.
        size: height and width to which the pictures are resized, or one number for both; None is the size of the first
            picture.
        channels: 3 for colour, 1 for grey.
        cache: one of `tfdist.data.input.pictures.CACHES`.
        on_bad_example: "fail" or "skip".
        max_pixels: the most pixels of a picture; a larger one is a bad example, and is not decoded.

    Raises:
        UsageError: no folder is given.
        DataError: there are no pictures, or a class has no training pictures; or, during reading, a picture cannot be
            decoded.
    """
    directory = local_files.folder(data_dir, "image_folder")
    if (directory / "train").is_dir():
        folders = {
            split: directory / name
            for split, names in _FOLDERS.items()
            for name in names
            if (directory / name).is_dir()
        }
        classes = _classes(folders["train"])
        files = {split: _pictures(folder, classes) for split, folder in folders.items()}
    else:
        classes = _classes(directory)
        files = _divided(_pictures(directory, classes))
    height, width = size or size_of(files["train"].pictures[0], max_pixels)
    spec = DataSpec("image_folder", "classification", (height, width, channels), len(classes), {}, tuple(classes))
    return PictureSource(spec, files, cache=cache, policy=on_bad_example, max_pixels=max_pixels)


def _classes(folder: Path) -> list[str]:
    classes = [path.name for path in local_files.folders_in(folder) if local_files.pictures_in(path)]
    if not classes:
        raise DataError(f"`{folder}` has no folders with pictures", "make one folder per class, with its pictures")
    return classes


def _pictures(folder: Path, classes: list[str]) -> Pictures:
    unknown = [path.name for path in local_files.folders_in(folder) if path.name not in classes]
    if unknown:
        raise DataError(
            f"`{folder / unknown[0]}` is not a class of the training pictures, which have {', '.join(classes[:10])}",
            "use the same names of classes for all splits",
        )
    labelled = [
        (str(path), label) for label, name in enumerate(classes) for path in local_files.pictures_in(folder / name)
    ]
    files = Pictures([path for path, _ in labelled], np.array([label for _, label in labelled], np.int32))
    # Shuffled, so that the first examples have all classes.
    return files.keep(np.random.default_rng(1).permutation(len(files)).tolist())


def _divided(files: Pictures) -> dict[str, Pictures]:
    """A tenth for the test, another for validation; the classes have the same proportions in all splits."""
    tenth = len(files) // 10
    drawn = np.argsort(_quantiles(files.targets), kind="stable").tolist()
    parts = {"test": drawn[:tenth], "validation": drawn[tenth : 2 * tenth], "train": sorted(drawn[2 * tenth :])}
    return {split: files.keep(part) for split, part in parts.items() if part}


def _quantiles(labels: Any) -> np.ndarray:
    """The position of each example among those of its class, from 0 at the first to 1 after the last: float `[N]`."""
    quantiles = np.empty(len(labels))
    for label in np.unique(labels):
        of_class = np.flatnonzero(labels == label)
        quantiles[of_class] = (np.arange(len(of_class)) + 0.5) / len(of_class)
    return quantiles
