"""Reads datasets of TensorFlow Datasets (TFDS) with large pictures record by record from their files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from tfdist.data.formats import tfds_prepare
from tfdist.data.input import tfrecords
from tfdist.data.input.pictures import PictureSource
from tfdist.data.input.tfrecords import Records
from tfdist.data.spec import DataSpec


def builder_of(name: str, data_dir: str | PathLike[str] | None, check: Callable[[Path], None] | None = None) -> Any:
    """The TFDS builder of a dataset; prepares the dataset if necessary.

    Args:
        name: the name in TFDS.
        data_dir: the folder of prepared datasets; see `tfdist.data.load`.
        check: called with the folder if the dataset is not prepared, before anything is downloaded.

    Raises:
        DataError: the dataset is not prepared and cannot be downloaded, or is damaged.
    """
    folder = tfds_prepare.data_folder(data_dir)
    import tensorflow_datasets as tfds

    def make() -> Any:
        return tfds.builder(name, data_dir=folder)

    if check is not None and not make().is_prepared():
        check(folder)
    return tfds_prepare.prepared(make, folder)


def examples(builder: Any, split: str) -> Iterator[dict[str, Any]]:
    """The examples of a split or a part of one, in stored order, as TFDS decodes them.

    Raises:
        DataError: the files are damaged.
    """
    import tensorflow as tf

    try:
        yield from builder.as_dataset(split=split, shuffle_files=False).as_numpy_iterator()
    except (tf.errors.OpError, OSError) as error:
        raise tfds_prepare.damaged(builder, str(error).partition("\n")[0]) from error


def source_of(
    builder: Any,
    test: str,
    size: Sequence[int],
    *,
    validation: float,
    target: str,
    classes: int,
    class_names: Sequence[str],
    first_label: int = 0,
    cache: str,
    policy: str,
    shuffle: str,
    shuffle_buffer: int,
) -> PictureSource:
    """A source of the pictures of a prepared dataset.

    Args:
        builder: the TFDS builder.
        test: the TFDS split for the test.
        size: height and width to which the pictures are resized.
        validation: the fraction of TFDS' training split, from its end, for validation; TFDS has shuffled the split.
        target: the feature of the label, or of the encoded mask for segmentation.
        classes: the number of classes.
        class_names: the names of the classes, or none.
        first_label: the label of the first class in the files.
        cache: one of `tfdist.data.input.pictures.CACHES`.
        policy: what to do with a bad example.
        shuffle: one of `tfdist.data.input.pictures.SHUFFLES`.
        shuffle_buffer: for "files": examples that are shuffled together.
    """
    masks = target != "label"

    def of_split(split: str) -> Records:
        paths = tuple(Path(path) for path in builder.info.splits[split].filepaths)
        return Records(paths, tfrecords.index(paths), target, masks, first_label)

    train = of_split("train")
    first = len(train) - round(len(train) * validation)
    numbers = range(len(train))
    files = {"train": train.keep(numbers[:first]), "validation": train.keep(numbers[first:]), "test": of_split(test)}
    height, width = size
    spec = DataSpec(
        builder.name,
        "segmentation" if masks else "classification",
        (height, width, 3),
        classes,
        {},
        tuple(class_names),
        target_shape=(height, width) if masks else (),
    )
    return PictureSource(spec, files, cache=cache, policy=policy, shuffle=shuffle, shuffle_buffer=shuffle_buffer)
