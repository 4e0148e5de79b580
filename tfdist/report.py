"""`tfdist report RUNS...`: the report of any run folders, of one study or of several.

    tfdist report studies/first studies/second --out both
    tfdist report studies/first --serve

It is a page, `report.html`, which loads nothing else, and `report.md` with the picture `report.svg`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import click

from tfdist import files, terminal
from tfdist.errors import RunFolderError
from tfdist.study import events, page, results, runs, serve, summary, text, verdicts
from tfdist.study.prices import NO_PRICES, Prices

_report = terminal.options_of("The report")
price_option = _report("--price", metavar="PRICE|FILE", help="price of this machine an hour, or a file of prices")
tensorboard_option = _report(
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
@_report(
    "--out",
    type=click.Path(path_type=Path),
    default=Path(),
    metavar="FOLDER",
    help="where it is written; by default the present folder",
)
@price_option
@tensorboard_option
@_report("--serve", "is_served", is_flag=True, help="show the page on this machine until Ctrl+C")
@_report("--port", type=int, default=0, metavar="PORT", help="of --serve; by default a free one")
def command(
    folders: tuple[Path, ...], out: Path, price: str | None, tensorboard: Path | None, is_served: bool, port: int
) -> None:
    """Draw the report of runs: folders of `tfdist train` and `tfdist compare`, or folders that hold some."""
    html = show(folders, out, prices_of(price), tensorboard)
    if is_served:
        with serve.serving(html, port) as server, suppress(KeyboardInterrupt):
            click.echo(f"The report is at {serve.address(server)} until Ctrl+C.")
            threading.Event().wait()


def show(folders: Sequence[Path], out: Path, prices: Prices, tensorboard: Path | None = None) -> str:
    """Writes the report of the runs below `folders` to `out`, and shows its answers; returns its page.

    Raises:
        RunFolderError: there is no run, or one cannot be read; or the report cannot be written.
    """
    comparisons = results.of_runs(runs.load(folders), prices)
    html, picture = page.html(comparisons), page.picture(comparisons)
    written = {"report.html": html, "report.md": text.report(comparisons, "report.svg" if picture else "")}
    written |= {"report.svg": picture} if picture else {}
    if tensorboard is not None:
        events.write(comparisons, tensorboard)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in written.items():
            files.write_text(out / name, content)
    except OSError as error:
        raise RunFolderError(
            f"The report cannot be written to `{out}`: {error.strerror}", "name another `--out`"
        ) from error
    with terminal.guarded_stdout(needed=True):
        for one in comparisons:
            click.echo("\n".join([summary.answer(one), *summary.notes(one)]))
        for line in summary.verdicts(verdicts.of(comparisons)):
            click.echo(line)
        click.echo(out / "report.html")
    return html


def main() -> None:
    """The command."""
    command(prog_name="python -m tfdist.report")


if __name__ == "__main__":
    main()
