"""Seconds per epoch: `resnet20`, SGD with momentum, batch 128, CIFAR-10 padded, cropped and flipped at random.

All contestants use tfdist's tf.data pipeline. Without CIFAR's files the images are synthetic.

Example: `python -m benchmarks.resnet20_epoch --files FOLDER`, where FOLDER has the folder `cifar10`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from benchmarks import race
from benchmarks.race import Goal, Job, Turns

CONTESTANTS = {
    "single": "benchmarks.resnet20_epoch:single",
    "fit": "benchmarks.resnet20_epoch:fit",
    "fit_tuned": "benchmarks.resnet20_epoch:fit_tuned",
}
GOALS = [Goal("fit", "single", 1.0), Goal("fit_tuned", "single", 1.0)]


def single(job: Job, turns: Turns) -> None:
    """tfdist `single`."""
    import tfdist

    strategy = tfdist.strategy("single", seed=job.seed)
    with strategy.scope():
        model = _compiled(job)
    strategy.prepare(model)
    _train(model, job, turns)


def fit(job: Job, turns: Turns) -> None:
    """Stock Keras with its defaults: `jit_compile="auto"`, which is XLA here."""
    _train(_compiled(job), job, turns)


def fit_tuned(job: Job, turns: Turns) -> None:
    """Stock Keras without XLA, with ten steps per call; steps are too long for more to matter."""
    _train(_compiled(job, jit_compile=False, steps_per_execution=10), job, turns)


def _compiled(job: Job, **options: Any) -> Any:
    import keras

    import tfdist.models

    keras.utils.set_random_seed(job.seed)
    model = tfdist.models.build(job.model, _source(job).spec)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss, metrics=["accuracy"], **options)
    return model


def _train(model: Any, job: Job, turns: Turns) -> None:
    dataset = _source(job).pipeline("train", job.batch_size, seed=job.seed, augment="crop_flip")
    model.fit(dataset, epochs=job.epochs, verbose=0, callbacks=[turns.callback()])


def _source(job: Job) -> Any:
    """The first `job.examples` training images of CIFAR's files in `job.data`, or synthetic images."""
    import tfdist.data

    if job.data:
        return tfdist.data.load("cifar_binary", job.data).limit(job.examples)
    return tfdist.data.load("synthetic", shape=(32, 32, 3), classes=10, train=job.examples)


def main() -> None:
    parser = race.parser(__doc__, warmup=1)
    parser.add_argument("--files", type=Path, default=os.environ.get("TFDIST_DATA"), help="plain files")
    parser.add_argument("--examples", type=int, default=2560, help="training examples (default: %(default)s)")
    arguments = parser.parse_args()
    contestants = race.chosen(CONTESTANTS, arguments.only)
    folder = Path(arguments.files, "cifar10") if arguments.files else None
    exists = folder is not None and folder.is_dir()
    print(f"data: {'CIFAR-10' if exists else 'SYNTHETIC, images of 32x32x3'}", flush=True)
    data = str(folder) if exists else ""
    job = Job("resnet20", batch_size=128, examples=arguments.examples, epochs=0, data=data)
    tracks = race.run(job, contestants, warmup=arguments.warmup, repeats=arguments.repeats)
    race.report(f"resnet20, batch 128, {job.examples:,} examples: seconds per epoch", tracks, GOALS)


if __name__ == "__main__":
    main()
