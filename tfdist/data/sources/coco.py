"""COCO 2017 from TensorFlow Datasets (TFDS), as semantic segmentation: T.-Y. Lin and others, ECCV 2014.

The examples of TFDS have boxes but no outlines, so this module reads the archives that TFDS downloads: 25 GB.
"""

from __future__ import annotations

from os import PathLike

from tfdist.data.formats import coco, tfds
from tfdist.data.input.picture_headers import MAX_PIXELS
from tfdist.data.input.pictures import PictureSource
from tfdist.data.sources.coco_folder import source_of
from tfdist.options import Count, Fraction, Size

TASKS = ("segmentation",)
FILES = "tfds"
_ADDRESS = "http://images.cocodataset.org/"
ARCHIVES = {
    "train2017": _ADDRESS + "zips/train2017.zip",
    "val2017": _ADDRESS + "zips/val2017.zip",
    "annotations": _ADDRESS + "annotations/annotations_trainval2017.zip",
}


def load(
    data_dir: str | PathLike[str] | None = None,
    *,
    size: Size = (256, 256),
    validation: Fraction = 0.05,
    cache: str = "auto",
    on_bad_example: str = "fail",
    max_pixels: Count = MAX_PIXELS,
) -> PictureSource:
    """x `[N, *size, 3]` in [0, 1], y int32 `[N, *size]`; see `coco_folder`, which reads your own files.

    Args:
        data_dir: the folder of prepared datasets; see `tfdist.data.load`.
        size: height and width to which pictures and masks are resized.
        validation: the fraction of the training pictures, drawn at random, for validation.
        cache: one of `tfdist.data.input.pictures.CACHES`.
        on_bad_example: "fail" or "skip".
        max_pixels: the most pixels of a picture; a larger one is a bad example, and is not decoded.

    Raises:
        DataError: the archives do not exist and cannot be downloaded.
    """
    folder = tfds.data_folder(data_dir)
    folders = tfds.extracted(tfds.package().builder("coco/2017", data_dir=folder), folder, ARCHIVES)
    parts = {
        split: coco.read(folders["annotations"] / "annotations" / f"instances_{name}.json", folders[name] / name)
        for split, name in (("train", "train2017"), ("test", "val2017"))
    }
    return source_of("coco", parts, size, validation, cache, on_bad_example, max_pixels)
