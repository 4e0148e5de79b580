"""Makes sources of TensorFlow Datasets (TFDS): small pictures in memory, and large pictures record by record."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdist.data.formats import tfds_prepare
from tfdist.data.input import tfrecords
from tfdist.data.input.arrays import Arrays
from tfdist.data.input.pictures import PictureSource
from tfdist.data.input.source import Source
from tfdist.data.input.tfrecords import Records
from tfdist.data.spec import DataSpec

if TYPE_CHECKING:
    import tensorflow as tf

# `in_memory` uses this many examples for validation: the last of TFDS' training split, in stored order.
VALIDATION_EXAMPLES = 5000

# How many examples are decoded together before they are copied into the result.
_CHUNK = 256


def builder_of(name: str, data_dir: str | PathLike[str] | None, check: Callable[[Path], None] | None = None) -> Any:
    """The TFDS builder of a dataset; prepares the dataset if necessary.

    Args:
        name: the name in TFDS.
        data_dir: the folder of prepared datasets; see `tfdist.data.load`.
        check: called with the folder if the dataset is not prepared, before anything is downloaded.

    Raises:
        DataError: the dataset is not prepared and cannot be downloaded, or is damaged.
    """
    # The folder is checked first, because importing TensorFlow takes seconds.
    folder = tfds_prepare.data_folder(data_dir)
    import tensorflow_datasets as tfds

    def make() -> Any:
        return tfds.builder(name, data_dir=folder)

    if check is not None and not make().is_prepared():
        check(folder)
    return tfds_prepare.prepared(make, folder)


def examples(builder: Any, split: str) -> Iterator[dict[str, Any]]:
    """The examples of a split or a part of a split, in stored order, as TFDS decodes them.

    Raises:
        DataError: the files are damaged.
    """
    with _damage_named(builder):
        yield from builder.as_dataset(split=split, shuffle_files=False).as_numpy_iterator()


@contextlib.contextmanager
def _damage_named(builder: Any) -> Iterator[None]:
    import tensorflow as tf

    try:
        yield
    except (tf.errors.OpError, OSError) as error:
        raise tfds_prepare.damaged(builder, str(error).partition("\n")[0]) from error


def in_memory(name: str, data_dir: str | PathLike[str] | None) -> Source:
    """A source of the TFDS dataset `name`, with the features "image" and "label", decoded once into memory.

    Reading the arrays initializes TensorFlow's devices: choose logical devices before.

    Args:
        name: the name in TFDS.
        data_dir: the folder of prepared datasets; see `tfdist.data.load`.

    Raises:
        DataError: the dataset is not prepared and cannot be downloaded, or is damaged.
    """
    builder = builder_of(name, data_dir)
    features, splits = builder.info.features, builder.info.splits
    label = features["label"]
    spec = DataSpec(
        name=builder.name,
        task="classification",
        input_shape=features["image"].shape,
        classes=label.num_classes,
        examples={
            "train": splits["train"].num_examples - VALIDATION_EXAMPLES,
            "validation": VALIDATION_EXAMPLES,
            "test": splits["test"].num_examples,
        },
        class_names=tuple(label.names),
    )
    return Source(spec, lambda split, count: _read(builder, split, count), divisor=255)


def _read(builder: Any, split: str, count: int) -> Arrays:
    shape = builder.info.features["image"].shape
    x, y = np.empty((count, *shape), np.uint8), np.empty(count, np.int32)
    done = 0
    with _damage_named(builder):
        for images, labels in _batches(builder, split, count):
            end = done + len(labels)
            x[done:end], y[done:end] = images, labels
            done = end
    if done != count:
        raise tfds_prepare.damaged(builder, f"`{split}` has {done} examples instead of {count}")
    return x, y


def _batches(builder: Any, split: str, count: int) -> Any:
    """Pairs of uint8 images `[b, H, W, C]` and int64 labels `[b]`, in stored order, decoded by all cores.

    TFDS itself parses one example after the other, which takes longer than decoding.
    """
    import tensorflow as tf

    shape = builder.info.features["image"].shape
    stored_as = {"image": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}

    def decode_image(image: tf.Tensor) -> tf.Tensor:
        return tf.io.decode_png(image, channels=shape[-1])

    def decode(records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        examples = tf.io.parse_example(records, stored_as)
        pixels = tf.map_fn(decode_image, examples["image"], fn_output_signature=tf.TensorSpec(shape, tf.uint8))
        return pixels, examples["label"]

    stored = {"validation": f"train[-{VALIDATION_EXAMPLES}:]"}.get(split, f"{split}[:{count}]")
    files = builder.info.splits[stored].file_instructions
    parts = [tf.data.TFRecordDataset(file.filename).skip(file.skip).take(file.take) for file in files]
    records = functools.reduce(tf.data.Dataset.concatenate, parts).batch(_CHUNK)
    return records.map(decode, num_parallel_calls=tf.data.AUTOTUNE).prefetch(2).as_numpy_iterator()


def by_record(
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
    """A source of the pictures of a prepared dataset, which reads each example from its record; see `PictureSource`.

    Args:
        builder: the TFDS builder.
        test: the TFDS split for the test.
        size: height and width to which the pictures are resized.
        validation: the fraction of TFDS' training split, from its end, for validation; TFDS has shuffled the split.
        target: the feature of the label, or of the encoded mask for segmentation.
        first_label: the label of the first class in the files.
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
