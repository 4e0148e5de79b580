"""`python -m tfdist.simulator STUDY --out FOLDER`: runs a study on simulated workers."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click

from tfdist import terminal
from tfdist.simulator import matrix


@click.command("simulator", cls=terminal.Command, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("study", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), required=True, metavar="FOLDER", help="of the results")
def command(study: Path, out: Path) -> None:
    """Run all algorithms of the file STUDY, and write a table and a picture; what is there is not run again."""
    plan = matrix.read(study)
    out.mkdir(parents=True, exist_ok=True)
    results = matrix.Results.of(out)
    left = [run for run in matrix.runs(plan) if run.key not in results.found]
    if left:
        from tfdist.simulator.batch import Runner

        runner = Runner()
        began = time.monotonic()
        for number, run in enumerate(left):
            results.add(run, runner.last_epoch(run))
            each = (time.monotonic() - began) / (number + 1)
            minutes = each * (len(left) - number - 1) / 60
            terminal.say(f"{run.entry.label} on {run.workers}, seed {run.seed}: about {minutes:.0f} minutes are left")
    text = matrix.table(plan, results.found)
    (out / matrix.TABLE).write_text(text, encoding="utf-8")
    matrix.draw(plan, results.found, out / matrix.PICTURE)
    with terminal.guarded_stdout(needed=True):
        click.echo(text)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    command(prog_name="python -m tfdist.simulator")
