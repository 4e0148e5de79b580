"""Image classification datasets of TensorFlow Datasets (TFDS), decoded once into memory.

The last 5,000 examples of TFDS' training split, in stored order, are used for validation.
"""

from __future__ import annotations

import functools
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdist.data.formats import tfds_prepare
from tfdist.data.input.arrays import Arrays
from tfdist.data.input.source import Source
from tfdist.data.spec import DataSpec

if TYPE_CHECKING:
    import tensorflow as tf

VALIDATION_EXAMPLES = 5000

# The number of examples that are decoded together before they are copied into the result.
_CHUNK = 256


def load(name: str, data_dir: str | PathLike[str] | None) -> Source:
    """The TFDS dataset `name`, with the features "image" and "label"; prepares it if necessary.

    Reading the arrays initializes TensorFlow's devices: choose logical devices before.

    Args:
        name: the name in TFDS.
        data_dir: the folder of prepared datasets; see `tfdist.data.load`.

    Raises:
        DataError: the dataset is not prepared and cannot be downloaded, or is damaged.
    """
    # The folder is checked first, because importing TensorFlow takes seconds.
    folder = tfds_prepare.data_folder(data_dir)
    import tensorflow_datasets as tfds

    builder = tfds_prepare.prepared(lambda: tfds.builder(name, data_dir=folder), folder)
    return Source(_spec(builder), lambda split, count: _read(builder, split, count), divisor=255)


def _spec(builder: Any) -> DataSpec:
    features, splits = builder.info.features, builder.info.splits
    examples = {
        "train": splits["train"].num_examples - VALIDATION_EXAMPLES,
        "validation": VALIDATION_EXAMPLES,
        "test": splits["test"].num_examples,
    }
    label = features["label"]
    return DataSpec(
        name=builder.name,
        task="classification",
        input_shape=features["image"].shape,
        classes=label.num_classes,
        examples=examples,
        class_names=tuple(label.names),
    )


def _read(builder: Any, split: str, count: int) -> Arrays:
    import tensorflow as tf

    try:
        return _decode(builder, split, count)
    except (tf.errors.OpError, OSError) as error:
        raise tfds_prepare.damaged(builder, str(error).partition("\n")[0]) from error


def _decode(builder: Any, split: str, count: int) -> Arrays:
    shape = builder.info.features["image"].shape
    x, y = np.empty((count, *shape), np.uint8), np.empty(count, np.int32)
    done = 0
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
