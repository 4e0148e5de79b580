"""Pictures with masks, one class per pixel, in folders or lists, such as CamVid.

| split | example | content |
|---|---|---|
| a list | `train.txt` | one line `picture mask` per example; paths are relative to the list's folder |
| two folders | `train,trainannot` | pictures, and masks with the same names except for their suffixes |

Source: G. Brostow, J. Fauqueur and R. Cipolla, "Semantic object classes in video", Pattern Recognition Letters, 2009;
in the layout of V. Badrinarayanan, A. Kendall and R. Cipolla, "SegNet", 2015.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from tfdist.data.formats import local_files
from tfdist.data.input.picture_files import Pictures, size_of
from tfdist.data.input.picture_headers import MAX_PIXELS
from tfdist.data.input.pictures import PictureSource
from tfdist.data.spec import DataSpec
from tfdist.errors import DataError, UsageError
from tfdist.options import Count, Size

TASKS = ("segmentation",)
FILES = "local"


def load(
    data_dir: str | PathLike[str] | None = None,
    *,
    train: str = "train.txt",
    validation: str | None = "val.txt",
    test: str | None = "test.txt",
    classes: Count = 12,
    ignored_class: int | None = 11,
    class_names: str | None = None,
    size: Size | None = None,
    cache: str = "auto",
    on_bad_example: str = "fail",
    max_pixels: Count = MAX_PIXELS,
) -> PictureSource:
    """x float32 `[N, H, W, 3]` in [0, 1], y int32 `[N, H, W]`. The defaults are CamVid's.

    Args:
        data_dir: the folder.
        train: a list, or two folders separated by a comma.
        validation: the same for validation, or None.
        test: the same for the test, or None.
        classes: the number of classes, including the ignored class.
        ignored_class: the label of pixels that loss and metrics leave out, or None.
        class_names: one name per class, separated by commas.
        size: height and width to which pictures and masks are resized; None is the size of the first picture.
        cache: one of `tfdist.data.input.pictures.CACHES`.
        on_bad_example: "fail" or "skip".
        max_pixels: the most pixels of a picture; a larger one is a bad example, and is not decoded.

    Raises:
        UsageError: no folder is given.
        DataError: a list or folder does not exist, or a picture has no mask; or, during reading, a picture cannot be
            decoded, a mask does not have the size of its picture, or a label is outside the classes.
    """
    directory = local_files.folder(data_dir, "segmentation_folder")
    names_of = {"train": train, "validation": validation, "test": test}
    files = {split: _pairs(directory, names, split) for split, names in names_of.items() if names}
    height, width = size or size_of(files["train"].pictures[0], max_pixels)
    spec = DataSpec(
        "segmentation_folder",
        "segmentation",
        (height, width, 3),
        classes,
        {},
        tuple(class_names.split(",")) if class_names else (),
        target_shape=(height, width),
        ignored_class=ignored_class,
    )
    return PictureSource(spec, files, cache=cache, policy=on_bad_example, max_pixels=max_pixels)


def _pairs(directory: Path, names: str, option: str) -> Pictures:
    folders = names.split(",")
    if len(folders) > 2:
        raise UsageError(f"`{option}` is `{names}`", "name one list, or the folders of pictures and masks")
    pairs = (
        _of_folders(*(directory / name for name in folders))
        if len(folders) == 2
        else _of_list(directory, names, option)
    )
    if not pairs:
        raise DataError(f"There are no pictures in `{names}` of `{directory}`", "name a list or folders that have some")
    return Pictures([str(picture) for picture, _ in pairs], [str(mask) for _, mask in pairs])


def _of_list(directory: Path, name: str, option: str) -> list[tuple[Path, Path]]:
    (path,) = local_files.find(directory, name, "segmentation_folder", option)[:1]
    pairs = []
    for number, line in enumerate(local_files.text(path, "utf-8").splitlines(), 1):
        entries = line.split()
        if len(entries) != 2:
            raise DataError(
                f"Line {number} of `{path}` is `{line}`, which is not a picture and a mask",
                "write two paths on each line, relative to the list's folder",
            )
        pairs.append((directory / entries[0], directory / entries[1]))
    return pairs


def _of_folders(pictures: Path, masks: Path) -> list[tuple[Path, Path]]:
    mask_of = {path.stem: path for path in local_files.pictures_in(masks)}
    paths = local_files.pictures_in(pictures)
    without = [path for path in paths if path.stem not in mask_of]
    if without:
        raise DataError(
            f"The picture `{without[0]}` has no mask in `{masks}` ({len(without)} of {len(paths)} pictures have none)",
            "give each picture a mask of the same name",
        )
    return [(path, mask_of[path.stem]) for path in paths]
