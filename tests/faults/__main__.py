"""Runs the rows of the matrix: `python -m tests.faults --engine multiworker --markdown faults.md`."""

import sys
from pathlib import Path

import click
import pytest

from tests.faults import rows, table
from tests.faults.running import Result, run
from tests.selection import SEVENTHS


@click.command()
@click.option("--engine", help="the rows of one strategy only")
@click.option("--role", help="the rows in which this process meets the fault, such as `worker 1`")
@click.option("--fault", type=click.Choice(rows.FAULTS))
@click.option("--moment", type=click.Choice(rows.MOMENTS))
@click.option("--name", help="the row with this name, as `--list` shows it")
@click.option("--seventh", type=click.IntRange(0, SEVENTHS - 1), help="every seventh row, from this one")
@click.option("--list", "list_only", is_flag=True, help="show the rows, and run none")
@click.option("--markdown", type=click.Path(path_type=Path), help="write the table to this file")
@click.option("--output", "shows_output", is_flag=True, help="show the output of the processes of rows that fail")
def command(seventh, list_only, markdown, shows_output, **selected):
    chosen = [r for r in rows.ROWS if all(value in (None, getattr(r, name)) for name, value in selected.items())]
    chosen = chosen if seventh is None else chosen[seventh::SEVENTHS]
    if list_only:
        print("\n".join(row.name for row in chosen))
        return
    results = []
    for row in chosen:
        try:
            result = run(row)
        except pytest.skip.Exception as reason:
            result = Result(row, skipped=str(reason))
        print(table.line(result), flush=True)
        if result.problems and shows_output:
            print(table.output(result), flush=True)
        results.append(result)
        if markdown:
            markdown.write_text(table.markdown(results))
    print(table.summary(results))
    sys.exit(any(result.problems for result in results))


if __name__ == "__main__":
    command()
