"""Examples per second of input pipelines alone, after the first epoch: tfdist's pipeline and the same by hand.

| race | by hand, following the tf.data performance guide | as most people write it |
|---|---|---|
| Fashion-MNIST in memory | cache, shuffle, batch, vectorized map, prefetch | `tfds.load(...).map().batch()` |
| CIFAR in memory, crops and flips | shuffle, parallel map, parallel batch, prefetch | |
| CamVid's files, crops and flips of pictures and masks | shuffle, parallel map, parallel batch, prefetch | |
| CamVid, decoded once | parallel map, cache, shuffle, parallel map, parallel batch, prefetch | |

The epochs of the contestants take turns, because a machine's speed drifts. Races without data are left out.

Example: `python -m benchmarks.pipelines --data-dir PREPARED --files FOLDER`, where `--files` has the folders
`cifar10` and `camvid`.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Epoch = Callable[[int], Any]


def fashion_mnist(data_dir: str, batch_size: int) -> tuple[int, dict[str, Epoch]]:
    """Contestants on Fashion-MNIST, whose examples TFDS stores as PNG files."""
    import tensorflow as tf
    import tensorflow_datasets as tfds

    import tfdist.data

    def scaled(image: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.cast(image, tf.float32) / 255.0, label

    source = tfdist.data.load("fashion_mnist", data_dir)
    count = source.spec.examples["train"]
    stored = tfds.load("fashion_mnist", split=f"train[:{count}]", data_dir=data_dir, as_supervised=True)
    by_hand = (
        stored.cache()
        .shuffle(count, seed=0)
        .batch(batch_size, num_parallel_calls=tf.data.AUTOTUNE)
        .map(scaled, num_parallel_calls=tf.data.AUTOTUNE)
        .prefetch(tf.data.AUTOTUNE)
    )
    as_usual = stored.map(scaled).batch(batch_size)
    return count, {
        "tfdist": lambda epoch: source.pipeline("train", batch_size, epoch=epoch),
        "by hand": lambda epoch: by_hand,
        "as usual": lambda epoch: as_usual,
    }


def cifar(folder: Path, batch_size: int) -> tuple[int, dict[str, Epoch]]:
    """Contestants on CIFAR's images in memory, padded, cropped and flipped at random."""
    import tensorflow as tf

    import tfdist.data

    source = tfdist.data.load("cifar_binary", folder)
    x, y = source.arrays("train")

    def augmented(image: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        image = tf.image.random_crop(tf.pad(image, [[4, 4], [4, 4], [0, 0]]), [32, 32, 3])
        return tf.image.random_flip_left_right(image), label

    by_hand = (
        tf.data.Dataset.from_tensor_slices((x, y))
        .shuffle(len(y), seed=0)
        .map(augmented, num_parallel_calls=tf.data.AUTOTUNE)
        .batch(batch_size, num_parallel_calls=tf.data.AUTOTUNE)
        .prefetch(tf.data.AUTOTUNE)
    )
    return len(y), {
        "tfdist": lambda epoch: source.pipeline("train", batch_size, epoch=epoch, augment="crop_flip"),
        "by hand": lambda epoch: by_hand,
    }


def camvid(folder: Path, batch_size: int, *, decoded_once: bool = False) -> tuple[int, dict[str, Epoch]]:
    """Contestants on CamVid's files; images and masks are padded, cropped and flipped.

    Without `decoded_once`, each file is decoded in every epoch; with it, tfdist chooses to cache, given enough memory.
    """
    import tensorflow as tf

    import tfdist.data

    source = tfdist.data.load("segmentation_folder", folder, cache="auto" if decoded_once else "off")
    height, width = source.spec.target_shape
    pairs = [line.split() for line in (folder / "train.txt").read_text().splitlines()]
    pictures, masks = ([str(folder / pair[side]) for pair in pairs] for side in range(2))
    margins = [[height // 8, height // 8], [width // 8, width // 8], [0, 0]]

    def decoded(picture: tf.Tensor, mask: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        x = tf.image.convert_image_dtype(tf.io.decode_jpeg(tf.io.read_file(picture), channels=3), tf.float32)
        return x, tf.io.decode_png(tf.io.read_file(mask), channels=1)

    def augmented(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        both = tf.concat([x, tf.cast(y, tf.float32)], axis=-1)
        both = tf.image.random_crop(tf.pad(both, margins, "REFLECT"), [height, width, 4])
        both = tf.image.random_flip_left_right(both)
        return both[..., :3], tf.cast(both[..., 3], tf.int32)

    files = tf.data.Dataset.from_tensor_slices((pictures, masks))
    if decoded_once:
        shuffled = files.map(decoded, num_parallel_calls=tf.data.AUTOTUNE).cache().shuffle(len(pairs), seed=0)
        changed = shuffled.map(augmented, num_parallel_calls=tf.data.AUTOTUNE)
    else:
        shuffled = files.shuffle(len(pairs), seed=0)
        changed = shuffled.map(lambda *pair: augmented(*decoded(*pair)), num_parallel_calls=tf.data.AUTOTUNE)
    by_hand = changed.batch(batch_size, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)
    return len(pairs), {
        "tfdist": lambda epoch: source.pipeline("train", batch_size, epoch=epoch, augment="crop_flip"),
        "by hand": lambda epoch: by_hand,
    }


def epoch_seconds(contestants: dict[str, Epoch], repeats: int) -> dict[str, list[float]]:
    """The seconds of the epochs after the first, which fills caches; the contestants take turns."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for epoch in range(repeats + 1):
        for name, make in contestants.items():
            began = time.perf_counter()
            for _ in make(epoch):
                pass
            times[name].append(time.perf_counter() - began)
    return {name: seconds[1:] for name, seconds in times.items()}


def races(data_dir: str | None, files: Path | None, batch_size: int) -> Iterator[tuple[str, int, dict[str, Epoch]]]:
    """Yields the races whose data exist."""
    if data_dir and Path(data_dir, "fashion_mnist").is_dir():
        yield "Fashion-MNIST in memory", *fashion_mnist(data_dir, batch_size)
    file_races = (
        ("CIFAR in memory", "cifar10", cifar),
        ("CamVid's files", "camvid", camvid),
        ("CamVid, decoded once", "camvid", functools.partial(camvid, decoded_once=True)),
    )
    for name, folder, race in file_races:
        if files and (files / folder).is_dir():
            yield name, *race(files / folder, batch_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", default=os.environ.get("TFDS_DATA_DIR"), help="prepared TFDS datasets")
    parser.add_argument("--files", type=Path, default=os.environ.get("TFDIST_DATA"), help="plain files")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5, help="epochs after the first (default: %(default)s)")
    arguments = parser.parse_args()
    for name, examples, contestants in races(arguments.data_dir, arguments.files, arguments.batch_size):
        seconds = epoch_seconds(contestants, arguments.repeats)
        print(f"\n{name}, {examples:,} examples, batch {arguments.batch_size}")
        for contestant, times in seconds.items():
            ratios = [theirs / ours for theirs, ours in zip(times, seconds["tfdist"], strict=True)]
            rate = examples / statistics.median(times)
            low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
            line = f"  {contestant:10} {rate:12,.0f} examples/s"
            if contestant != "tfdist":
                line += f"   tfdist is {middle:.2f} times as fast ({low:.2f} to {high:.2f})"
            print(line)


if __name__ == "__main__":
    main()
