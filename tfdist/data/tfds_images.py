"""Image classification datasets of TensorFlow Datasets (TFDS), decoded once into memory.

TFDS' training split is divided: its last 5,000 examples, in stored order, are for validation.
"""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdist.data import prepare
from tfdist.data.source import Arrays, Source
from tfdist.data.spec import DataSpec

if TYPE_CHECKING:
    import tensorflow as tf

VALIDATION_EXAMPLES = 5000

# Examples decoded into one piece before they are scaled into their place.
_CHUNK = 1024


def load(name: str, data_dir: str | PathLike[str] | None) -> Source:
    """The TFDS dataset `name` of features "image" and "label", prepared first where it has to be.

    Reading the arrays starts TensorFlow's devices: choose logical devices before.

    Args:
        name: as TFDS knows it.
        data_dir: the folder of prepared datasets; see `tfdist.data.load`.

    Raises:
        DataError: neither prepared nor to be downloaded, or damaged.
    """
    # The folder is looked at before the seconds that it takes to import TensorFlow.
    folder = prepare.data_folder(data_dir)
    import tensorflow_datasets as tfds

    builder = prepare.prepared(lambda: tfds.builder(name, data_dir=folder), folder)
    return Source(_spec(builder), lambda split, count: _read(builder, split, count))


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
        raise prepare.damaged(builder, str(error).partition("\n")[0]) from error


def _decode(builder: Any, split: str, count: int) -> Arrays:
    shape = builder.info.features["image"].shape
    x, y = np.empty((count, *shape), np.float32), np.empty(count, np.int32)
    done = 0
    for images, labels in _batches(builder, split, count):
        end = done + len(labels)
        # Bytes are scaled straight into their place: no second array of floats.
        np.divide(images, np.float32(255), out=x[done:end])
        y[done:end] = labels
        done = end
    if done != count:
        raise prepare.damaged(builder, f"`{split}` has {done} examples instead of {count}")
    return x, y


def _batches(builder: Any, split: str, count: int) -> Any:
    """Pairs of uint8 images `[b, H, W, C]` and int64 labels `[b]`, in stored order, decoded by all cores."""
    import tensorflow as tf
    import tensorflow_datasets as tfds

    channels = builder.info.features["image"].shape[-1]

    def decode(example: dict[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.io.decode_png(example["image"], channels=channels), example["label"]

    stored = {"validation": f"train[-{VALIDATION_EXAMPLES}:]"}.get(split, f"{split}[:{count}]")
    examples = builder.as_dataset(
        split=stored,
        # TFDS decodes one by one while it reads.
        decoders={"image": tfds.decode.SkipDecoding()},
        shuffle_files=False,
        read_config=tfds.ReadConfig(interleave_cycle_length=1, try_autocache=False),
    )
    decoded = examples.map(decode, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    return decoded.batch(_CHUNK).prefetch(2).as_numpy_iterator()
