"""`tfdist report RUNS...`: writes a report on any run folders, from one or several studies.

    tfdist report studies/first studies/second --out both
    tfdist report studies/first --serve

The report is a self-contained page, `report.html`, `report.md` with the chart `report.svg`, and `report.json`. With
`--tensorboard`, TensorBoard events have the metrics by epoch, and a row per run in the HParams table.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from tfdist import extras, files, terminal
from tfdist.errors import RunFolderError
from tfdist.study import machine_readable, results, runs, summary, verdicts
from tfdist.study.prices import NO_PRICES, Prices
from tfdist.study.results import Comparison
from tfdist.study.runs import Run

HYPERPARAMETERS = ("strategy", "workers", "model", "dataset", "batch_size", "seed")
# The columns of the HParams table after the hyperparameters.
COLUMNS = ("examples_per_second", "step_seconds", "loss", "accuracy", "val_loss", "val_accuracy")

_report = terminal.options_of("The report")
price_option = _report("--price", metavar="PRICE|FILE", help="price of this machine per hour, or a file of prices")
tensorboard_option = _report(
    "--tensorboard",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="write the runs as TensorBoard events, which compare strategies in the HParams table",
)


def prices_of(option: str | None) -> Prices:
    """The prices from the option `--price`."""
    return NO_PRICES if option is None else Prices.parse(option)


@click.command("report", cls=terminal.Command)
@click.argument("folders", metavar="RUNS...", nargs=-1, required=True, type=click.Path(path_type=Path))
@_report(
    "--out",
    type=click.Path(path_type=Path),
    default=Path(),
    metavar="FOLDER",
    help="folder of the report; by default the current folder",
)
@price_option
@tensorboard_option
@_report("--serve", "is_served", is_flag=True, help="show the page on this machine until Ctrl+C")
@_report("--port", type=int, default=0, metavar="PORT", help="port for --serve; by default a free port")
def command(
    folders: tuple[Path, ...], out: Path, price: str | None, tensorboard: Path | None, is_served: bool, port: int
) -> None:
    """Write a report on runs: folders of `tfdist train` and `tfdist compare`, or folders that contain them."""
    html = show(folders, out, prices_of(price), tensorboard)
    if is_served:
        from tfdist.study import page

        with page.serving(html, port) as server, suppress(KeyboardInterrupt):
            click.echo(f"The report is at {page.address(server)} until Ctrl+C.")
            threading.Event().wait()


def show(folders: Sequence[Path], out: Path, prices: Prices, tensorboard: Path | None = None) -> str:
    """Writes the report on the runs below `folders` to `out`, shows its conclusions, and returns its HTML page.

    Raises:
        RunFolderError: there is no run, a run cannot be read, or the report cannot be written.
    """
    with extras.importing("report", "The report"):
        from tfdist.study import page
    comparisons = results.of_runs(runs.load(folders), prices)
    html, picture = page.html(comparisons), page.picture(comparisons)
    written = {"report.html": html, "report.md": summary.markdown(comparisons, "report.svg" if picture else "")}
    written |= {"report.json": machine_readable.text(comparisons)}
    written |= {"report.svg": picture} if picture else {}
    if tensorboard is not None:
        files.require_writable(tensorboard / "events", "--tensorboard")
        write_events(comparisons, tensorboard)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in written.items():
            files.write_text(out / name, content)
    except OSError as error:
        raise RunFolderError(
            f"The report cannot be written to `{out}`: {error.strerror}", "use another `--out`"
        ) from error
    with terminal.guarded_stdout(needed=True):
        for comparison in comparisons:
            click.echo(summary.answer(comparison))
            _print(summary.speeds(comparison))
            if any(row.speed is not None and row.speed.low is not None for row in comparison.rows):
                click.echo("in parentheses: an interval that has the true ratio in at least 95 % of such studies")
            for line in (*summary.notes(comparison), *summary.doubtful(comparison)):
                click.echo(line)
        for line in summary.verdicts(verdicts.of(comparisons)):
            click.echo(line)
        click.echo(out / "report.html")
    return html


def _print(table: summary.Table) -> None:
    from rich.console import Console
    from rich.table import Table

    shown = Table(*table.headings, box=None, pad_edge=False)
    for row in table.rows:
        shown.add_row(*row)
    Console(soft_wrap=True, highlight=False, markup=False).print(shown)


def write_events(comparisons: Sequence[Comparison], folder: Path) -> None:
    """Writes the events of all runs below `folder`, with a folder for each run."""
    import tensorflow as tf

    with extras.importing("profile", "`--tensorboard`"):
        from tensorboard.plugins.hparams import api

    with tf.summary.create_file_writer(str(folder)).as_default():
        api.hparams_config(
            hparams=[api.HParam(name) for name in HYPERPARAMETERS], metrics=[api.Metric(name) for name in COLUMNS]
        )
    for comparison in comparisons:
        for row in comparison.rows:
            for run in row.runs:
                name = f"{run.cell.folder}-{run.round}"
                with tf.summary.create_file_writer(str(folder / name)).as_default():
                    api.hparams(_hyperparameters(run), trial_id=name)
                    _write_metrics(tf, run)


def _hyperparameters(run: Run) -> dict[str, Any]:
    cell, case = run.cell, run.cell.case
    values = (cell.label, cell.workers, case.model, case.dataset, case.batch_size, run.seed or 0)
    return dict(zip(HYPERPARAMETERS, values, strict=True))


def _write_metrics(tf: Any, run: Run) -> None:
    for epoch in run.epochs:
        figures = {
            "examples_per_second": epoch.examples_per_second,
            "step_seconds": epoch.step_seconds,
            **epoch.metrics,
        }
        for name, value in figures.items():
            if value is not None:
                tf.summary.scalar(name, value, step=epoch.epoch)


if __name__ == "__main__":
    command(prog_name="python -m tfdist.report")
