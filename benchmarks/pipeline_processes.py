"""A pipeline of two processes: its memory compared with the whole model, and its speed compared with PyTorch.

    memory    the memory that training adds to the process of a stage, relative to one process with the whole model
    speed     time of GPipe by hand in PyTorch (`torch.distributed.pipelining`, gloo) / time of `pipeline`, for the same
              dense model of 6.6 million parameters, cut, micro-batches, Adam, and one thread per process
    schedules time of one process / time of `pipeline` with each schedule, for that model, which has two thirds of its
              work in one layer, and for a model of six equal layers (`--model even`)

Each measurement is a fresh job on this machine; the kinds take turns, and the last figure is the median of the ratios.
Example: `python -m benchmarks.pipeline_processes --torch /tmp/torch/bin/python`
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import ROOT, peak, reset_peak
from benchmarks.sharding import epoch_timer

WIDE = [784, 2048, 2048, 512, 10]
BALANCED = [64, *[2048] * 9, 64]  # layers that divide evenly, with small data
EVEN = [*[1024] * 7, 10]
CUTS = {"wide": 1, "even": 3}  # the first layer of the second stage
SCHEDULES = ("gpipe", "1f1b", "2bw")


def main() -> None:
    arguments = _parser().parse_args()
    if arguments.kind is not None:
        numbers = torch_stage(arguments) if arguments.kind == "torch" else train(arguments)
        Path(arguments.folder, f"{numbers.pop('rank')}.json").write_text(json.dumps(numbers))
        return
    if "memory" in arguments.what:
        _compare(arguments, "memory", ["pipeline", "single"], "bytes")
    if "speed" in arguments.what:
        kinds = ["torch", "pipeline"] if arguments.torch else ["single", "pipeline"]
        _compare(arguments, "speed", kinds, "ms")
    if "schedules" in arguments.what:
        _compare(arguments, "schedules", ["single", *SCHEDULES], "ms")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--what", nargs="+", choices=["memory", "speed", "schedules"], default=["memory", "speed"])
    parser.add_argument("--torch", help="a Python with PyTorch; without it, speed is compared with one process")
    parser.add_argument("--schedule", choices=SCHEDULES, default="gpipe")
    parser.add_argument("--model", choices=CUTS, default="wide")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40, help="timed steps, after as many warm-up steps")
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    parser.add_argument("--of", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser


def _compare(arguments: argparse.Namespace, what: str, kinds: list[str], number: str) -> None:
    """Prints the numbers of each kind, and the ratios of the first kind to the others."""
    ratios: list[list[float]] = []
    rounds = []
    for _ in range(arguments.repeats):
        runs = [start(arguments, kind, what) for kind in kinds]
        largest = [max(process[number] for process in run) for run in runs]
        ratios.append([largest[0] / value for value in largest[1:]])
        rounds.append([[round(process[number] / (1e6 if number == "bytes" else 1), 1) for process in r] for r in runs])
    unit = "MB" if number == "bytes" else "ms per step"
    for index, kind in enumerate(kinds):
        print(f"{what}, {kind:<9} {unit}, by process: {[runs[index] for runs in rounds]}", flush=True)
    for kind, kind_ratios in zip(kinds[1:], zip(*ratios, strict=True), strict=True):
        rounded = [round(ratio, 3) for ratio in kind_ratios]
        print(f"{what}: {kinds[0]} / {kind} {statistics.median(kind_ratios):.3f}, median of {rounded}", flush=True)


def start(arguments: argparse.Namespace, kind: str, what: str) -> list[dict[str, float]]:
    """The numbers of each process of one job."""
    with tempfile.TemporaryDirectory() as folder:
        script = ["-m", "benchmarks.pipeline_processes", *sys.argv[1:], "--kind", kind, "--of", what]
        script += ["--folder", folder]
        commands = [[sys.executable, *script]]
        if kind not in ("single", "torch"):
            job = ["-m", "tfdist.launch", "--workers", "2", "--log-dir", f"{folder}/logs"]
            commands = [[sys.executable, *job, *script]]
        elif kind == "torch":
            with socket.create_server(("localhost", 0)) as listener:
                address = f"localhost:{listener.getsockname()[1]}"
            options = ["--address", address, "--rank"]
            commands = [[arguments.torch, *script, *options, str(rank)] for rank in range(2)]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL) for command in commands
        ]
        exit_codes = [process.wait() for process in processes]
        if any(exit_codes):
            sys.exit(f"`{kind}` failed: {' '.join(commands[0])}")
        return [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]


def train(arguments: argparse.Namespace) -> dict[str, Any]:
    """Trains in one process of tfdist, and returns its numbers."""
    import keras
    import numpy as np

    import tfdist

    memory = arguments.of == "memory"
    options: dict[str, Any] = {}
    name = arguments.kind
    if name != "single":
        stages = {"balance": "memory"} if memory else {"stages": f"layer_{CUTS[arguments.model]}"}
        schedule = arguments.schedule if name == "pipeline" else name
        name, options = "pipeline", {"micro_batches": arguments.micro_batches, "schedule": schedule} | stages
    strategy = tfdist.strategy(name, seed=1, threads=1, **options)
    before = reset_peak()
    widths, batch_size, steps = (BALANCED, 4096, 1) if memory else (_widths(arguments), 128, arguments.steps)
    with strategy.scope():
        layers = [
            keras.layers.Dense(width, "relu" if index + 2 < len(widths) else None, name=f"layer_{index}")
            for index, width in enumerate(widths[1:])
        ]
        model = keras.Sequential([keras.Input((widths[0],)), *layers])
        loss = "mse" if memory else keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-3), loss, jit_compile=False)
    rng = np.random.default_rng(0)
    x = rng.random((batch_size * steps, widths[0]), "float32")
    y = x if memory else rng.integers(0, widths[-1], len(x))

    timer = epoch_timer()
    strategy.fit(model, x, y, batch_size=batch_size, epochs=2, verbose=0, callbacks=[timer])
    added = peak() - before - x.nbytes
    return {"rank": strategy.world.rank, "ms": 1e3 * timer.seconds / steps, "bytes": added}


def _widths(arguments: argparse.Namespace) -> list[int]:
    return EVEN if arguments.model == "even" else WIDE


def torch_stage(arguments: argparse.Namespace) -> dict[str, Any]:
    """Trains in one process of PyTorch, and returns its numbers."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    torch.set_num_threads(1)
    torch.manual_seed(1)
    rank = arguments.rank
    dist.init_process_group("gloo", init_method=f"tcp://{arguments.address}", rank=rank, world_size=2)
    layers: list[nn.Module] = []
    widths, cut = _widths(arguments), CUTS[arguments.model]
    for index, (before, after) in enumerate(itertools.pairwise(widths)):
        layers.append(nn.Sequential(nn.Linear(before, after), nn.ReLU() if index + 2 < len(widths) else nn.Identity()))
    model = nn.Sequential(*(layers[:cut] if rank == 0 else layers[cut:]))
    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    schedule = (ScheduleGPipe if arguments.schedule == "gpipe" else Schedule1F1B)(
        stage, arguments.micro_batches, loss_fn=nn.CrossEntropyLoss()
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-7, fused=True)
    steps, batch_size = arguments.steps, 128
    x, y = torch.rand(steps * batch_size, widths[0]), torch.randint(0, widths[-1], (steps * batch_size,))
    seconds = 0.0
    for _ in range(2):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
        dist.barrier()
        began = time.perf_counter()
        for batch in order.split(batch_size):
            optimizer.zero_grad(set_to_none=True)
            schedule.step(x[batch]) if rank == 0 else schedule.step(target=y[batch], losses=[])
            optimizer.step()
        dist.barrier()
        seconds = time.perf_counter() - began
    dist.destroy_process_group()
    return {"rank": rank, "ms": 1e3 * seconds / steps}


if __name__ == "__main__":
    main()
