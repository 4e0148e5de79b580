"""`tfdist profile RUN`: shows the time of a run's traced steps by layer and by operation type, and what to try first.

tfdist train --model cnn --dataset digits --strategy custom --profile 10:20 --run-dir run
tfdist profile run
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click

from tfdist import terminal
from tfdist.errors import UsageError
from tfdist.profiling import breakdown, stages, trace

LEAST_SHARE = 0.0005  # rounds to 0.1 %


@click.command("profile", cls=terminal.Command)
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@terminal.options_of("Profile")("--top", type=int, default=10, show_default=True, help="rows of each table")
def command(run: Path, top: int) -> None:
    """Show the time of the traced steps in the run folder RUN by cause, their bottleneck, and what to try first."""
    if top < 1:
        raise UsageError(f"`--top` is {top}", "show at least one row")
    summary = trace.summarize(run, top=None)
    if not summary.steps:
        raise UsageError(
            f"The trace in `{run}` has no step markers",
            "trace training steps with `--profile 10:20` or the `Profile` callback",
        )
    with terminal.guarded_stdout(needed=True):
        click.echo(f"{terminal.counted(summary.steps, 'traced step')}; shares of the time of all operations")
        click.echo(_table("layer", breakdown.by_layer(summary.ops), top))
        click.echo(_table("kind", breakdown.by_kind(summary.ops), top))
        click.echo(_table("operation", {f"{op.name}  ({op.type})": op.share for op in summary.ops}, top))
        if summary.breakdown is not None:
            click.echo(f"\n{breakdown.as_text(summary.breakdown)}")
            click.echo(breakdown.advice(summary.breakdown.shares(), "the first table has the layers that take longest"))
        if summary.stages is not None:
            click.echo(stages.as_text(summary.stages))
        click.echo(f"`tensorboard --logdir {_logs(run)}` shows these steps on a time line, in its tab PROFILE.")


def _logs(run: Path) -> Path:
    """The folder of TensorBoard's files of a run, or the folder that holds only these."""
    return run / "tensorboard" if (run / "tensorboard").is_dir() else run


def _table(heading: str, shares: Mapping[str, float], top: int) -> str:
    """A table of the largest shares. Names are not shortened, so that they remain distinct."""
    rows = [(f"{share:.1%}", name) for name, share in list(shares.items())[:top]]
    remaining = sum(list(shares.values())[top:])
    rows += [(f"{remaining:.1%}", "all others")] if remaining >= LEAST_SHARE else []
    return "\n".join(["", f"share   {heading}", *(f"{share:>6}  {name}" for share, name in rows)])


if __name__ == "__main__":
    command(prog_name="python -m tfdist.profile")
