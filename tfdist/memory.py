"""`python -m tfdist.memory`, or `tfdist memory`: estimates the memory for training without allocating it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tfdist import models, registry, strategies, terminal
from tfdist.data.tools import for_model
from tfdist.errors import UsageError

if TYPE_CHECKING:
    from tfdist.loop.peak_memory import Estimate

# Strategies with a complete copy of the model per device.
WHOLE_COPIES = ("single", "mirrored", "custom", "multiworker", "horovod", "mpi_split")


_training = terminal.options_of("Training")


@click.command(cls=terminal.Command)
@for_model.options
@_training("--batch-size", type=click.IntRange(min=1), default=32, show_default=True, help="size of a global batch")
@_training("--strategy", default="single", show_default=True, metavar="NAME", help=", ".join(WHOLE_COPIES))
@_training("--replicas", type=click.IntRange(min=1), default=1, show_default=True, help="number of replicas")
@_training("--recompute", metavar="blocks|LAYERS", help="as the strategies' option of this name")
@_training("--optimizer", metavar="NAME", help="by default the model's usual optimizer")
def command(
    strategy: str, replicas: int, data_option: tuple[str, ...], model_option: tuple[str, ...], **options: Any
) -> None:
    """Estimate the memory of one replica: weights, gradients, slots and activations. Nothing is trained."""
    registry.require_known(strategy, "strategy", strategies.names())
    if strategy not in WHOLE_COPIES:
        raise UsageError(
            f"The memory of `{strategy}` cannot be estimated: its devices do not have one copy of the model each",
            "use `tfdist pipeline --balance memory` for stages, or `--strategy single` for the model on one device",
        )
    if options["batch_size"] < replicas:
        raise UsageError(
            f"`--batch-size` is {options['batch_size']}, and `--replicas` is {replicas}",
            "use at most one replica per example",
        )
    show(
        estimate(
            options.pop("model"),
            options.pop("dataset"),
            -(-options.pop("batch_size") // replicas),
            data_options=registry.parse_options(data_option, "--data-option"),
            model_options=registry.parse_options(model_option, "--model-option"),
            **options,
        )
    )


def estimate(
    model: str,
    dataset: str,
    batch_size: int,
    *,
    recompute: Any = None,
    optimizer: str | None = None,
    data_dir: Path | None = None,
    data_options: dict[str, Any] | None = None,
    model_options: dict[str, Any] | None = None,
) -> Estimate:
    """Estimates the memory of a replica that trains on `batch_size` examples per step."""
    import tfdist
    from tfdist.internals import keras_variables
    from tfdist.loop import peak_memory
    from tfdist.run import optimizers
    from tfdist.run.config import TrainConfig

    source = for_model.load(model, dataset, data_dir, **data_options or {})
    strategy = tfdist.strategy("single", seed=0, recompute=recompute)
    config = TrainConfig("single", model, dataset, batch_size=batch_size, optimizer=optimizer)
    feed = source.feed("train", batch_size, world=strategy.world, seed=0)
    with keras_variables.without_memory(), strategy.scope():
        built = models.build(model, source.spec, **model_options or {})
        if not built.compiled:
            optimizers.compile(built, source.spec, config, feed.num_batches)
        return peak_memory.of_training(strategy, built, batch_size, feed.spec)


def show(estimate: Estimate) -> None:
    """Prints an estimate."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("of a replica")
    table.add_column("MiB", justify="right")
    for name in ("weights", "gradients", "slots", "activations", "allocator", "total"):
        table.add_row(name, f"{getattr(estimate, name) / 2**20:,.1f}")
    with terminal.guarded_stdout(needed=True):
        Console(soft_wrap=True).print(table)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    command(prog_name="python -m tfdist.memory")
