"""Examples per second that other libraries' data reach as the input of tfdist, beside tf.data; without training.

    tf.data                in memory: `from_tensor_slices().shuffle().batch().prefetch()`; in files: `TFRecordDataset`
    Hugging Face           `tfdist.data.examples(dataset)`; the library's own `to_tf_dataset`
    ArrayRecord            `tfdist.data.examples(source, decode)`
    Grain                  `tfdist.data.examples(map_dataset)`; its batches as they are, `MapDataset` and `DataLoader`

An example is a picture of 28x28 bytes and its label. All are shuffled. Contestants take turns, one epoch each.

Example: `python -m benchmarks.libraries --examples 10000 --epochs 3`
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

SHAPE = (28, 28, 1)
PIXELS = 28 * 28


def decode(record: bytes) -> tuple[np.ndarray, np.uint8]:
    """A picture and its label from the bytes of a record."""
    values = np.frombuffer(record, np.uint8)
    return values[:PIXELS].reshape(SHAPE), values[PIXELS]


def tf_data(x: np.ndarray, y: np.ndarray, records: list[bytes], folder: Path, batch: int) -> dict[str, Any]:
    """The pipelines of tf.data: functions that return an epoch's batches."""
    import tensorflow as tf

    def parse(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        values = tf.io.decode_raw(record, tf.uint8, fixed_length=PIXELS + 1)
        return tf.reshape(values[:PIXELS], SHAPE), values[PIXELS]

    with tf.io.TFRecordWriter(str(folder / "train.tfrecord")) as writer:
        for record in records:
            writer.write(record)
    in_memory = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(y)).batch(batch).prefetch(2)
    stored = tf.data.TFRecordDataset(str(folder / "train.tfrecord")).shuffle(len(y))
    parsed = stored.map(parse, num_parallel_calls=tf.data.AUTOTUNE).batch(batch).prefetch(2)
    return {"tf.data, in memory": lambda epoch: in_memory, "tf.data, TFRecord": lambda epoch: parsed}


def others(x: np.ndarray, y: np.ndarray, records: list[bytes], folder: Path, batch: int) -> dict[str, Any]:
    """The data of the other libraries, as tfdist reads them."""
    import datasets
    import grain
    from array_record.python import array_record_data_source, array_record_module

    from tfdist.data import examples
    from tfdist.data.input import adapters

    writer = array_record_module.ArrayRecordWriter(str(folder / "train.array_record"), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
    source = array_record_data_source.ArrayRecordDataSource(str(folder / "train.array_record"))
    hugging_face = datasets.Dataset.from_dict({"x": x.reshape(len(y), -1), "y": y})
    mapped = grain.MapDataset.source(source).map(decode)
    sampler = grain.samplers.IndexSampler(len(y), shuffle=True, seed=0, num_epochs=1)
    loader = grain.DataLoader(
        data_source=source,
        sampler=sampler,
        shard_options=grain.sharding.NoSharding(),
        operations=[Decode(), grain.transforms.Batch(batch)],
    )

    def epochs(data: Any) -> Callable[[int], Iterable[Any]]:
        feed = adapters.make(adapters.request(data, batch_size=batch, shuffle=True), seed=0)
        return lambda epoch: feed.start(epoch, 0)

    own = hugging_face.to_tf_dataset(batch, columns="x", label_cols="y", shuffle=True, prefetch=True)
    return {
        "Hugging Face, examples": epochs(examples(hugging_face, y="y")),
        "Hugging Face, to_tf_dataset": lambda epoch: own,
        "ArrayRecord, examples": epochs(examples(source, decode)),
        "Grain over ArrayRecord, examples": epochs(examples(mapped)),
        "Grain over ArrayRecord, MapDataset": epochs(mapped.shuffle(0).batch(batch)),
        "Grain over ArrayRecord, DataLoader": epochs(loader),
    }


class Decode:
    """`decode` as a transformation of Grain's `DataLoader`; it becomes a subclass of Grain's when it is made."""

    def __new__(cls) -> Any:
        import grain

        return type("Decode", (grain.transforms.Map,), {"map": staticmethod(decode)})()


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=10_000)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=3, help="measured per contestant, after one that is not")
    arguments = parser.parse_args()
    generator = np.random.default_rng(0)
    x = generator.integers(0, 255, (arguments.examples, *SHAPE), np.uint8)
    y = generator.integers(0, 10, arguments.examples).astype(np.uint8)
    records = [picture.tobytes() + label.tobytes() for picture, label in zip(x, y, strict=True)]
    with tempfile.TemporaryDirectory() as name:
        made = [make(x, y, records, Path(name), arguments.batch_size) for make in (tf_data, others)]
        contestants = made[0] | made[1]
        rates: dict[str, list[float]] = {contestant: [] for contestant in contestants}
        for epoch in range(arguments.epochs + 1):
            for contestant, epoch_of in contestants.items():
                begun = time.perf_counter()
                count = sum(len(batch[1]) for batch in epoch_of(epoch))
                assert count == arguments.examples, (contestant, count)
                rates[contestant].append(count / (time.perf_counter() - begun))
    print("| data | examples per second, median | range |\n|---|---|---|")
    for contestant, measured in rates.items():
        kept = measured[1:]
        print(f"| {contestant} | {statistics.median(kept):,.0f} | {min(kept):,.0f} to {max(kept):,.0f} |")


if __name__ == "__main__":
    main()
