"""What users write for Ray Train: functions that train with tfdist in its workers, and the programs that start them.

    python tests/processes/ray_jobs.py NAME FOLDER

runs the function `NAME` of this module with a folder for what it writes.
"""

import os
import signal
import sys
import time
from pathlib import Path

import keras
import numpy as np
import ray.data
import ray.train
import ray.tune
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.tensorflow import TensorflowTrainer
from ray.tune.integration.ray_train import TuneReportCallback

import tfdist
from tfdist.errors import UsageError
from tfdist.jobs.world import World

BATCH, EPOCHS, STEPS_PER_EPOCH = 32, 3, 10


def arrays():
    x, y = tfdist.data.load("digits").arrays("train")
    return x[: BATCH * STEPS_PER_EPOCH], y[: BATCH * STEPS_PER_EPOCH]


def compiled_model(rate=0.05):
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(4, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.25),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.SGD(rate, momentum=0.9), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


class KilledOnce(keras.callbacks.Callback):
    """Kills the process of a rank after a step, unless it did so before."""

    def __init__(self, rank, step, flag):
        super().__init__()
        self.rank, self.step, self.flag = rank, step, Path(flag)

    def on_train_batch_end(self, batch, logs=None):
        here = ray.train.get_context().get_world_rank() == self.rank
        if here and int(self.model.optimizer.iterations.numpy()) == self.step and not self.flag.exists():
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Slow(keras.callbacks.Callback):
    """Waits after each step while there is one worker."""

    def on_train_batch_end(self, batch, logs=None):
        if ray.train.get_context().get_world_size() == 1:
            time.sleep(0.5)


def train(config):
    """The training function of the tests: digits, with what `config` adds to it."""
    strategy = tfdist.strategy(config.get("strategy", "multiworker"), seed=7)
    with strategy.scope():
        model = compiled_model(config.get("rate", 0.05))
    strategy.prepare(model)
    x, y = arrays()
    if config.get("unequal"):
        x = x + strategy.world.rank
    callbacks = [tfdist.ray.Report(every_steps=4)]
    if "kill" in config:
        callbacks.append(KilledOnce(*config["kill"]))
    if config.get("slow"):
        callbacks.append(Slow())
    print("workers", strategy.world.world_size, "checkpoint", ray.train.get_checkpoint() is not None, flush=True)
    model.fit(x, y, batch_size=BATCH, epochs=config.get("epochs", EPOCHS), callbacks=callbacks, verbose=0)
    save(model, config["folder"], strategy.world)


def train_on_ray_data(config):
    strategy = tfdist.strategy("multiworker", seed=7)
    with strategy.scope():
        model = compiled_model()
    strategy.prepare(model)
    shard = ray.train.get_dataset_shard("train").to_tf("x", "y", batch_size=BATCH // 2)
    seen = model.fit(tfdist.data.per_process(shard), epochs=1, callbacks=[tfdist.ray.Report()], verbose=0)
    print("loss", seen.history["loss"], "steps", model.optimizer.iterations.numpy(), flush=True)
    save(model, config["folder"], strategy.world)


def train_in_phases(config):
    """Calls of `fit` with a `Report`, one of them without a strategy, and a metric with a value for each class."""
    strategy = tfdist.strategy("multiworker", seed=7)
    with strategy.scope():
        model = compiled_model()
        model.compile("sgd", "categorical_crossentropy", metrics=[keras.metrics.F1Score(average=None)])
    strategy.prepare(model)
    x, y = arrays()
    classes = keras.utils.to_categorical(y, 10)
    model.fit(x, classes, batch_size=BATCH, epochs=1, callbacks=[tfdist.ray.Report()], verbose=0)
    for another, targets in ((model, classes), (compiled_model(), y)):
        try:
            another.fit(x, targets, batch_size=BATCH, epochs=1, callbacks=[tfdist.ray.Report()], verbose=0)
        except UsageError as error:
            print("refused:", error.sentence, flush=True)


def save(model, folder, world):
    np.savez(f"{folder}/rank-{world.rank}.npz", *model.get_weights())


def trainer(folder, workers=2, failures=0, loop=train, datasets=None, **config):
    return TensorflowTrainer(
        loop,
        train_loop_config={"folder": str(folder), **config},
        scaling_config=ScalingConfig(num_workers=workers, elastic_resize_monitor_interval_s=1),
        run_config=RunConfig(storage_path=str(folder), name="run", failure_config=FailureConfig(max_failures=failures)),
        datasets=datasets,
    )


def unbroken(folder):
    """A training, and what Ray has of it."""
    result = trainer(folder).fit()
    print("metrics", sorted(result.metrics), "checkpoint", result.checkpoint is not None)


def killed(folder, rank="1", step="14"):
    """A worker is killed, and Ray starts the workers again."""
    result = trainer(folder, failures=1, kill=(int(rank), int(step), f"{folder}/killed")).fit()
    print("metrics", sorted(result.metrics), "checkpoint", result.checkpoint is not None)


def with_strategy(folder, name):
    """One epoch with another strategy than `multiworker`."""
    trainer(folder, strategy=name, epochs=1).fit()


def continued(folder):
    """Two epochs, and another training under the same name, which continues them."""
    trainer(folder, epochs=2).fit()
    trainer(folder).fit()


def unequal(folder):
    """Each worker has other data, and does not say so."""
    trainer(folder, unequal=True).fit()


def elastic(folder):
    """As many workers as the cluster has cores."""
    trainer(folder, workers=(1, 2), slow=True).fit()


def ray_data(folder):
    """The workers read the shards of a dataset of Ray Data, in the order of the dataset."""
    x, y = arrays()
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    dataset = ray.data.from_items([{"x": image, "y": label} for image, label in zip(x, y, strict=True)])
    trainer(folder, loop=train_on_ray_data, datasets={"train": dataset}).fit()


def tuned(folder):
    """Two trials of Ray Tune, each of which trains on two workers."""

    def trial(config):
        name = f"rate-{config['rate']}"
        one = trainer(f"{folder}/{name}", rate=config["rate"], epochs=1)
        one.run_config.callbacks = [TuneReportCallback()]
        Path(folder, name).mkdir()
        one.fit()

    tuner = ray.tune.Tuner(
        trial,
        param_space={"rate": ray.tune.grid_search([0.05, 0.0])},
        tune_config=ray.tune.TuneConfig(metric="loss", mode="min", max_concurrent_trials=1),
        run_config=ray.tune.RunConfig(storage_path=str(folder), name="tune"),
    )
    best = tuner.fit().get_best_result()
    print("best", best.config, sorted(best.metrics))


def phases(folder):
    """Several calls of `fit` in one training function."""
    print("values of the metric", len(trainer(folder, loop=train_in_phases).fit().metrics["f1_score"]))


def report_in_tune(folder):
    """A trial of Ray Tune makes a `Report` without Ray Train."""
    run_config = ray.tune.RunConfig(storage_path=str(folder), name="tune", verbose=0)
    print(ray.tune.Tuner(lambda config: tfdist.ray.Report(), run_config=run_config).fit().errors)


def one_device(folder):
    """The same training on one device."""
    strategy = tfdist.strategy("single", seed=7)
    with strategy.scope():
        model = compiled_model()
    strategy.prepare(model)
    model.fit(*arrays(), batch_size=BATCH, epochs=EPOCHS, verbose=0)
    save(model, folder, World.detect())


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
