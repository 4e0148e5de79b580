"""`python -m tfdist.memory`, or `tfdist memory`: estimates the memory for training without allocating it."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tfdist import files, machine, registry, strategies, terminal
from tfdist.data.tools import for_model
from tfdist.errors import ClusterError, UsageError

if TYPE_CHECKING:
    from tfdist.loop.peak_memory import StepMemory

# Strategies with a complete copy of the model per device.
WHOLE_COPIES = ("single", "mirrored", "custom", "multiworker", "horovod", "mpi_split")
# The rows that count once per replica if all replicas are in one process. Those of `custom` share the variables.
_OF_EACH_REPLICA = {
    "mirrored": ("graph", "weights", "gradients", "slots", "activations", "allocator"),
    "custom": ("graph", "gradients", "activations", "allocator"),
}

_MOST_BYTES = 10_000_000  # of a record
# A file in memory, Python's `io.BytesIO`, grows by an eighth more than what is written (`Modules/_io/bytesio.c`).
_GROWTH = 9 / 8

_training = terminal.options_of("Training")


@click.command(cls=terminal.EstimateCommand)
@for_model.options
@_training("--batch-size", type=click.IntRange(min=1), default=32, show_default=True, help="size of a global batch")
@_training("--strategy", default="single", show_default=True, metavar="NAME", help=", ".join(WHOLE_COPIES))
@_training("--replicas", type=click.IntRange(min=1), default=1, show_default=True, help="number of replicas")
@_training("--recompute", metavar="blocks|LAYERS", help="as the strategies' option of this name")
@_training("--optimizer", metavar="NAME", help="by default the model's usual optimizer")
def command(
    strategy: str, replicas: int, data_option: tuple[str, ...], model_option: tuple[str, ...], **options: Any
) -> None:
    """Estimate the memory of a process that trains on CPUs. The model is not trained."""
    registry.require_known(strategy, "strategy", strategies.names())
    if strategy not in WHOLE_COPIES:
        raise UsageError(
            f"The memory of `{strategy}` cannot be estimated: its devices do not have one copy of the model each",
            "use `tfdist pipeline --balance memory` for stages, or `--strategy single` for the model on one device",
        )
    if strategy == "single" and replicas > 1:
        raise UsageError(
            f"`--replicas` is {replicas}, and `single` has one",
            "add `--strategy NAME`, such as `custom` or `multiworker`",
        )
    if options["batch_size"] < replicas:
        raise UsageError(
            f"`--batch-size` is {options['batch_size']}, and `--replicas` is {replicas}",
            "use at most one replica per example",
        )
    of_one = estimate(
        options.pop("model"),
        options.pop("dataset"),
        -(-options.pop("batch_size") // replicas),
        data_options=registry.parse_options(data_option, "--data-option"),
        model_options=registry.parse_options(model_option, "--model-option"),
        **options,
    )
    show(of_one.of_process(strategy, replicas))


@dataclass(frozen=True)
class Estimate:
    """The estimated peak memory of a process that trains with `tfdist train`, in bytes.

    Attributes:
        framework: Python, TensorFlow and tfdist themselves, measured.
        graph: the operations of a step, with the memory of one that was measured.
        examples: those of all splits, if they stay in memory.
        weights, gradients, slots, activations, allocator: see `tfdist.loop.peak_memory.StepMemory`.
        saving: the file of the trained model, which Keras makes in memory while TensorFlow keeps that of the steps.
    """

    framework: int
    graph: int
    examples: int
    weights: int
    gradients: int
    slots: int
    activations: int
    allocator: int
    saving: int

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))

    def of_process(self, strategy: str, replicas: int) -> Estimate:
        """The estimate for a process with one of N replicas, or with all of them, from that with a single replica."""
        rows = _OF_EACH_REPLICA.get(strategy, ())
        return dataclasses.replace(self, **{name: replicas * getattr(self, name) for name in rows})


def estimate(model: str, dataset: str, batch_size: int, **options: Any) -> Estimate:
    """Estimates the memory of a process that trains on `batch_size` examples per step; see `of_step` for `options`."""
    step, examples = of_step(model, dataset, batch_size, **options)  # first, since it finds mistakes in the options
    framework_bytes, operation_bytes = base()
    return Estimate(
        framework=round(framework_bytes), graph=round(operation_bytes * step.operations), **_tensors(step, examples)
    )


def _tensors(step: StepMemory, examples: int) -> dict[str, int]:
    """The rows of an estimate that are computed."""
    sizes = dataclasses.asdict(step)
    del sizes["operations"]
    return {"examples": examples, **sizes, "saving": round(_GROWTH * (step.weights + step.slots))}


def of_step(
    model: str,
    dataset: str,
    batch_size: int,
    *,
    recompute: Any = None,
    optimizer: str | None = None,
    data_dir: Path | None = None,
    data_options: dict[str, Any] | None = None,
    model_options: dict[str, Any] | None = None,
) -> tuple[StepMemory, int]:
    """Estimates the memory of the steps of a replica on `batch_size` examples, and that of all examples, in bytes."""
    import tfdist
    from tfdist import models
    from tfdist.loop import peak_memory
    from tfdist.run import optimizers
    from tfdist.run.config import TrainConfig

    source = for_model.load(model, dataset, data_dir, **data_options or {})
    strategy = tfdist.strategy("single", seed=0, recompute=recompute)
    config = TrainConfig("single", model, dataset, batch_size=batch_size, optimizer=optimizer)
    feed = source.feed("train", batch_size, world=strategy.world, seed=0, shuffle=models.shuffles(model))
    steps = feed.num_batches
    with optimizers.compiled_without_memory(strategy, config, source.spec, steps, model_options or {}) as built:
        step = peak_memory.of_training(strategy, built, batch_size, feed.spec)
    return step, round(_bytes_per_example(feed) * sum(source.spec.examples.values()))


def _bytes_per_example(feed: Any) -> float:
    """The memory of an example of a feed; 0 if its examples do not stay in memory."""
    import tensorflow as tf

    distinct = {id(tensor): tensor for tensor in tf.nest.flatten(feed.arrays) if tensor is not None}
    return sum(math.prod(tensor.shape) * tensor.dtype.size for tensor in distinct.values()) / max(1, feed.examples)


_TINY_DATA = {"task": "classification", "shape": (32, 32, 3), "train": 16, "validation": 8, "test": 8}
_TINY_BATCH = 8
_SECONDS_TO_TRAIN = 600.0


def base() -> tuple[float, float]:
    """The memory of a process that trains without any operations, and that of each operation, in bytes.

    They are measured once per machine, by training two models that have hardly any tensors: the difference between
    the peaks of their processes is that of their graphs.
    """
    from tfdist import __version__

    @functools.cache
    def measured() -> tuple[float, float]:
        terminal.say("Measuring TensorFlow's own memory, once per machine ...")
        few, few_bytes = _without_tensors("mlp", {"units": 8})
        many, many_bytes = _without_tensors("mobilenet_v3_small", {"width": 0.05})
        operation_bytes = (many_bytes - few_bytes) / (many - few)
        return few_bytes - few * operation_bytes, operation_bytes

    return (
        machine.figure("framework_bytes", lambda: measured()[0], tfdist=__version__),
        machine.figure("operation_bytes", lambda: measured()[1], tfdist=__version__),
    )


def _without_tensors(model: str, model_options: dict[str, Any]) -> tuple[int, int]:
    """The operations of a model's step, and the peak memory of a process that trains it less that of its tensors."""
    step, examples = of_step(model, "synthetic", _TINY_BATCH, data_options=_TINY_DATA, model_options=model_options)
    tensors = sum(_tensors(step, examples).values())
    return step.operations, trained_bytes(model, "synthetic", _TINY_BATCH, _TINY_DATA, model_options) - tensors


def trained_bytes(
    model: str, dataset: str, batch_size: int, data_options: dict[str, Any], model_options: dict[str, Any]
) -> int:
    """The peak memory of a process that trains a model for an epoch, in bytes.

    Raises:
        ClusterError: the training failed.
    """
    from tfdist.doctor import child

    with tempfile.TemporaryDirectory(prefix="tfdist-memory-") as folder:
        run = Path(folder, "run")
        command = [sys.executable, "-m", "tfdist.train", "--strategy", "single", "--quiet", "--run-dir", str(run)]
        command += ["--model", model, "--dataset", dataset, "--batch-size", str(batch_size), "--epochs", "1"]
        for option, values in (("--data-option", data_options), ("--model-option", model_options)):
            for name, value in values.items():
                text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
                command += [option, f"{name}={text}"]
        result = child.run(command, _SECONDS_TO_TRAIN, {"CUDA_VISIBLE_DEVICES": "-1"})
        if not result.succeeded:
            raise ClusterError(
                f"The memory of a training of `{model}` could not be measured: its process {result.description()}: "
                f"{terminal.cause(result.err)}",
                "run `tfdist doctor`",
            )
        record = json.loads(files.read_text(run / "run.json", _MOST_BYTES))
    return int(record["peak_memory_bytes"])


def show(estimate: Estimate) -> None:
    """Prints an estimate."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("of a process")
    table.add_column("MiB", justify="right")
    for name, size in [*dataclasses.asdict(estimate).items(), ("total", estimate.total)]:
        table.add_row(name, f"{size / 2**20:,.1f}")
    with terminal.guarded_stdout(needed=True):
        Console(soft_wrap=True).print(table)


if __name__ == "__main__":
    command(prog_name="python -m tfdist.memory")
