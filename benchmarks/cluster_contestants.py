"""Contestants with several processes, each pinned to its own core, with one compute thread.

The process that takes part in the race is the first process of its job. It starts the others, which run the same
function with turns that do not wait.
"""

from __future__ import annotations

import atexit
import dataclasses
import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from benchmarks import contestants
from benchmarks.contestants import compile_model, new_model
from benchmarks.race import Job, Turns
from tfdist import startup

RANK = "TFDIST_BENCHMARK_RANK"
STEPS_PER_CALL = 50


class NoTurns:
    """The turns of a process other than the first of its job."""

    note = ""

    def begin(self, iterations: Any = 0) -> None:
        """Does not wait."""

    def end(self, loss: Any, iterations: Any) -> None:
        """Reports nothing."""
        float(loss)

    callback = Turns.callback


def single_core(job: Job, turns: Turns) -> None:
    """tfdist `single` on one core."""
    _pin(0)
    contestants._tfdist(job, turns, "single", threads=1)


def multiworker(job: Job, turns: Turns) -> None:
    """tfdist `multiworker`, two processes."""
    _multiworker(job, turns, multiworker)


def multiworker_bf16(job: Job, turns: Turns) -> None:
    """tfdist `multiworker`, two processes, with gradients as bfloat16."""
    _multiworker(job, turns, multiworker_bf16, compression="bf16")


def _multiworker(job: Job, turns: Turns, function: Callable[..., None], **options: Any) -> None:
    _join(function, job, {"worker": 2})
    _as_launched()
    contestants._tfdist(job, turns, "multiworker", timeout_seconds=3600.0, **options)


def raw_multiworker(job: Job, turns: Turns) -> None:
    """`tf.distribute.MultiWorkerMirroredStrategy` by hand: Keras' `train_step` in one `tf.function` of 50 steps."""
    _join(raw_multiworker, job, {"worker": 2})
    _one_thread()
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = new_model(job)
        compile_model(model, jit_compile=False)
        model.optimizer.build(model.trainable_variables)
    dataset = contestants._dataset(job).repeat()
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    batches = iter(strategy.experimental_distribute_dataset(dataset.with_options(options)))

    @tf.function
    def run(batches: Any, steps: Any) -> None:
        for _ in tf.range(steps):
            strategy.run(model.train_step, args=(next(batches),))

    run(batches, tf.constant(1))  # creates the variables that Keras creates in its first step
    for _ in range(job.epochs):
        turns.begin(model.optimizer.iterations.numpy())
        model.reset_metrics()
        for begin in range(0, job.steps, STEPS_PER_CALL):
            run(batches, tf.constant(min(STEPS_PER_CALL, job.steps - begin)))
        with strategy.scope():
            loss = float(model.get_metrics_result()["loss"])
        turns.end(loss, model.optimizer.iterations.numpy())


def torch_ddp(job: Job, turns: Turns) -> None:
    """PyTorch's `DistributedDataParallel` over gloo, fused Adam, two processes."""
    rank = _join(torch_ddp, job, {"worker": 2})
    import torch
    import torch.distributed as dist
    from torch import nn

    torch.set_num_threads(1)
    address = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"][0]
    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=2)
    torch.manual_seed(job.seed)
    model = nn.parallel.DistributedDataParallel(_torch_model(job))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-7, fused=True)
    criterion = nn.CrossEntropyLoss()
    arrays = contestants._arrays(job)
    x, y = torch.from_numpy(arrays[0]).movedim(-1, 1).contiguous(), torch.from_numpy(arrays[1]).long()
    order = torch.Generator().manual_seed(job.seed)
    steps = 0
    for _ in range(job.epochs):
        turns.begin(steps)
        loss_sum, correct = torch.zeros(()), torch.zeros((), dtype=torch.int64)
        for batch in torch.randperm(len(x), generator=order).split(job.batch_size):
            indices = batch[rank::2]
            optimizer.zero_grad(set_to_none=True)
            logits = model(x[indices])
            loss = criterion(logits, y[indices])
            loss.backward()
            optimizer.step()
            steps += 1
            loss_sum += loss.detach() * len(indices)
            correct += (logits.argmax(1) == y[indices]).sum()
        assert 0 < int(correct) <= len(x)
        turns.end(float(loss_sum) * 2 / len(x), steps)


def _torch_model(job: Job) -> Any:
    from torch import nn

    if job.model == "cnn":
        return nn.Sequential(
            *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(1600, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)),
        )
    widths = (784, 2048, 2048, 512)
    hidden = [part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(512, 10))


def parameter_server(job: Job, turns: Turns) -> None:
    """tfdist `parameter_server`, two workers and one server."""
    _join(parameter_server, job, {"chief": 1, "worker": 2, "ps": 1})
    _as_launched()
    contestants._tfdist(job, turns, "parameter_server")


def coordinator_by_hand(job: Job, turns: Turns) -> None:
    """A loop over `ClusterCoordinator.schedule`, one step per closure; each worker has the whole dataset."""
    _join(coordinator_by_hand, job, {"chief": 1, "worker": 2, "ps": 1})
    _one_thread()
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type != "chief":
        # As in TensorFlow's guide; with fewer threads than closures it hangs.
        config = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=6)
        tf.distribute.Server(
            resolver.cluster_spec(),
            job_name=resolver.task_type,
            task_index=resolver.task_id,
            protocol="grpc",
            config=config,
        ).join()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        model = new_model(job)
        compile_model(model, jit_compile=False)
        model.optimizer.build(model.trainable_variables)
    batches = iter(coordinator.create_per_worker_dataset(lambda: contestants._dataset(job).repeat()))

    @tf.function
    def step(batches: Any) -> Any:
        return strategy.run(model.train_step, args=(next(batches),))

    done = 0
    for _ in range(job.epochs):
        turns.begin(done)
        with strategy.scope():
            model.reset_metrics()
        for _ in range(job.steps):
            coordinator.schedule(step, args=(batches,))
        coordinator.join()
        done += job.steps  # Keras' own counter shows fewer, since its updates are lost when workers race
        with strategy.scope():
            loss = float(model.get_metrics_result()["loss"])
        turns.end(loss, done)


def _join(function: Callable[..., None], job: Job, counts: dict[str, int]) -> int:
    """Makes this process part of a job, whose first process starts the others; returns its rank, also its core."""
    if RANK in os.environ:
        return _pin(int(os.environ[RANK]))
    roles = [(role, index) for role, count in counts.items() for index in range(count)]
    cluster: dict[str, list[str]] = {}
    for (role, _), port in zip(roles, _free_ports(len(roles)), strict=True):
        cluster.setdefault(role, []).append(f"localhost:{port}")
    for rank, (role, index) in enumerate(roles):
        task = {"cluster": cluster, "task": {"type": role, "index": index}}
        environment = os.environ | {"TF_CONFIG": json.dumps(task), RANK: str(rank)}
        if rank == 0:
            os.environ.update(environment)
        else:
            _follow(function, job, environment)
    return _pin(0)


def _follow(function: Callable[..., None], job: Job, environment: dict[str, str]) -> None:
    arguments = [sys.executable, "-m", __name__, function.__name__, json.dumps(dataclasses.asdict(job))]
    process = subprocess.Popen(arguments, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    atexit.register(process.kill)


def _pin(rank: int) -> int:
    # Starts with the last core, because on many machines the first core also handles interrupts of devices.
    cores = os.cpu_count() or 1
    os.sched_setaffinity(0, {cores - 1 - rank % cores})
    return rank


def _free_ports(count: int) -> list[int]:
    listeners = [socket.create_server(("localhost", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


def _one_thread() -> None:
    contestants._threads(intra=1, inter=2)


def _as_launched() -> None:
    """Sets one compute thread, and prepares the imports as tfdist's launcher does."""
    startup.prepare_imports()
    _one_thread()


if __name__ == "__main__":
    globals()[sys.argv[1]](Job(**json.loads(sys.argv[2])), NoTurns())
