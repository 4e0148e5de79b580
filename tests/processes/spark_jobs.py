"""What users write for Spark: functions for `tfdist.spark.run`, and the program that runs one of them.

python tests/processes/spark_jobs.py NAME FOLDER
"""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
from pyspark.sql import SparkSession

import tfdist
from tfdist.errors import TfdistError

ROWS, BATCH = 320, 32


def session():
    return (
        SparkSession.builder.master("local-cluster[2,1,1024]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .getOrCreate()
    )


def trained(strategy, data, batch_size):
    import keras

    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10, activation="softmax")])
        model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
    strategy.prepare(model)
    model.fit(*data, batch_size=batch_size, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


def train(folder):
    """Each process reads its rows of the data frame."""
    strategy = tfdist.strategy("multiworker", seed=1)
    columns = tfdist.spark.read_parquet(folder, ["pixels", "label"])
    data = tfdist.data.per_process((columns["pixels"], columns["label"]))
    return strategy.world.rank, len(columns["label"]), trained(strategy, [data], BATCH // 2)


def fail(how):
    from tfdist.world import World

    if World.detect().rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("the rate is negative")
    time.sleep(100)


def training(folder):
    """Trains on a data frame in two processes, and on one device on the same rows in the order of the batches."""
    x, y = tfdist.data.load("digits").arrays("train")
    x, y = x[:ROWS].reshape(ROWS, 64), y[:ROWS]
    path = str(Path(folder) / "digits")
    rows = [(int(label), [float(pixel) for pixel in pixels]) for pixels, label in zip(x, y, strict=True)]
    session().createDataFrame(rows, ["label", "pixels"]).coalesce(1).write.parquet(path)
    (first, count, weights), (second, others, same) = tfdist.spark.run(train, args=(path,), workers=2)
    print("ranks", first, second, "rows", count, others)
    halves = np.arange(ROWS).reshape(2, ROWS // BATCH, BATCH // 2)
    order = halves.swapaxes(0, 1).ravel()
    expected = trained(tfdist.strategy("single", seed=1), (x[order].astype("float64"), y[order]), BATCH)
    for one, two, alone in zip(weights, same, expected, strict=True):
        np.testing.assert_array_equal(one, two)
        np.testing.assert_allclose(one, alone, rtol=0, atol=1e-6)
    print("equal")


def failures(_):
    """What the driver raises if a process fails, if one is killed, and if there are too few slots."""
    session()
    for how in ("raised", "killed"):
        began = time.monotonic()
        try:
            tfdist.spark.run(fail, args=(how,))
        except TfdistError as error:
            print(how, type(error).__name__, error.sentence, "soon" if time.monotonic() - began < 60 else "late")
    tfdist.spark.START_SECONDS = 1
    try:
        tfdist.spark.run(fail, args=("never",), workers=3)
    except TfdistError as error:
        print("slots", type(error).__name__, error.sentence)


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
