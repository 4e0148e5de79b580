"""`tfdist simulate`: trains on more workers than there are, with real models, gradients and data, in simulated time."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tfdist import files, registry, terminal
from tfdist.advisor.costs import link_of
from tfdist.data.tools import for_model
from tfdist.errors import UsageError
from tfdist.options import require_owned
from tfdist.relaxed import gossip_rules
from tfdist.simulator.matrix import ALGORITHMS

if TYPE_CHECKING:
    from tfdist.simulator.simulation import EpochResult

# The options of each algorithm, as they are typed.
OPTIONS = {
    **dict.fromkeys(
        ("average", "slowmo", "diloco", "easgd", "downpour", "aeasgd", "eamsgd"),
        ("--sync-every",),
    ),
    "ssp": ("--slack",),
    **{name: tuple(f"--{option}" for option in options) for name, options in gossip_rules.OPTIONS.items()},
}


@click.command("simulate", cls=terminal.Command, context_settings={"help_option_names": ["-h", "--help"]})
@for_model.options
@click.option("--algorithm", required=True, metavar="NAME", help=", ".join(ALGORITHMS))
@click.option("--workers", type=click.IntRange(min=1), default=4, show_default=True, help="that are simulated")
@click.option("--batch-size", type=click.IntRange(min=1), default=128, show_default=True, help="per global batch")
@click.option("--epochs", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--optimizer", metavar="NAME", help="by default the one usual for the model")
@click.option("--learning-rate", type=float, help="by default the one usual for the model")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="of everything that is drawn")
@click.option("--speeds", metavar="1,1,0.25", help="of the workers, in turn; 1 if not said")
@click.option("--step-seconds", type=click.FloatRange(min=0, min_open=True), default=0.01, show_default=True)
@click.option("--bandwidth", default="10Gbit", show_default=True, metavar="RATE", help="between any two workers")
@click.option("--latency", default="50us", show_default=True, metavar="TIME", help="of a message")
@click.option(
    "--sync-every", type=click.IntRange(min=1), metavar="N", help="average to eamsgd: steps between exchanges"
)
@click.option("--slack", type=click.IntRange(min=0), metavar="N", help="ssp: steps ahead of the slowest; 3 if not said")
@click.option("--topology", metavar="NAME", help="dpsgd, adpsgd: ring, grid, exponential, full; ring if not said")
@click.option("--probability", type=click.FloatRange(0, 1), help="gosgd: of a message after a step; 0.01 if not said")
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="write the results as JSON")
def command(
    algorithm: str,
    workers: int,
    epochs: int,
    batch_size: int,
    speeds: str | None,
    bandwidth: str,
    latency: str,
    data_option: tuple[str, ...],
    model_option: tuple[str, ...],
    out: Path | None,
    **options: Any,
) -> None:
    """Train on simulated workers: accuracy, time, staleness, disagreement and bytes by epoch."""
    registry.require_known(algorithm, "algorithm", ALGORITHMS)
    own = {name: options.pop(name) for name in ("sync_every", "slack", "topology", "probability")}
    given = {name: value for name, value in own.items() if value is not None}
    require_owned([f"--{name.replace('_', '-')}" for name in given], OPTIONS, algorithm, "--algorithm")
    link, each = link_of(bandwidth, latency, "--bandwidth"), _speeds(speeds, workers)
    assert link is not None  # both have defaults
    if batch_size < workers:
        raise UsageError(
            f"`--batch-size` is {batch_size}, and `--workers` is {workers}", "give each worker at least an example"
        )
    from tfdist.simulator import simulation

    settings = simulation.Settings(algorithm, each, options.pop("step_seconds"), link, options["seed"], **given)
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
    found = simulation.epochs(steps, settings, epochs, test)
    results = []
    with terminal.any_stdout(needed=True):
        click.echo("epoch   seconds      loss  test accuracy  disagreement  staleness  sent MiB")
        for one in found:
            results.append(dataclasses.asdict(one))
            click.echo(_row(one))
    if out is not None:
        content = {"settings": dataclasses.asdict(settings), "workers": workers, "epochs": results}
        files.write_text(out, json.dumps(content, indent=2) + "\n")


def _row(one: EpochResult) -> str:
    accuracy = one.metrics.get("accuracy")
    shown = "" if accuracy is None else f"{accuracy:.4f}"
    staleness = "" if one.staleness is None else f"{one.staleness:.2f}"
    sent = one.sent_bytes / 2**20
    first = f"{one.epoch:>5}{one.seconds:>10.2f}{one.loss:>10.4f}{shown:>15}"
    return first + f"{one.disagreement:>14.4g}{staleness:>11}{sent:>10,.1f}"


def _speeds(text: str | None, workers: int) -> tuple[float, ...]:
    try:
        given = [float(one) for one in text.split(",")] if text is not None else [1.0]
    except ValueError:
        given = []
    if not given or not all(0 < one < float("inf") for one in given) or len(given) > workers:
        raise UsageError(
            f"`--speeds` is `{text}`, and there are {workers} workers",
            "give numbers above 0, at most one for each worker; they are used in turn",
        )
    return tuple(given[rank % len(given)] for rank in range(workers))


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    command(prog_name="python -m tfdist.simulate")
