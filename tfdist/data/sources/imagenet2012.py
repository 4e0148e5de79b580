"""ImageNet (ILSVRC 2012), 1.28 million pictures in 1,000 classes: O. Russakovsky and others, IJCV, 2015.

Its licence requires you to download the files yourself, from https://image-net.org/download-images.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from tfdist.data.formats import tfds
from tfdist.data.input.picture_headers import MAX_PIXELS
from tfdist.data.input.pictures import SHUFFLE_BUFFER, PictureSource
from tfdist.errors import DataError
from tfdist.options import Count, Size

TASKS = ("classification",)
FILES = "manual"
ARCHIVES = ("ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar")
MANUAL = Path("downloads", "manual")


def load(
    data_dir: str | PathLike[str] | None = None,
    *,
    size: Size = (224, 224),
    cache: str = "auto",
    on_bad_example: str = "fail",
    max_pixels: Count = MAX_PIXELS,
    shuffle: str = "examples",
    shuffle_buffer: Count = SHUFFLE_BUFFER,
) -> PictureSource:
    """x `[N, *size, 3]` in [0, 1], y int32 `[N]`: one hundredth of the training pictures is used for validation.

    ImageNet does not publish the labels of its test split, so its 50,000 validation pictures are the test split here.

    Args:
        data_dir: the folder of prepared datasets; put the archives into its `downloads/manual`.
        size: height and width to which the pictures are resized.
        cache: one of `tfdist.data.input.pictures.CACHES`.
        on_bad_example: "fail" or "skip".
        max_pixels: the most pixels of a picture; a larger one is a bad example, and is not decoded.
        shuffle: "examples", or "files": the files in random order, each read from its begin to its end.
        shuffle_buffer: for "files": the number of examples that are shuffled together.

    Raises:
        DataError: the dataset is not prepared and archives are missing; the error names them and their folder.
    """
    builder = tfds.builder_of("imagenet2012", data_dir, _check_archives)
    label = builder.info.features["label"]
    return tfds.by_record(
        builder,
        "validation",
        size,
        validation=0.01,
        target="label",
        classes=label.num_classes,
        class_names=label.names,
        cache=cache,
        policy=on_bad_example,
        max_pixels=max_pixels,
        shuffle=shuffle,
        shuffle_buffer=shuffle_buffer,
    )


def _check_archives(folder: Path) -> None:
    missing = [name for name in ARCHIVES if not (folder / MANUAL / name).is_file()]
    if missing:
        raise DataError(
            f"Dataset `imagenet2012` is not prepared in `{folder}`, and `{folder / MANUAL}` has no "
            + " and no ".join(f"`{name}`" for name in missing),
            "download these files from https://image-net.org/download-images (you have to register) and put them there",
        )
