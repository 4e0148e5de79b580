"""Oxford-IIIT Pet, 7,349 cats and dogs with masks: O. Parkhi, A. Vedaldi, A. Zisserman and C. Jawahar, CVPR 2012."""

from __future__ import annotations

from os import PathLike

from tfdist.data.formats import tfds
from tfdist.data.input.picture_headers import MAX_PIXELS
from tfdist.data.input.pictures import SHUFFLE_BUFFER, PictureSource
from tfdist.options import Count, Size

TASKS = ("segmentation",)
FILES = "tfds"


def load(
    data_dir: str | PathLike[str] | None = None,
    *,
    size: Size = (128, 128),
    cache: str = "auto",
    on_bad_example: str = "fail",
    max_pixels: Count = MAX_PIXELS,
    shuffle: str = "examples",
    shuffle_buffer: Count = SHUFFLE_BUFFER,
) -> PictureSource:
    """x `[N, *size, 3]` in [0, 1], y int32 `[N, *size]`: pet, background and border.

    There are 3,312 training, 368 validation and 3,669 test pictures.

    Args:
        data_dir: the folder of prepared datasets; see `tfdist.data.load`.
        size: height and width to which pictures and masks are resized.
        cache: one of `tfdist.data.input.pictures.CACHES`.
        on_bad_example: "fail" or "skip".
        max_pixels: the most pixels of a picture; a larger one is a bad example, and is not decoded.
        shuffle: "examples", or "files": the files in random order, each read from its begin to its end.
        shuffle_buffer: for "files": the number of examples that are shuffled together.

    Raises:
        DataError: the dataset is not prepared and cannot be downloaded.
    """
    builder = tfds.builder_of("oxford_iiit_pet", data_dir)
    return tfds.by_record(
        builder,
        "test",
        size,
        validation=0.1,
        target="segmentation_mask",
        classes=3,
        class_names=("pet", "background", "border"),
        first_label=1,
        cache=cache,
        policy=on_bad_example,
        max_pixels=max_pixels,
        shuffle=shuffle,
        shuffle_buffer=shuffle_buffer,
    )
