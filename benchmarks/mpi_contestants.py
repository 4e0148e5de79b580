"""Contestants of two processes that `mpirun` starts, each pinned to its own core, with one compute thread.

The process that takes part in the race becomes `mpirun`, whose rank 0 communicates with the race; the other ranks have
turns that do not wait.
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


def local_sgd(job: Job, turns: Turns) -> None:
    """tfdist `local_sgd` over MPI, averaging after 16 steps."""
    _together(local_sgd, job, turns, lambda own: _tfdist(job, own, "local_sgd", engine="mpi", sync_every=16))


def diloco(job: Job, turns: Turns) -> None:
    """tfdist `local_sgd` over MPI with the rule `diloco`, synchronizing every 100 steps and at the end of an epoch."""
    options = {"engine": "mpi", "outer": "diloco", "sync_every": 100}
    _together(diloco, job, turns, lambda own: _tfdist(job, own, "local_sgd", **options))


def mpi_split(job: Job, turns: Turns) -> None:
    """tfdist `mpi_split`, averaging at the end of an epoch; each process takes batches of the race's size."""
    global_job = dataclasses.replace(job, batch_size=job.batch_size * PROCESSES)

    def train(own: Any) -> None:
        _count_steps_of_all(own)
        _tfdist(global_job, own, "mpi_split")

    _together(mpi_split, job, turns, train)


def apart(job: Job, turns: Turns) -> None:
    """Two simultaneous trainings with tfdist `single`, each on half of the examples, without communication.

    This is the limit of the machine, because the cores share its memory bandwidth and its clock frequency.
    """
    half = dataclasses.replace(job, examples=job.examples // PROCESSES)

    def train(own: Any) -> None:
        from tfdist.groups.mpi import MpiGroup

        _count_steps_of_all(own, wait_for_all=MpiGroup().barrier)
        contestants._tfdist(half, own, "single", threads=1)

    _together(apart, job, turns, train)


def _count_steps_of_all(own: Any, wait_for_all: Callable[[], None] = lambda: None) -> None:
    """Makes the turns count the steps of all processes; `wait_for_all` synchronizes them if nothing else does."""
    begin, end = own.begin, own.end

    def begin_with_all(iterations: Any = 0) -> None:
        begin(int(iterations) * PROCESSES)
        wait_for_all()

    def end_with_all(loss: Any, iterations: Any) -> None:
        wait_for_all()
        end(loss, int(iterations) * PROCESSES)

    own.begin, own.end = begin_with_all, end_with_all


def _tfdist(job: Job, turns: Turns | NoTurns, name: str, **options: Any) -> None:
    _as_launched()
    contestants._tfdist(job, turns, name, timeout_seconds=3600.0, **options)


def raw_horovod(job: Job, turns: Turns) -> None:
    """Horovod as documented: one `tf.function` call per step, `hvd.allreduce` of each gradient, Keras' Adam."""
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
    """Runs `train` in every process of the job, after replacing this process with `mpirun`."""
    if RANK not in os.environ:
        os.dup2(turns._answers.fileno(), 1)
        options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(PROCESSES)]
        program = ["-m", "benchmarks.race", f"{__name__}:{function.__name__}", json.dumps(dataclasses.asdict(job))]
        os.execvp("mpirun", ["mpirun", *options, sys.executable, *program])
    rank = _pin(int(os.environ[RANK]))
    turns.polls = True  # MPI polls while it waits
    train(turns if rank == 0 else NoTurns())
    if rank:
        sys.exit(0)  # only rank 0 reports that the race has ended
