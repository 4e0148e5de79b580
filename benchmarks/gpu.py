"""Examples per second on the GPUs of this machine: stock Keras, tfdist and PyTorch, in float32 and bfloat16.

Synthetic examples, SGD, and XLA according to Keras' `jit_compile="auto"`. Without a GPU it runs on the CPU, as a test.

Example: `python -m benchmarks.gpu --models resnet50 --dtypes float32 mixed_bfloat16`
"""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import statistics
from dataclasses import replace
from typing import Any

from benchmarks import race
from benchmarks.race import Goal, Job, Turns

CONTESTANTS = {
    "fit": "benchmarks.gpu:fit",
    "single": "benchmarks.gpu:single",
    "mirrored_fit": "benchmarks.gpu:mirrored_fit",
    "mirrored": "benchmarks.gpu:mirrored",
    "custom": "benchmarks.gpu:custom",
    "torch_compile": "benchmarks.gpu:torch_compile",
    "torch_ddp": "benchmarks.gpu:torch_ddp",
}
GOALS = [
    Goal("fit", "single", 1.0),
    Goal("mirrored_fit", "mirrored", 1.0),
    Goal("torch_compile", "single"),
    Goal("torch_ddp", "mirrored"),
]
BATCHES = {"resnet50": 128, "transformer": 128, "mlp": 1024}
STEPS = 50


def fit(job: Job, turns: Turns) -> None:
    """Stock Keras on the first GPU."""
    _train(_compiled(job, contextlib.nullcontext()), job, turns)


def mirrored_fit(job: Job, turns: Turns) -> None:
    """Stock Keras under `tf.distribute.MirroredStrategy` on all GPUs."""
    import tensorflow as tf

    _train(_compiled(job, tf.distribute.MirroredStrategy().scope()), job, turns)


def single(job: Job, turns: Turns) -> None:
    """tfdist `single` on the first GPU."""
    _by_tfdist(job, turns, "single")


def mirrored(job: Job, turns: Turns) -> None:
    """tfdist `mirrored` on all GPUs."""
    _by_tfdist(job, turns, "mirrored")


def custom(job: Job, turns: Turns) -> None:
    """tfdist `custom` on all GPUs."""
    _by_tfdist(job, turns, "custom")


def _by_tfdist(job: Job, turns: Turns, name: str) -> None:
    import tfdist

    strategy = tfdist.strategy(name, seed=job.seed)
    model = _compiled(job, strategy.scope())
    turns.note = f"{strategy.num_replicas} replicas"
    _train(strategy.prepare(model), job, turns)


def _compiled(job: Job, scope: Any) -> Any:
    import keras

    import tfdist.models

    keras.utils.set_random_seed(job.seed)
    keras.config.set_dtype_policy(job.data)
    with scope:
        model = tfdist.models.build(job.model, _source(job).spec)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.01), loss)
    return model


def _train(model: Any, job: Job, turns: Turns) -> None:
    x, y = _source(job).arrays("train")
    model.fit(x, y, batch_size=job.batch_size, epochs=job.epochs, verbose=0, callbacks=[turns.callback()])


def _source(job: Job) -> Any:
    import tfdist.data

    options: dict[str, dict[str, Any]] = {
        "resnet50": {"shape": (224, 224, 3), "classes": 1000},
        "transformer": {"task": "text_classification", "words": 20_000, "length": 256},
        "mlp": {},
    }
    return tfdist.data.load("synthetic", train=job.examples, **options[job.model])


def torch_compile(job: Job, turns: Turns) -> None:
    """A PyTorch loop over `torch.compile`d steps, on the first GPU."""
    _train_by_torch(job, turns, 0, 1)


def torch_ddp(job: Job, turns: Turns) -> None:
    """The same with PyTorch's `DistributedDataParallel`: one process per GPU with NCCL, or two on the CPU with gloo."""
    import torch

    size = torch.cuda.device_count() or 2
    with socket.create_server(("localhost", 0)) as listener:
        address = f"tcp://localhost:{listener.getsockname()[1]}"
    turns.note = f"{size} replicas"
    context = multiprocessing.get_context("spawn")
    for rank in range(1, size):
        context.Process(target=_ddp_replica, args=(job, None, rank, size, address), daemon=True).start()
    _ddp_replica(job, turns, 0, size, address)


def _ddp_replica(job: Job, turns: Turns | None, rank: int, size: int, address: str) -> None:
    import torch
    import torch.distributed as dist

    has_gpus = torch.cuda.is_available()
    dist.init_process_group("nccl" if has_gpus else "gloo", init_method=address, rank=rank, world_size=size)
    if not has_gpus:
        torch.set_num_threads(max(1, torch.get_num_threads() // size))
    _train_by_torch(job, turns, rank, size)
    dist.destroy_process_group()


def _train_by_torch(job: Job, turns: Turns | None, rank: int, size: int) -> None:
    """Trains on this rank's share of each batch; rank 0 has the `turns`."""
    import torch

    device = f"cuda:{rank}" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(job.seed)
    x, y = (torch.from_numpy(array).to(device) for array in _source(job).arrays("train"))
    model = _torch_model(job.model).to(device)
    if size > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    x = x.permute(0, 3, 1, 2) if job.model == "resnet50" else x
    optimizer, criterion = torch.optim.SGD(model.parameters(), 0.01), torch.nn.CrossEntropyLoss()
    precision = torch.autocast(torch.device(device).type, torch.bfloat16, enabled=job.data == "mixed_bfloat16")
    order = torch.Generator(device).manual_seed(job.seed)  # the same on all ranks

    @torch.compile
    def loss_of(inputs: Any, labels: Any) -> Any:
        with precision:
            return criterion(model(inputs), labels)

    for number in range(job.epochs):
        if turns is not None:
            turns.begin(number * job.steps)
        total = torch.zeros((), device=device)
        for batch in torch.randperm(len(x), device=device, generator=order).split(job.batch_size):
            indices = batch[rank::size]
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(x[indices], y[indices].long())
            loss.backward()
            optimizer.step()
            total += loss.detach()
        if turns is not None:
            turns.end(float(total) / job.steps, (number + 1) * job.steps)


def _torch_model(name: str) -> Any:
    """The PyTorch model that corresponds to tfdist's model `name`."""
    from torch import nn

    if name == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
    if name == "resnet50":
        from torchvision.models import resnet50

        return resnet50()
    from benchmarks.torch_transformer import Transformer

    return Transformer()


def main() -> None:
    parser = race.parser(__doc__, warmup=1)
    parser.add_argument("--models", nargs="+", choices=BATCHES, default=list(BATCHES))
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "mixed_bfloat16"], default=["float32"])
    parser.add_argument("--batch-size", type=int, help="examples per global batch")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps per epoch (default: %(default)s)")
    arguments = parser.parse_args()
    for model in arguments.models:
        batch_size = arguments.batch_size or BATCHES[model]
        job = Job(model, batch_size, arguments.steps * batch_size, epochs=0, data="")
        for dtype in arguments.dtypes:
            contestants = race.chosen(CONTESTANTS, arguments.only)
            tracks = race.run(replace(job, data=dtype), contestants, warmup=arguments.warmup, repeats=arguments.repeats)
            race.report(f"{model}, {dtype}, batch {batch_size}: seconds per epoch of {job.steps} steps", tracks, GOALS)
            for name, track in tracks.items():
                print(f"{name:<24}{job.examples / statistics.median(track.seconds):>12,.0f} examples/s")


if __name__ == "__main__":
    main()
