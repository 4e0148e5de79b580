"""Contestants of two processes that `mpirun` starts, each pinned to a core of its own, with one thread to compute.

The process that takes part in the race becomes `mpirun`, whose rank 0 speaks with the race in its place; the others
follow with turns that wait for nothing.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from benchmarks import contestants
from benchmarks.cluster_contestants import NoTurns, _as_launched, _one_thread, _pin
from benchmarks.contestants import compile_model, new_model
from benchmarks.race import Job, Turns

RANK = "OMPI_COMM_WORLD_RANK"
PROCESSES = 2


def horovod(job: Job, turns: Turns) -> None:
    """tfdist `horovod` over MPI."""
    _together(horovod, job, turns, lambda own: _tfdist(job, own, "horovod"))


def mpi_split(job: Job, turns: Turns) -> None:
    """tfdist `mpi_split`, averaging at the end of an epoch; each process takes batches of the race's size."""
    of_all = dataclasses.replace(job, batch_size=job.batch_size * PROCESSES)

    def train(own: Any) -> None:
        # The processes' steps together are those of one process.
        begin, end = own.begin, own.end
        own.begin = lambda iterations=0: begin(int(iterations) * PROCESSES)
        own.end = lambda loss, iterations: end(loss, int(iterations) * PROCESSES)
        _tfdist(of_all, own, "mpi_split")

    _together(mpi_split, job, turns, train)


def apart(job: Job, turns: Turns) -> None:
    """Two trainings with tfdist `single` at once, each of half of the examples, without a word to each other.

    What this machine allows: two cores share its memory and its clock.
    """
    half = dataclasses.replace(job, examples=job.examples // PROCESSES)
    _together(apart, job, turns, lambda own: contestants._tfdist(half, _InStep(own), "single", threads=1))


class _InStep:
    """Turns that the processes begin and end together where nothing else makes them."""

    def __init__(self, own: Turns | NoTurns):
        from tfdist.communicators.mpi import MpiCommunicator

        self._own = own
        self._barrier = MpiCommunicator().barrier

    def callback(self) -> Any:
        """A Keras callback whose epochs are the turns."""
        import keras

        own, barrier = self._own, self._barrier

        class Turn(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                own.begin(PROCESSES * self.model.optimizer.iterations.numpy())
                barrier()

            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                loss = float(logs["loss"])
                barrier()
                own.end(loss, PROCESSES * self.model.optimizer.iterations.numpy())

        return Turn()


def _tfdist(job: Job, turns: Turns | NoTurns, name: str) -> None:
    _as_launched()
    contestants._tfdist(job, turns, name, timeout_seconds=3600.0)


def raw_horovod(job: Job, turns: Turns) -> None:
    """Horovod as its documentation says: a `tf.function` a step, `hvd.allreduce` of each gradient, Keras' Adam."""
    _together(raw_horovod, job, turns, lambda own: _raw_horovod(job, own))


def _raw_horovod(job: Job, turns: Turns | NoTurns) -> None:
    _one_thread()
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    model = new_model(job)
    compile_model(model, jit_compile=False)
    optimizer, loss_of = model.optimizer, model.loss
    optimizer.build(model.trainable_variables)
    size = job.batch_size // hvd.size()
    x, y = contestants._arrays(job)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shard(hvd.size(), hvd.rank())
    dataset = dataset.shuffle(len(x), seed=job.seed).batch(size).prefetch(tf.data.AUTOTUNE).repeat()

    @tf.function
    def step(images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(loss_of(labels, model(images, training=True)))
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients = [hvd.allreduce(gradient, op=hvd.Average) for gradient in gradients]
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    batches = iter(dataset)
    step(*next(batches))
    hvd.broadcast_variables([v.value for v in [*model.variables, *optimizer.variables]], root_rank=0)
    for _ in range(job.epochs):
        turns.begin(optimizer.iterations.numpy())
        total = 0.0
        for _ in range(job.steps):
            total += step(*next(batches))
        turns.end(total / job.steps, optimizer.iterations.numpy())


def _together(function: Callable[..., None], job: Job, turns: Turns, train: Callable[[Turns | NoTurns], None]) -> None:
    """Runs `train` in every process of the job, after this one has become its `mpirun`."""
    if RANK not in os.environ:
        os.dup2(turns._answers.fileno(), 1)
        options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(PROCESSES)]
        program = ["-m", "benchmarks.race", f"{__name__}:{function.__name__}", json.dumps(dataclasses.asdict(job))]
        os.execvp("mpirun", ["mpirun", *options, sys.executable, *program])
    rank = _pin(int(os.environ[RANK]))
    turns.polls = True  # as MPI does while it waits
    train(turns if rank == 0 else NoTurns())
    if rank:
        sys.exit(0)  # rank 0 alone says that the race has ended
