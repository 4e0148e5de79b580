"""`tfdist pipeline` shows the stages into which a model would be cut, without training it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import click

from tfdist import models, registry, terminal
from tfdist.data.tools import for_model

_stages = terminal.options_of("Stages")


@click.command(cls=terminal.EstimateCommand)
@for_model.options
@_stages("--devices", type=click.IntRange(min=1), default=2, show_default=True, help="number of stages")
@_stages("--micro-batches", type=click.IntRange(min=1), default=4, show_default=True, help="parts of a batch")
@_stages("--batch-size", type=click.IntRange(min=1), default=32, show_default=True, help="examples per batch")
@_stages("--balance", default="time", show_default=True, metavar="NAME", help="time or memory")
@_stages("--stages", metavar="LAYERS", help="first layer of each stage after the first, comma-separated")
def command(
    model: str,
    dataset: str,
    data_dir: Path | None,
    data_option: tuple[str, ...],
    model_option: tuple[str, ...],
    stages: str | None,
    **options: Any,
) -> None:
    """Show how `--strategy pipeline` cuts a model into stages: layers, parameters, time, bytes across the cuts."""
    from tfdist.pipeline_parallel import plan

    registry.require_known(options["balance"], "balance", list(get_args(plan.Balance)))
    source = for_model.load(model, dataset, data_dir, **registry.parse_options(data_option, "--data-option"))
    built = models.build(model, source.spec, **registry.parse_options(model_option, "--model-option"))
    show(built, named=None if stages is None else stages.split(","), **options)


def show(
    model: Any, *, devices: int, micro_batches: int, batch_size: int, balance: str, named: list[str] | None
) -> None:
    """Cuts `model` into one stage per device, and prints a table of the stages."""
    from rich.console import Console
    from rich.table import Table

    from tfdist.pipeline_parallel import plan, schedule

    made = plan.make(model, devices, named, balance, max(1, batch_size // micro_batches), micro_batches)
    costs = plan.of_stages(made.costs, made.begins) if made.costs else [None] * devices
    unit, factor = ("ms", 1.0) if balance == "time" else ("MB", 1e-6)
    table = Table(box=None, pad_edge=False)
    titles = ("stage", "first layer", "last layer", "layers", "parameters", unit, "bytes sent per example")
    for title in titles:
        table.add_column(title, justify="left" if title.endswith("layer") else "right")
    for stage, cost in enumerate(costs):
        layers = made.layers_of(stage)
        sent = f"{made.bytes_across(stage + 1):,}" if stage + 1 < devices else ""
        cost_text = "" if cost is None else f"{factor * cost:,.2f}"
        counts = f"{len(layers):,}", f"{made.parameters_of(stage):,}"
        table.add_row(str(stage), layers[0], layers[-1], *counts, cost_text, sent)
    with terminal.guarded_stdout(needed=True):
        console = Console(soft_wrap=True)
        console.print(table)
        bubble = schedule.bubble(devices, micro_batches)
        console.print(f"bubble with {micro_batches} micro-batches and even stages: {bubble:.0%} of the time")


if __name__ == "__main__":
    command(prog_name="python -m tfdist.pipeline_parallel")
