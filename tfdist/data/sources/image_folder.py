"""A folder of pictures by class: `train/CLASS/NAME.jpg`, with `validation/` (or `val/`) and `test/` beside `train/`.

Without a folder `train` the classes are the folders of the dataset's own folder. A tenth of the pictures, drawn at
random but always alike, is then for validation and another tenth for the test; the classes have the same proportions in
all three splits.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tfdist.data.formats import local_files
from tfdist.data.input.picture_files import Pictures, size_of
from tfdist.data.input.pictures import PictureSource
from tfdist.data.spec import DataSpec
from tfdist.errors import DataError
from tfdist.options import Size

_FOLDERS = {"train": ("train",), "validation": ("validation", "val"), "test": ("test",)}


def load(
    data_dir: str | PathLike[str] | None = None,
    *,
    size: Size | None = None,
    channels: Literal[1, 3] = 3,
    cache: str = "auto",
    on_bad_example: str = "fail",
) -> PictureSource:
    """x float32 `[N, H, W, channels]` in [0, 1], y int32 `[N]`; the classes in the order of the alphabet.

    Args:
        data_dir: the folder.
        size: height and width to bring the pictures to, or one number for both; None is the size of the first one.
        channels: 3 for colours, 1 for grey.
        cache: one of `tfdist.data.input.pictures.CACHES`.
        on_bad_example: "fail" or "skip".

    Raises:
        UsageError: no folder.
        DataError: no pictures, or a class without training pictures; when it is read, one that cannot be decoded.
    """
    directory = local_files.folder(data_dir, "image_folder")
    if (directory / "train").is_dir():
        there = {
            split: directory / name
            for split, names in _FOLDERS.items()
            for name in names
            if (directory / name).is_dir()
        }
        classes = _classes(there["train"])
        files = {split: _pictures(folder, classes) for split, folder in there.items()}
    else:
        classes = _classes(directory)
        files = _divided(_pictures(directory, classes))
    height, width = size or size_of(files["train"].pictures[0])
    spec = DataSpec("image_folder", "classification", (height, width, channels), len(classes), {}, tuple(classes))
    return PictureSource(spec, files, cache=cache, policy=on_bad_example)


def _classes(folder: Path) -> list[str]:
    classes = sorted(path.name for path in folder.iterdir() if path.is_dir() and local_files.pictures_in(path))
    if not classes:
        raise DataError(f"`{folder}` has no folders with pictures", "make a folder a class, with its pictures")
    return classes


def _pictures(folder: Path, classes: list[str]) -> Pictures:
    unknown = sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name not in classes)
    if unknown:
        raise DataError(
            f"`{folder / unknown[0]}` is no class of the training pictures, which are {', '.join(classes[:10])}",
            "use the same names of classes for all splits",
        )
    found = [
        (str(path), label) for label, name in enumerate(classes) for path in local_files.pictures_in(folder / name)
    ]
    files = Pictures([path for path, _ in found], np.array([label for _, label in found], np.int32))
    # The first examples shall have all classes.
    return files.keep(np.random.default_rng(1).permutation(len(files)).tolist())


def _divided(files: Pictures) -> dict[str, Pictures]:
    """A tenth for the test, another for validation; the classes have the same proportions in all splits."""
    tenth = len(files) // 10
    drawn = np.argsort(_quantiles(files.targets), kind="stable").tolist()
    parts = {"test": drawn[:tenth], "validation": drawn[tenth : 2 * tenth], "train": sorted(drawn[2 * tenth :])}
    return {split: files.keep(part) for split, part in parts.items() if part}


def _quantiles(labels: Any) -> np.ndarray:
    """Where each example stands among those of its class, from 0 for the first to 1 after the last: float `[N]`."""
    quantiles = np.empty(len(labels))
    for label in np.unique(labels):
        those = np.flatnonzero(labels == label)
        quantiles[those] = (np.arange(len(those)) + 0.5) / len(those)
    return quantiles
