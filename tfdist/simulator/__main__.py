"""`python -m tfdist.simulator STUDY --out FOLDER`: runs a study on simulated workers."""

from __future__ import annotations

import time
from pathlib import Path

import click

from tfdist import extras, terminal
from tfdist.simulator import matrix


@click.command("simulator", cls=terminal.EstimateCommand, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("study", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), required=True, metavar="FOLDER", help="folder of the results")
def command(study: Path, out: Path) -> None:
    """Run all algorithms of the file STUDY, and write a table and a picture; existing results are reused."""
    plan = matrix.read(study)
    extras.require("report", "The picture of a study")
    out.mkdir(parents=True, exist_ok=True)
    results = matrix.Results.load(out)
    missing = [run for run in matrix.runs(plan) if run.key not in results.by_key]
    if missing:
        from tfdist.simulator.simulation import Runner

        runner = Runner()
        began = time.monotonic()
        for number, run in enumerate(missing):
            results.add(run, runner.last_epoch(run))
            run_seconds = (time.monotonic() - began) / (number + 1)
            minutes = run_seconds * (len(missing) - number - 1) / 60
            terminal.say(f"{run.entry.label} on {run.workers}, seed {run.seed}: about {minutes:.0f} minutes are left")
    text = matrix.table(plan, results.by_key)
    (out / matrix.TABLE).write_text(text, encoding="utf-8")
    matrix.draw(plan, results.by_key, out / matrix.PICTURE)
    with terminal.guarded_stdout(needed=True):
        click.echo(text)


if __name__ == "__main__":
    command(prog_name="python -m tfdist.simulator")
