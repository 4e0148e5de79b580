"""`tfdist simulate`: trains on simulated workers, with real models, gradients and data, in simulated time."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tfdist import files, registry, terminal
from tfdist.advisor.costs import link_of
from tfdist.data.tools import for_model
from tfdist.errors import UsageError
from tfdist.options import require_owned
from tfdist.relaxed import gossip_rules
from tfdist.simulator import links, matrix
from tfdist.simulator.matrix import ALGORITHMS, CENTRED

if TYPE_CHECKING:
    from tfdist.simulator.simulation import EpochResult

# The command-line options of each algorithm.
OPTIONS = {
    **dict.fromkeys(("average", "slowmo", "diloco", "easgd", "downpour", "aeasgd", "eamsgd"), ("--sync-every",)),
    "ssp": ("--slack",),
    **{name: tuple(f"--{option}" for option in options) for name, options in gossip_rules.OPTIONS.items()},
}


_algorithm = terminal.options_of("Algorithm")
_training = terminal.options_of("Training")
_workers = terminal.options_of("Simulated workers")
_output = terminal.options_of("Output")


@click.command("simulate", cls=terminal.EstimateCommand)
@for_model.options
@_algorithm("--algorithm", required=True, metavar="NAME", help=", ".join(ALGORITHMS))
@_workers("--workers", type=click.IntRange(min=1), default=4, show_default=True, help="number of workers")
@_training("--batch-size", type=click.IntRange(min=1), default=128, show_default=True, help="size of a global batch")
@_training(
    "--epochs", type=click.IntRange(min=1), default=2, show_default=True, help="passes over the training examples"
)
@_training("--optimizer", metavar="NAME", help="by default the model's usual optimizer")
@_training("--learning-rate", type=float, help="by default the usual value for the model")
@_training("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="seed of all random numbers")
@_workers("--speeds", metavar="1,1,0.25", help="relative speeds of the workers, repeated in turn; by default all 1")
@_workers(
    "--step-seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=0.01,
    show_default=True,
    metavar="S",
    help="simulated seconds per step of a worker of speed 1",
)
@_workers("--bandwidth", default="10Gbit", show_default=True, metavar="RATE", help="of each up- and downlink")
@_workers("--latency", default="50us", show_default=True, metavar="TIME", help="of a message between two machines")
@_workers(
    "--link",
    "link_settings",
    multiple=True,
    metavar="[WHERE=]RATE[,TIME]",
    help="bandwidth and latency of some links; WHERE is `workers`, a rank or `centre`, with `.up` or `.down` for one "
    "direction, or `switch`; repeatable",
)
@_algorithm("--sync-every", type=click.IntRange(min=1), metavar="N", help="average to eamsgd: steps between exchanges")
@_algorithm("--slack", type=click.IntRange(min=0), metavar="N", help="ssp: steps ahead of the slowest; default: 3")
@_algorithm("--topology", metavar="NAME", help="dpsgd, adpsgd: ring, grid, exponential, full, tree; default: ring")
@_algorithm(
    "--probability",
    type=click.FloatRange(0, 1),
    metavar="P",
    help="gosgd: probability of a message after a step; default: 0.01",
)
@_output("--out", type=click.Path(path_type=Path), metavar="FILE", help="write the results as JSON")
def command(
    algorithm: str,
    workers: int,
    epochs: int,
    batch_size: int,
    speeds: str | None,
    bandwidth: str,
    latency: str,
    link_settings: tuple[str, ...],
    data_option: tuple[str, ...],
    model_option: tuple[str, ...],
    out: Path | None,
    **options: Any,
) -> None:
    """Train on simulated workers, and show accuracy, time, staleness, disagreement and bytes per epoch."""
    registry.require_known(algorithm, "algorithm", ALGORITHMS)
    rule_options = {
        name: value
        for name in ("sync_every", "slack", "topology", "probability")
        if (value := options.pop(name)) is not None
    }
    require_owned([f"--{name.replace('_', '-')}" for name in rule_options], OPTIONS, algorithm, "--algorithm")
    worker_speeds = _speeds(speeds, workers)
    every = link_of(bandwidth, latency, "--bandwidth")
    assert every is not None  # both have defaults
    worker_links = links.Links.of(workers, every, link_settings)
    links.require_centre(link_settings, algorithm, CENTRED)
    if batch_size < workers:
        raise UsageError(
            f"`--batch-size` is {batch_size}, and `--workers` is {workers}", "use at least one example per worker"
        )
    if out is not None:
        files.require_writable(out, "--out")
    from tfdist.simulator import simulation

    settings = simulation.Settings(
        algorithm, worker_speeds, options.pop("step_seconds"), worker_links, options["seed"], **rule_options
    )
    data_options = registry.parse_options(data_option, "--data-option")
    model_options = registry.parse_options(model_option, "--model-option")
    steps, test = simulation.make_replicas(
        options.pop("model"),
        options.pop("dataset"),
        batch_size,
        workers,
        options.pop("seed"),
        data_options=data_options,
        model_options=model_options,
        **options,
    )
    results = []
    with terminal.guarded_stdout(needed=True):
        click.echo("epoch   seconds      loss    test accuracy  disagreement  staleness  sent MiB")
        for result in simulation.epochs(steps, settings, epochs, test):
            results.append(dataclasses.asdict(result))
            click.echo(_row(result))
    if out is not None:
        content = {"settings": dataclasses.asdict(settings), "workers": workers, "epochs": results}
        files.write_text(out, json.dumps(content, indent=2) + "\n")


def _row(result: EpochResult) -> str:
    accuracy = matrix.shown(result.metrics.get("accuracy"), result.chance, ".4f")
    staleness = "" if result.staleness is None else f"{result.staleness:.2f}"
    first = f"{result.epoch:>5}{result.seconds:>10.2f}{result.loss:>10.4f}{accuracy:>17}"
    return first + f"{result.disagreement:>14.4g}{staleness:>11}{result.sent_bytes / 2**20:>10,.1f}"


def _speeds(text: str | None, workers: int) -> tuple[float, ...]:
    try:
        speeds = [float(speed) for speed in text.split(",")] if text is not None else [1.0]
    except ValueError:
        speeds = []
    if not speeds or not all(0 < speed < float("inf") for speed in speeds):
        raise UsageError(f"`--speeds` is `{text}`", "use numbers above 0, separated by commas, such as `1,0.5`")
    if len(speeds) > workers:
        raise UsageError(
            f"`--speeds` has {len(speeds)} speeds, and there are {workers} workers", "use at most one per worker"
        )
    if len(speeds) == 1 < workers and text is not None:
        several = ",".join([text, *["1"] * (min(workers, 4) - 1)])
        raise UsageError(
            f"`--speeds` is `{text}`, one speed for {workers} workers, and speeds are relative to each other",
            f"write the speed of each worker, such as `--speeds {several}` (fewer speeds than workers are repeated in "
            "turn); `--step-seconds` is for all workers",
        )
    return tuple(speeds[rank % len(speeds)] for rank in range(workers))


if __name__ == "__main__":
    command(prog_name="python -m tfdist.simulate")
