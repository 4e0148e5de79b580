"""Images per second of a custom pipeline that decodes JPEGs, in one and in two processes with one core each.

    alike          every process decodes the whole dataset
    per_process    `tfdist.data.shard` before decoding, and `tfdist.data.per_process` around the result

The model is tiny, so that the time of an epoch is the time of its input pipeline.

Example: `python -m benchmarks.decoding --pictures 2000`
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TARGET = 1.8  # two processes / one
SIZE = 256


def make_pictures(folder: Path, count: int) -> None:
    """Writes `count` JPEGs of smooth noise, which takes as long to decode as photographs."""
    import numpy as np
    from PIL import Image

    generator = np.random.default_rng(0)
    for number in range(count):
        coarse = Image.fromarray(generator.integers(0, 255, (SIZE // 4, SIZE // 4, 3), np.uint8))
        coarse.resize((SIZE, SIZE), Image.Resampling.BICUBIC).save(folder / f"{number:05}.jpg", quality=90)


def pictures_per_second(folder: Path, count: int, batch_size: int, workers: int, kind: str) -> float:
    """Images per second of a separate job."""
    command = [sys.executable, "-m", "tfdist.launch", "--workers", str(workers), "--log-dir", f"{folder}/logs"]
    command += ["-m", "benchmarks.decoding", "--job", kind, "--folder", str(folder), "--pictures", str(count)]
    command += ["--batch-size", str(batch_size)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))["per_second"]


def job(folder: Path, count: int, batch_size: int, kind: str) -> None:
    """Trains three epochs in one process of a job, and prints the faster rate of the last two."""
    from tfdist.jobs.world import World

    cores = sorted(os.sched_getaffinity(0))  # one core if the launcher has divided them
    os.sched_setaffinity(0, {cores[World.detect(os.environ).rank % len(cores)]})

    import keras
    import tensorflow as tf

    import tfdist

    strategy = tfdist.strategy("multiworker")
    world = strategy.world

    def decode(path: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        picture = tf.io.decode_jpeg(tf.io.read_file(path), channels=3)
        return tf.ensure_shape(picture, [SIZE, SIZE, 3]), tf.constant([1.0])

    files = tf.data.Dataset.list_files(f"{folder}/*.jpg", shuffle=False)
    own = kind == "per_process"
    batch_size = batch_size // world.world_size if own else batch_size
    files = tfdist.data.shard(files) if own else files
    dataset = files.map(decode, num_parallel_calls=tf.data.AUTOTUNE).batch(batch_size).prefetch(2)
    with strategy.scope():
        inputs = keras.Input((SIZE, SIZE, 3), dtype="uint8")
        corner = keras.layers.Lambda(lambda x: tf.cast(x[:, 0, 0], tf.float32), output_shape=(3,))(inputs)
        model = keras.Model(inputs, keras.layers.Dense(1)(corner))
        model.compile(keras.optimizers.SGD(1e-9), "mse", jit_compile=False)
    data = tfdist.data.per_process(dataset) if own else dataset
    seconds = []
    for _ in range(3):
        begun = time.perf_counter()
        strategy.fit(model, data, verbose=0)
        seconds.append(time.perf_counter() - begun)
    if world.is_chief:
        print(json.dumps({"per_second": count / min(seconds[1:])}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=32, help="global batch size")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        job(options.folder, options.pictures, options.batch_size, options.job)
        return
    contestants = [(1, "alike"), (2, "alike"), (2, "per_process")]
    with tempfile.TemporaryDirectory() as name:
        make_pictures(Path(name), options.pictures)
        rates: dict[tuple[int, str], list[float]] = {contestant: [] for contestant in contestants}
        for _ in range(options.repeats):
            for workers, kind in contestants:
                rates[workers, kind].append(
                    pictures_per_second(Path(name), options.pictures, options.batch_size, workers, kind)
                )
    one = statistics.median(rates[1, "alike"])
    for (workers, kind), values in rates.items():
        middle = statistics.median(values)
        spread = f"{min(values):.0f} to {max(values):.0f}"
        print(f"{workers} x {kind:12s} {middle:7.0f} images/s ({spread})   {middle / one:.2f} times one process")
    reached = statistics.median(rates[2, "per_process"]) / one
    print(f"per_process in two / one: {reached:.2f}, target {TARGET}: {'reached' if reached >= TARGET else 'missed'}")


if __name__ == "__main__":
    main()
