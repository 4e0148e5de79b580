"""`tfdist advise`: predicts the throughput of strategies from short measurements, and recommends one.

    tfdist advise --model cnn --dataset fashion_mnist --batch-size 64 --workers 2
    tfdist advise --model cnn --dataset fashion_mnist --batch-size 512 --workers 2..16 --link 10Gbit --latency 50us

Without `--link`, the workers are processes that share this machine; with it, each worker has a machine like this one.
"""

from __future__ import annotations

import dataclasses
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from tfdist import extras, files, registry, strategies, terminal
from tfdist.advisor import costs, measured, rounds
from tfdist.advisor.costs import Link, Prediction, link_of
from tfdist.data.tools import for_model
from tfdist.errors import UsageError
from tfdist.study import measure, plan, ratios, runs

FORMATS = (".svg", ".png", ".html")
# Okabe and Ito's colours, which are distinct for all kinds of colour vision.
_COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]
IDEAL = "ideal"


def require_format(path: Path) -> None:
    """Raises `UsageError` unless the format of `path` is supported."""
    if path.suffix not in FORMATS:
        raise UsageError(f"`--curves` is `{path}`", f"use a file name that ends with one of {', '.join(FORMATS)}")


def draw_predictions(predictions: Sequence[Prediction], path: Path) -> None:
    """Draws the predicted speed over the number of workers into the file `path`.

    Raises:
        UsageError: the file cannot be written.
    """
    with extras.importing("report", "The picture of `--curves`"):
        import altair

    single = next(prediction.examples_per_second for prediction in predictions if prediction.strategy == "single")
    counts = sorted({prediction.workers for prediction in predictions} | {1})
    points = [
        {
            "workers": prediction.workers,
            "examples per second": prediction.examples_per_second,
            "strategy": prediction.strategy,
        }
        for prediction in predictions
    ]
    names = list(dict.fromkeys(prediction.strategy for prediction in predictions if prediction.strategy != "single"))
    points += [{"workers": 1, "examples per second": single, "strategy": name} for name in names]
    points += [{"workers": n, "examples per second": n * single, "strategy": IDEAL} for n in counts]
    domain = ["single", *names, IDEAL]
    colours = altair.Scale(domain=domain, range=[*_COLOURS[: len(names) + 1], "#999999"])
    chart = (
        altair.Chart(altair.Data(values=points), title="Predicted training speed")
        .mark_line(point=True)
        .encode(
            x=altair.X("workers:Q", axis=altair.Axis(tickMinStep=1)),
            y=altair.Y("examples per second:Q"),
            color=altair.Color("strategy:N", scale=colours),
            strokeDash=altair.condition(f"datum.strategy == '{IDEAL}'", altair.value([4, 4]), altair.value([1, 0])),
            shape=altair.Shape("strategy:N", scale=altair.Scale(domain=domain)),
            tooltip=["strategy:N", "workers:Q", altair.Tooltip("examples per second:Q", format=",.0f")],
        )
        .properties(width=480, height=320)
    )
    try:
        chart.save(str(path), inline=True) if path.suffix == ".html" else chart.save(str(path))
    except OSError as error:
        raise UsageError(f"The curves cannot be written to `{path}`: {error.strerror}", "use another file") from error


LEFT_OUT = """The predictions leave out:
- with `--link`: the overhead per epoch, what a message costs the processors besides its latency and the time for its
  bytes, and communication that overlaps computation. Without it, these are measured in a job of the smallest number of
  workers, and assumed to be the same for more
- input pipelines that cannot keep up with the workers
- buffers of the network, which let a stage of a pipeline send before the next one receives
- that `pipeline` measures the layers anew in each run, and may cut the model elsewhere
- that a stage which waits leaves the memory bandwidth of a shared machine to the others
- machines that differ from this one, and other work on the machines and the links"""


_workers = terminal.options_of("Workers")
_output = terminal.options_of("Output")


@click.command("advise", cls=terminal.EstimateCommand)
@for_model.options
@_workers("--batch-size", type=click.IntRange(min=2), default=32, show_default=True, help="size of a global batch")
@_workers("--workers", default="2", show_default=True, metavar="N|N..M", help="numbers of workers")
@_workers("--link", metavar="RATE", help="bandwidth between machines, such as 10Gbit, for a worker per machine")
@_workers("--latency", metavar="TIME", help="latency of a message between machines, such as 50us")
@_output(
    "--curves", "picture", type=click.Path(path_type=Path), metavar="FILE", help="draw the speed: .svg, .png, .html"
)
@_output("--check/--no-check", default=True, show_default=True, help="compare with real runs of two workers")
def command(
    batch_size: int,
    workers: str,
    link: str | None,
    latency: str | None,
    picture: Path | None,
    check: bool,
    data_option: tuple[str, ...],
    model_option: tuple[str, ...],
    **options: Any,
) -> None:
    """Predict the throughput of strategies for a model, from short measurements on this machine."""
    counts, cores = _counts(workers), tuple(sorted(os.sched_getaffinity(0)))
    described = link_of(link, latency)
    _check_workers(counts, cores, batch_size, described)
    if picture is not None:
        require_format(picture)
        files.require_writable(picture, "--curves")
        extras.require("report", "The picture of `--curves`")
    ratios.special_functions()  # before minutes of measuring, at whose end they are needed
    data_options = registry.parse_options(data_option, "--data-option")
    source = for_model.load(options["model"], options["dataset"], options["data_dir"], **data_options)
    examples = source.spec.examples["train"]
    work = measured.Work(
        {**options, "data_option": data_option, "model_option": model_option}, batch_size, examples, cores
    )
    with tempfile.TemporaryDirectory(prefix="tfdist-advise-") as folder:
        terminal.say("Measuring how long steps are ...")
        work = work.with_lengths_for(Path(folder))
        names, refusals = rounds.trainable(work, described, Path(folder)) if counts[-1] > 1 else ([], {})
        facts, undivided = rounds.measure(work, counts, names, described, Path(folder))
        refusals |= {f"pipeline on {count}": sentence for count, sentence in undivided.items()}
        by_round = [costs.predict(measured_facts, counts) for measured_facts in facts]
        predictions = costs.combined(by_round)
        with terminal.guarded_stdout(needed=True):
            click.echo(_table(predictions, counts))
            click.echo(_recommendation(predictions, by_round))
            click.echo(_refusals(refusals))
            click.echo(LEFT_OUT)
            if picture is not None:
                draw_predictions(predictions, picture)
                click.echo(picture)
            if check and described is None and 2 in counts:
                click.echo(_comparison(work, facts, Path(folder)))


def _table(predictions: Sequence[Prediction], counts: Sequence[int]) -> str:
    """A table of examples per second, with a row per strategy and a column per number of workers.

    The last column has the factor by which runs differ at most from the predictions, as far as the measurements vary.
    """
    rates = {
        (prediction.strategy, prediction.workers): f"{prediction.examples_per_second:,.0f}"
        for prediction in predictions
    }
    columns = sorted({1, *counts})
    rows = [["examples/s on", *map(str, columns), "95 % within"]]
    for name in dict.fromkeys(prediction.strategy for prediction in predictions):
        within = max(prediction.within for prediction in predictions if prediction.strategy == name)
        rows.append([name, *(rates.get((name, count), "") for count in columns), f"factor {within:.2f}"])
    width = max(len(row[0]) for row in rows)
    widths = [*([12] * len(columns)), 16]
    return "\n".join(row[0].ljust(width) + "".join(map(str.rjust, row[1:], widths)) for row in rows)


def _refusals(refusals: Mapping[str, str]) -> str:
    """Says which strategies are not predicted, because they cannot train the model here, and why."""
    lines = [f"`{name}` is not predicted, because it cannot train here: {why}" for name, why in refusals.items()]
    return "".join(f"{line}\n" for line in lines)


def _recommendation(predictions: Sequence[Prediction], by_round: Sequence[Sequence[Prediction]]) -> str:
    """Recommends the fastest synchronous strategy, and names an asynchronous strategy that would be faster."""
    single = next(prediction for prediction in predictions if prediction.strategy == "single")
    exact = next(prediction for prediction in predictions if not strategies.traits(prediction.strategy).asynchronous)
    ratio = ratios.of_rounds(_seconds(single, by_round), _seconds(exact, by_round))
    if exact.strategy == "single":
        text = "Use `single`: more workers cost more in communication than they save."
    elif ratio is None or not ratio.is_difference:
        times = f"{exact.examples_per_second / single.examples_per_second:.2f}"
        text = f"`{exact.name}` is predicted {times} times as fast as `single`, but the measurements vary too much to "
        text += "recommend it: measure again on a quieter machine."
    else:
        text = f"Use `{exact.name}`, {ratio.text} times as fast as `single`."
    if predictions[0] is not exact:
        times = f"{predictions[0].examples_per_second / exact.examples_per_second:.2f}"
        text += f" `{predictions[0].name}` would be {times} times as fast as that, but computes something else."
    return f"\n{text}"


def _seconds(wanted: Prediction, by_round: Sequence[Sequence[Prediction]]) -> dict[object, float]:
    """The predicted seconds per example, by the round of measurements."""
    return {
        number: 1 / prediction.examples_per_second
        for number, predictions in enumerate(by_round)
        for prediction in predictions
        if prediction.name == wanted.name
    }


def _comparison(work: measured.Work, facts: Sequence[costs.Facts], folder: Path) -> str:
    """Compares the predictions for two workers with runs that were not used for them."""
    terminal.say("Comparing with runs of two workers ...")
    # An averaging is predicted for the steps of an epoch of these runs.
    of_runs = [dataclasses.replace(one, steps=work.epoch_steps) for one in facts]
    predictions = costs.combined([costs.predict(one, [2]) for one in of_runs])
    limit = min(work.examples, work.steps * work.batch_size)
    train = {name: value for name, value in work.options.items() if name not in ("model", "dataset")} | {"limit": limit}
    contestants = [
        plan.Contestant(prediction.strategy, workers=(2,)) for prediction in predictions if prediction.workers == 2
    ]
    names = (str(work.options["model"]),), (str(work.options["dataset"]),)
    study = plan.Plan(
        *names, tuple(contestants), batch_sizes=(work.batch_size,), repeats=1, epochs=work.epochs, train=train
    )
    lines = ["", "Comparison with runs that were not used for the predictions:"]
    by_name = {prediction.name: prediction for prediction in predictions}
    begun = measure.begin(study, folder / "check", resume=False)
    for turn in measure.turns(study, begun, folder / "check"):
        result = measure.run(turn, study, begun, measured.MAX_RUN_SECONDS)
        (run,) = runs.load([turn.folder])
        seconds = run.epoch_seconds
        if result.exit_code or seconds is None:
            lines.append(f"  {turn.cell.name}: the run failed: {run.cause}")
            continue
        rate = limit / seconds
        prediction = by_name[turn.cell.name]
        ratio = prediction.examples_per_second / rate
        place = "inside" if max(ratio, 1 / ratio) <= prediction.within else "outside"
        lines.append(
            f"  {turn.cell.name}: {rate:,.0f} examples/s measured, the prediction is {ratio - 1:+.0%} off, {place} its "
            "interval"
        )
    return "\n".join(lines)


def _counts(text: str) -> list[int]:
    match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        raise UsageError(f"`--workers` is `{text}`", "use a number, such as 2, or a range, such as 2..16")
    return list(range(first, last + 1))


def _check_workers(counts: Sequence[int], cores: Sequence[int], batch_size: int, described: Link | None) -> None:
    """Raises `UsageError` for more workers than examples per batch, or than cores without a described link."""
    if counts[-1] > batch_size:
        raise UsageError(
            f"`--workers` goes to {counts[-1]}, and a global batch has {batch_size} examples", "use a larger batch"
        )
    if described is None and counts[-1] > len(cores):
        raise UsageError(
            f"`--workers` goes to {counts[-1]}, and the link is measured between processes of this machine, which has "
            f"{terminal.counted(len(cores), 'core')}",
            "describe the network between machines with `--link` and `--latency`, or use fewer workers",
        )


if __name__ == "__main__":
    command(prog_name="python -m tfdist.advise")
