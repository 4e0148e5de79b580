"""COCO 2017, fetched through TensorFlow Datasets, as semantic segmentation: T.-Y. Lin and others, ECCV 2014.

TFDS' own examples have boxes and no outlines, so the archives that it fetches are read: 25 GB.
"""

from __future__ import annotations

from os import PathLike

from tfdist.data.formats import coco, tfds_prepare
from tfdist.data.pipeline.pictures import PictureSource
from tfdist.data.sources.coco_folder import of_parts
from tfdist.options import Share, Size

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
    validation: Share = 0.05,
    cache: str = "auto",
    on_bad_example: str = "fail",
) -> PictureSource:
    """x `[N, *size, 3]` in [0, 1], y int32 `[N, *size]`; see `coco_folder`, which reads files that you have.

    Args:
        data_dir: the folder of prepared datasets; see `tfdist.data.load`.
        size: height and width to bring pictures and masks to.
        validation: the share of the training pictures, drawn at random, that is for validation.
        cache: one of `tfdist.data.pipeline.pictures.CACHES`.
        on_bad_example: "fail" or "skip".

    Raises:
        DataError: neither there nor to be downloaded.
    """
    folder = tfds_prepare.data_folder(data_dir)
    import tensorflow_datasets as tfds

    there = tfds_prepare.extracted(tfds.builder("coco/2017", data_dir=folder), folder, ARCHIVES)
    parts = {
        split: coco.read(there["annotations"] / "annotations" / f"instances_{name}.json", there[name] / name)
        for split, name in (("train", "train2017"), ("test", "val2017"))
    }
    return of_parts("coco", parts, size, validation, cache, on_bad_example)
