"""`tfdist report RUNS...`: the report of any run folders, of one study or of several.

tfdist report studies/first studies/second --out both
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from tfdist import files, terminal
from tfdist.errors import RunFolderError
from tfdist.study import events, results, runs, text
from tfdist.study.prices import NO_PRICES, Prices

price_option = terminal.options_of("The report")(
    "--price", metavar="PRICE|FILE", help="price of this machine an hour, or a file of prices"
)


tensorboard_option = terminal.options_of("The report")(
    "--tensorboard",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="write the runs as events of TensorBoard, strategies side by side in its HParams table",
)


def prices_of(option: str | None) -> Prices:
    """The prices that the option says."""
    return NO_PRICES if option is None else Prices.parse(option)


@click.command("report", cls=terminal.Command, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("folders", metavar="RUNS...", nargs=-1, required=True, type=click.Path(path_type=Path))
@terminal.options_of("The report")(
    "--out",
    type=click.Path(path_type=Path),
    default=Path(),
    metavar="FOLDER",
    help="where it is written; by default the present folder",
)
@price_option
@tensorboard_option
def command(folders: tuple[Path, ...], out: Path, price: str | None, tensorboard: Path | None) -> None:
    """Draw the report of runs: folders of `tfdist train` and `tfdist compare`, or folders that hold some."""
    show(folders, out, prices_of(price), tensorboard)


def show(folders: Sequence[Path], out: Path, prices: Prices, tensorboard: Path | None = None) -> None:
    """Writes the report of the runs below `folders` to `out`, and shows its answers and tables.

    Raises:
        RunFolderError: there is no run, or one cannot be read; or the report cannot be written.
    """
    comparisons = results.of_runs(runs.load(folders), prices)
    path = out / "report.md"
    if tensorboard is not None:
        events.write(comparisons, tensorboard)
    try:
        out.mkdir(parents=True, exist_ok=True)
        files.write_text(path, text.report(comparisons))
    except OSError as error:
        raise RunFolderError(
            f"The report cannot be written to `{path}`: {error.strerror}", "name another `--out`"
        ) from error
    with terminal.any_stdout(needed=True):
        for one in comparisons:
            click.echo("\n".join([text.answer(one), *text.notes(one)]))
        click.echo(path)


def main() -> None:
    """The command."""
    command(prog_name="python -m tfdist.report")


if __name__ == "__main__":
    main()
